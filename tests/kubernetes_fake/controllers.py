"""StatefulSet and Indexed Job controllers, and a scheduler with room for so many pods."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from tests.kubernetes_fake.kinds import JOBS, NODES, PODS, STATEFUL_SETS
from tests.kubernetes_fake.server import delete_pod
from tests.kubernetes_fake.store import Json, Resource, Store, at, now

INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass
class Controllers:
    """All of them; ``run`` acts whenever something changes."""

    store: Store
    host: str = "fake-host"
    room: int = 1_000_000
    """Pods that the only host has room for."""
    _random: int = field(default=0)

    def __post_init__(self) -> None:
        self.store.create(NODES, "", {"metadata": {"name": self.host}, "spec": {}})

    async def run(self) -> None:
        while True:
            before = self.store.version
            for entry in self.store.list(STATEFUL_SETS):
                self._stateful_set(entry)
            for entry in self.store.list(JOBS):
                self._job(entry)
            self._place()
            if self.store.version == before:
                await self.store.news()

    # --- StatefulSet ---------------------------------------------------------------------------------------------

    def _stateful_set(self, entry: Json) -> None:
        spec, name = entry["spec"], entry["metadata"]["name"]
        wanted = spec.get("replicas", 1)
        pods = {_ordinal(pod): pod for pod in self._owned(entry)}
        parallel = spec.get("podManagementPolicy") == "Parallel"
        self._restart(pods)
        for number in range(wanted):
            pod = pods.get(number)
            if pod is None:
                labels = {"statefulset.kubernetes.io/pod-name": f"{name}-{number}"}
                labels["apps.kubernetes.io/pod-index"] = str(number)
                self._make(STATEFUL_SETS, entry, f"{name}-{number}", labels, hostname=f"{name}-{number}")
            if not parallel and (pod is None or not _ready(pod)):
                break
        # The highest goes first; one after the other unless Parallel.
        for number in sorted((one for one in pods if one >= wanted), reverse=True):
            if "deletionTimestamp" not in pods[number]["metadata"]:
                delete_pod(self.store, entry["metadata"]["namespace"], f"{name}-{number}")
            if not parallel:
                break
        pods = {_ordinal(pod): pod for pod in self._owned(entry)}
        status = {
            "replicas": len(pods),
            "readyReplicas": sum(map(_ready, pods.values())),
            "availableReplicas": sum(map(_ready, pods.values())),
            "observedGeneration": entry["metadata"]["generation"],
        }
        self._say(STATEFUL_SETS, entry, {**entry["status"], **status})

    def _restart(self, pods: dict[int, Json]) -> None:
        """Pods that are over are deleted and made again; those with restartPolicy Always never are over by exiting."""
        for number, pod in list(pods.items()):
            if at(pod, "status.phase") in ("Failed", "Succeeded") and "deletionTimestamp" not in pod["metadata"]:
                delete_pod(self.store, pod["metadata"]["namespace"], pod["metadata"]["name"])
                del pods[number]

    # --- Indexed Job ---------------------------------------------------------------------------------------------

    def _job(self, entry: Json) -> None:
        spec, status = entry["spec"], entry["status"]
        if any(one["type"] in ("Complete", "Failed") for one in status.get("conditions", [])):
            return
        completions = spec["completions"]
        done = {number for number in _numbers(status.get("completedIndexes", "")) if number < completions}
        counted = set(status.get("uncountedTerminatedPods", {}).get("seen", []))
        failed = status.get("failed", 0)
        pods = self._owned(entry)
        for pod in pods:
            uid, phase = pod["metadata"]["uid"], at(pod, "status.phase")
            if uid in counted or phase not in ("Succeeded", "Failed"):
                continue
            counted.add(uid)
            if phase == "Succeeded":
                done |= {number for number in [_index(pod)] if number < completions}
            elif _index(pod) < completions:
                action = _policy(spec, pod)
                if action == "FailJob":
                    self._finish(entry, "Failed", "PodFailurePolicy")
                    return
                failed += action == "Count"
        changed = {**status, "failed": failed, "succeeded": len(done), "completedIndexes": _ranges(done)}
        changed["uncountedTerminatedPods"] = {"seen": sorted(counted)}
        active = [pod for pod in pods if at(pod, "status.phase") not in ("Succeeded", "Failed")]
        changed["active"] = len([pod for pod in active if "deletionTimestamp" not in pod["metadata"]])
        entry = self._say(JOBS, entry, changed)
        if failed > spec.get("backoffLimit", 6):
            self._finish(entry, "Failed", "BackoffLimitExceeded")
        elif len(done) == completions:
            self._finish(entry, "Complete", "CompletionsReached")
        elif not spec.get("suspend"):
            self._populate(entry, active, done)

    def _populate(self, entry: Json, active: list[Json], done: set[int]) -> None:
        spec, name = entry["spec"], entry["metadata"]["name"]
        for pod in active:
            if _index(pod) >= spec["completions"] and "deletionTimestamp" not in pod["metadata"]:
                delete_pod(self.store, pod["metadata"]["namespace"], pod["metadata"]["name"])
        # With podReplacementPolicy Failed a pod that is being deleted still holds its index.
        held = {
            _index(pod)
            for pod in active
            if "deletionTimestamp" not in pod["metadata"] or spec.get("podReplacementPolicy") == "Failed"
        }
        free = [number for number in range(spec["completions"]) if number not in held | done]
        for number in free[: max(0, spec["parallelism"] - len(held))]:
            self._random += 1
            labels = {INDEX: str(number), "job-name": name, "batch.kubernetes.io/job-name": name}
            labels["batch.kubernetes.io/controller-uid"] = entry["metadata"]["uid"]
            pod_name = f"{name}-{number}-{self._random:05x}"
            self._make(JOBS, entry, pod_name, labels, hostname=f"{name}-{number}", index=number)

    def _finish(self, entry: Json, kind: str, reason: str) -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "lastTransitionTime": now()}
        self._say(JOBS, entry, {**entry["status"], "conditions": [condition]})
        for pod in self._owned(entry):
            if at(pod, "status.phase") not in ("Succeeded", "Failed") and "deletionTimestamp" not in pod["metadata"]:
                delete_pod(self.store, pod["metadata"]["namespace"], pod["metadata"]["name"])

    # --- both ----------------------------------------------------------------------------------------------------

    def _owned(self, entry: Json) -> list[Json]:
        return [pod for (full, _, _), pod in self.store.owned(entry["metadata"]["uid"]) if full == PODS.full]

    def _make(
        self, resource: Resource, owner: Json, name: str, labels: dict[str, str], *, hostname: str, index: int = -1
    ) -> None:
        template = copy.deepcopy(owner["spec"]["template"])
        about = template.get("metadata", {})
        reference = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
        spec = {**template["spec"], "hostname": hostname}
        spec.setdefault("restartPolicy", "Always")
        spec.setdefault("terminationGracePeriodSeconds", 30)
        if "serviceName" in owner["spec"]:
            spec["subdomain"] = owner["spec"]["serviceName"]
        annotations = dict(about.get("annotations", {}))
        if index >= 0:
            annotations[INDEX] = str(index)
            for container in spec["containers"]:
                source = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
                container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "valueFrom": source})
        labels = {**about.get("labels", {}), **labels}
        about = {"name": name, "labels": labels, "annotations": annotations, "ownerReferences": [reference]}
        pod = {"metadata": about, "spec": spec, "status": {"phase": "Pending"}}
        self.store.create(PODS, owner["metadata"]["namespace"], pod)

    def _say(self, resource: Resource, entry: Json, status: Json) -> Json:
        fresh = self.store.get(resource, entry["metadata"]["namespace"], entry["metadata"]["name"])
        if fresh["status"] == status:
            return fresh
        return self.store.update(resource, entry["metadata"]["namespace"], {**fresh, "status": status})

    def _place(self) -> None:
        """Give hosts to pods, as far as there is room, the oldest first."""
        pods = sorted(self.store.list(PODS), key=lambda pod: int(pod["metadata"]["resourceVersion"]))
        over = ("Succeeded", "Failed")
        used = sum(1 for pod in pods if at(pod, "spec.nodeName") and at(pod, "status.phase") not in over)
        for pod in pods:
            if at(pod, "spec.nodeName") or "deletionTimestamp" in pod["metadata"]:
                continue
            condition = {"type": "PodScheduled", "status": "True"}
            if used < self.room:
                used += 1
                pod["spec"]["nodeName"] = self.host
            else:
                message = "0/1 nodes are available: 1 Insufficient cpu. preemption: 0/1 nodes are available."
                condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            pod["status"]["conditions"] = [condition]
            self.store.update(PODS, pod["metadata"]["namespace"], pod)


def _ordinal(pod: Json) -> int:
    return int(pod["metadata"]["name"].rpartition("-")[2])


def _index(pod: Json) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def _ready(pod: Json) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in at(pod, "status.conditions", []))


def _policy(spec: Json, pod: Json) -> str:
    """The action of the first rule of podFailurePolicy that meets this pod."""
    conditions = {(one["type"], one["status"]) for one in at(pod, "status.conditions", [])}
    codes = [at(one, "state.terminated.exitCode", 0) for one in at(pod, "status.containerStatuses", [])]
    for rule in at(spec, "podFailurePolicy.rules", []):
        for pattern in rule.get("onPodConditions", []):
            if (pattern["type"], pattern.get("status", "True")) in conditions:
                return str(rule["action"])
        if "onExitCodes" in rule:
            wanted, inside = rule["onExitCodes"]["values"], rule["onExitCodes"]["operator"] == "In"
            if any(code and (code in wanted) == inside for code in codes):
                return str(rule["action"])
    return "Count"


def _numbers(text: str) -> set[int]:
    """Parse numbers such as ``0,2-4``."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _ranges(numbers: set[int]) -> str:
    """The other way; without joining neighbours, which a reader must understand as well."""
    return ",".join(str(number) for number in sorted(numbers))
