"""What pods, and the hosts they are on, say about the nodes of a job. Pure: JSON in, words and numbers out."""

from __future__ import annotations

import collections
from collections.abc import Collection

from edl.rendezvous.phrases import count
from edl.schedulers.kubernetes.client import Json

TELLING_TAINTS = (
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    "cloud.google.com/impending-node-termination",
    "aws-node-termination-handler/",
    "node.kubernetes.io/out-of-service",
    "node.cloudprovider.kubernetes.io/shutdown",
)
"""Beginnings of taints that say that a host goes away, whatever their effect. Any other one counts with NoExecute."""
LONGEST_WORDS = 200


def name_of(pod: Json) -> str:
    """Its name; that of a host as well."""
    return str(pod["metadata"]["name"])


def going(pod: Json) -> bool:
    """It is being deleted."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def over(pod: Json) -> bool:
    """All its containers have ended for good."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def placed(pod: Json) -> bool:
    """It has a host, and is to stay there."""
    return bool(pod.get("spec", {}).get("nodeName")) and not going(pod) and not over(pod)


def doom(pod: Json) -> tuple[str, float] | None:
    """Why a pod is going to be taken away, and the seconds it has; None when it is not.

    Clocks of different hosts are not compared, so the time is the whole grace period, which runs from about now.
    """
    if over(pod):
        return None
    disrupted = _condition(pod, "DisruptionTarget")
    if disrupted is None and not going(pod):
        return None
    lead_s = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0) if going(pod) else 0.0
    if disrupted is None:
        return "the pod is being deleted", lead_s
    reason, said = str(disrupted.get("reason", "")), str(disrupted.get("message", ""))
    return f"{reason or 'DisruptionTarget'}: {said}"[:LONGEST_WORDS] if said else reason, lead_s


def doom_by_host(pod: Json, host: Json | None) -> tuple[str, float] | None:
    """The same for what the taints of its host say."""
    if host is None or over(pod):
        return None
    for taint in host.get("spec", {}).get("taints") or []:
        key, effect = str(taint.get("key", "")), taint.get("effect")
        lead_s = _tolerated_s(pod, taint) if effect == "NoExecute" else 0.0
        if lead_s is None:
            continue
        if effect == "NoExecute" or key.startswith(TELLING_TAINTS):
            return f"its host {name_of(host)} has the taint {key}", lead_s
    return None


def of_host(host: Json) -> Json:
    """What of a host matters: a cluster may have thousands, and each says each few minutes that it is well."""
    about = {"name": name_of(host)}
    return {"metadata": about, "spec": {"taints": host.get("spec", {}).get("taints") or []}}


def held_up(pods: Collection[Json], wanted: int) -> str:
    """What keeps nodes from coming, in the scheduler's words; empty: nothing."""
    reasons: collections.Counter[str] = collections.Counter()
    here = 0
    for pod in pods:
        if going(pod):
            continue
        here += 1
        if reason := _obstacle(pod):
            reasons[reason] += 1
    parts = [f"{count(many, 'pod')} pending: {reason}" for reason, many in sorted(reasons.items())]
    if here < wanted:
        parts.append(f"{count(wanted - here, 'pod')} not made yet")
    return "; ".join(parts)


def _obstacle(pod: Json) -> str:
    status = pod.get("status", {})
    if over(pod):
        return ""
    if not pod.get("spec", {}).get("nodeName"):
        condition = _condition(pod, "PodScheduled", "False")
        if condition is None:
            return "waits for the scheduler"
        return _short(str(condition.get("message") or condition.get("reason") or "cannot be scheduled"))
    for container in status.get("containerStatuses") or []:
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            said = f": {waiting['message']}" if waiting.get("message") else ""
            return _short(f"{waiting['reason']}{said}")
    return ""


def _condition(pod: Json, kind: str, status: str = "True") -> Json | None:
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition.get("type") == kind and condition.get("status") == status:
            found: Json = condition
            return found
    return None


def _tolerated_s(pod: Json, taint: Json) -> float | None:
    """Seconds that a pod may stay in spite of a taint; None: for ever."""
    for toleration in pod.get("spec", {}).get("tolerations") or []:
        if toleration.get("effect") not in (None, "", taint.get("effect")):
            continue
        key = toleration.get("key")
        if key and key != taint.get("key"):
            continue
        exists = toleration.get("operator") == "Exists"
        if exists or toleration.get("value", "") == taint.get("value", ""):
            seconds = toleration.get("tolerationSeconds")
            return None if seconds is None else float(seconds)
    return 0.0


def _short(text: str) -> str:
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= LONGEST_WORDS else text[: LONGEST_WORDS - 1] + "…"
