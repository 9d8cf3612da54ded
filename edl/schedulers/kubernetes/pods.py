"""Interprets pods and their hosts: which are about to be removed, and why others have not started. Pure: JSON in, text
and numbers out."""

from __future__ import annotations

import collections
from collections.abc import Collection

from edl.rendezvous.phrases import count, cut
from edl.schedulers.kubernetes.client import Json

REMOVAL_TAINTS = (
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    "cloud.google.com/impending-node-termination",
    "aws-node-termination-handler/",
    "node.kubernetes.io/out-of-service",
    "node.cloudprovider.kubernetes.io/shutdown",
)
"""Prefixes of taints that announce the removal of a host, whatever their effect. Other taints count only with
NoExecute."""
LONGEST_WORDS = 200
"""Limit on the characters of a reason."""


def name_of(pod: Json) -> str:
    """The name of a pod or a host."""
    return str(pod["metadata"]["name"])


def terminating(pod: Json) -> bool:
    """Whether the pod is being deleted."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def finished(pod: Json) -> bool:
    """Whether all containers of the pod have ended for good."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def placed(pod: Json) -> bool:
    """Whether the pod has been assigned to a host, and is neither terminating nor finished."""
    return bool(pod.get("spec", {}).get("nodeName")) and not terminating(pod) and not finished(pod)


def pending_removal(pod: Json) -> tuple[str, float] | None:
    """Why a pod will be removed, and in how many seconds (0: unknown); None if it will not.

    Clocks of different hosts are not compared, so the time is the whole grace period, counted from now.
    """
    if finished(pod):
        return None
    disrupted = _condition(pod, "DisruptionTarget")
    if disrupted is None and not terminating(pod):
        return None
    lead_s = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0) if terminating(pod) else 0.0
    if disrupted is None:
        return "the pod is being deleted", lead_s
    reason, said = str(disrupted.get("reason", "")), str(disrupted.get("message", ""))
    return f"{reason or 'DisruptionTarget'}: {said}"[:LONGEST_WORDS] if said else reason, lead_s


def removal_by_taint(pod: Json, host: Json | None) -> tuple[str, float] | None:
    """Like ``pending_removal``, but from the taints of the pod's host."""
    if host is None or finished(pod):
        return None
    for taint in host.get("spec", {}).get("taints") or []:
        key, effect = str(taint.get("key", "")), taint.get("effect")
        lead_s = _tolerated_s(pod, taint) if effect == "NoExecute" else 0.0
        if lead_s is None:
            continue
        if effect == "NoExecute" or key.startswith(REMOVAL_TAINTS):
            return f"its host {name_of(host)} has the taint {key}", lead_s
    return None


def of_host(host: Json) -> Json:
    """The relevant part of a host: its name and taints. A cluster may have thousands of hosts, and each updates its
    status every few minutes."""
    about = {"name": name_of(host)}
    return {"metadata": about, "spec": {"taints": host.get("spec", {}).get("taints") or []}}


def pending_reasons(pods: Collection[Json], wanted: int) -> str:
    """Why pods have not started, in the words of Kubernetes; empty: nothing is pending. ``wanted``: number of pods
    that should exist."""
    reasons: collections.Counter[str] = collections.Counter()
    here = 0
    for pod in pods:
        if terminating(pod):
            continue
        here += 1
        if reason := _pending_reason(pod):
            reasons[reason] += 1
    parts = [f"{count(many, 'pod')} pending: {reason}" for reason, many in sorted(reasons.items())]
    if here < wanted:
        parts.append(f"{count(wanted - here, 'pod')} not created yet")
    return "; ".join(parts)


def _pending_reason(pod: Json) -> str:
    status = pod.get("status", {})
    if finished(pod):
        return ""
    if not pod.get("spec", {}).get("nodeName"):
        condition = _condition(pod, "PodScheduled", "False")
        if condition is None:
            return "waiting for the scheduler"
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
    """Seconds that a pod tolerates a taint; None: indefinitely."""
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
    return cut(text, LONGEST_WORDS)
