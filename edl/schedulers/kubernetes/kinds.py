"""Where each kind of object stores its size, and how to change it. Pure: JSON in, JSON out.

Every patch contains the ``resourceVersion`` that was read, so that the API server refuses it with 409 if the object has
changed since.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from edl.errors import SchedulerError, SettingError
from edl.schedulers.kubernetes.access import Options
from edl.schedulers.kubernetes.client import ApiTarget, Json

MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""Matches valid Kubernetes names."""
FORMS = "statefulset/NAME, job/NAME, custom:GROUP/VERSION/PLURAL/NAME, volcano/NAME or paddlejob/NAME"


@dataclass(frozen=True, slots=True)
class Patch:
    """The body of a PATCH request that changes the size."""

    body: object
    content_type: str = MERGE_PATCH


class Workload(Protocol):
    """One object whose size is the number of the job's nodes."""

    @property
    def title(self) -> str:
        """Kind and name, such as ``statefulset/train``."""
        ...

    @property
    def target(self) -> ApiTarget:
        """The API path at which the size is read and changed."""
        ...

    @property
    def indexed(self) -> bool:
        """Whether it removes pods by their index, the highest first."""
        ...

    @property
    def completes(self) -> bool:
        """Whether its pods may complete. Other kinds restart pods that have ended, unless they are scaled to 0."""
        ...

    def nodes(self, found: Json) -> int:
        """The size in the JSON that was read at ``target``. Raises ``SchedulerError`` if edl cannot use the object."""
        ...

    def patch(self, found: Json, nodes: int) -> Patch:
        """The patch that changes the size to ``nodes``. Raises ``SchedulerError`` if it cannot be changed."""
        ...

    def selector(self, found: Json) -> str:
        """Label selector of the pods; empty if unknown."""
        ...

    def mine(self, pod: Json) -> bool:
        """Whether a pod with these labels is one of this job's nodes."""
        ...

    def index(self, pod: str) -> int:
        """The index in a pod's name; -1: none."""
        ...

    def makes(self, node: str) -> bool:
        """Whether a node of this name may be one of its pods. Called only if ``completes`` is false."""
        ...


@dataclass(frozen=True, slots=True)
class Scaled:
    """A StatefulSet, or any resource with a scale subresource (autoscaling/v1 Scale)."""

    title: str
    target: ApiTarget
    name: str
    indexed: bool
    labels: str = ""
    completes: bool = False

    def nodes(self, found: Json) -> int:
        """``spec.replicas`` of the scale."""
        # The API server omits the field when it is 0.
        return int(found.get("spec", {}).get("replicas", 0))

    def patch(self, found: Json, nodes: int) -> Patch:
        """A merge patch of ``spec.replicas``."""
        return Patch({"metadata": _version(found), "spec": {"replicas": nodes}})

    def selector(self, found: Json) -> str:
        """The configured labels, or the selector in the scale's status."""
        return self.labels or str(found.get("status", {}).get("selector", ""))

    def mine(self, pod: Json) -> bool:
        """Always true: the selector matches only this object's pods."""
        return True

    def index(self, pod: str) -> int:
        """The ordinal at the end of the pod's name, if the object removes pods by index."""
        return _ordinal(self.name, pod) if self.indexed else -1

    def makes(self, node: str) -> bool:
        """Whether the name is that of a pod, or one that a launcher without ``--node-id`` derives from it (four
        hexadecimal digits are appended). How a custom resource names its pods is unknown, so any suffix is accepted."""
        rest = r"\d+(?:-[0-9a-f]{4})?" if self.title.startswith("statefulset/") else ".+"
        return re.fullmatch(f"{re.escape(self.name)}-{rest}", node) is not None


@dataclass(frozen=True, slots=True)
class IndexedJob:
    """A batch/v1 Job with ``completionMode: Indexed``, which can be resized since Kubernetes 1.27."""

    title: str
    target: ApiTarget
    name: str
    labels: str = ""
    indexed: bool = True
    completes: bool = True

    def nodes(self, found: Json) -> int:
        """``spec.completions``. Raises ``SchedulerError`` unless the Job is Indexed."""
        spec = found.get("spec", {})
        if spec.get("completionMode") != "Indexed":
            text = (
                f"{self.title} has completionMode {spec.get('completionMode', 'NonIndexed')}; only Indexed can resize"
            )
            raise SchedulerError(text, retry=False)
        return int(spec.get("completions") or 0)

    def patch(self, found: Json, nodes: int) -> Patch:
        """A merge patch of completions and parallelism. Raises ``SchedulerError`` if the Job has finished."""
        for condition in found.get("status", {}).get("conditions") or []:
            if condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True":
                raise SchedulerError(f"{self.title} has ended ({condition['type']}) and cannot be resized", retry=False)
        # The API server accepts new completions only together with an equal parallelism.
        return Patch({"metadata": _version(found), "spec": {"parallelism": nodes, "completions": nodes}})

    def selector(self, found: Json) -> str:
        """The configured labels, the Job's own selector, or the label with the Job's name."""
        return self.labels or _labels(found.get("spec", {}).get("selector")) or f"job-name={self.name}"

    def mine(self, pod: Json) -> bool:
        """Always true: the selector matches only this Job's pods."""
        return True

    def makes(self, node: str) -> bool:
        """Whether the name contains an index of this Job."""
        return self.index(node) >= 0

    def index(self, pod: str) -> int:
        """The completion index in the pod's name."""
        # NAME-INDEX-RANDOM; a long NAME may be truncated.
        found = re.fullmatch(rf"{re.escape(self.name)}-(\d+)-[a-z0-9]+", pod)
        return int(found[1]) if found else -1


@dataclass(frozen=True, slots=True)
class VolcanoJob:
    """A batch.volcano.sh/v1alpha1 Job, of which one task's replicas are the nodes."""

    title: str
    target: ApiTarget
    name: str
    task: str = ""
    labels: str = ""
    indexed: bool = True
    completes: bool = True

    def nodes(self, found: Json) -> int:
        """``replicas`` of the task."""
        return int(self._task(found)[1].get("replicas", 0))

    def patch(self, found: Json, nodes: int) -> Patch:
        """A JSON patch of the task's replicas, which lowers ``minAvailable`` if there would be fewer pods."""
        place, _ = self._task(found)
        tasks: list[Json] = found["spec"]["tasks"]
        total = nodes + sum(int(task.get("replicas", 0)) for at, task in enumerate(tasks) if at != place)
        # minAvailable, the number of pods that are scheduled together, is never raised: additional nodes are optional.
        least = min(int(found["spec"].get("minAvailable") or total), total)
        own_least = tasks[place].get("minAvailable")
        changes = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": found["metadata"]["resourceVersion"]},
            {"op": "replace", "path": f"/spec/tasks/{place}/replicas", "value": nodes},
            {"op": "add", "path": "/spec/minAvailable", "value": least},
        ]
        if own_least is not None and own_least > nodes:
            changes.append({"op": "replace", "path": f"/spec/tasks/{place}/minAvailable", "value": nodes})
        return Patch(changes, JSON_PATCH)

    def selector(self, found: Json) -> str:
        """The configured labels, or those for the Job's name and task."""
        return self.labels or f"volcano.sh/job-name={self.name},volcano.sh/task-spec={self._task(found)[1]['name']}"

    def mine(self, pod: Json) -> bool:
        """Always true: the selector matches only this Job's pods."""
        return True

    def makes(self, node: str) -> bool:
        """Whether the name contains an index of this Job's task."""
        return self.index(node) >= 0

    def index(self, pod: str) -> int:
        """The index at the end of the pod's name, if the pod belongs to the task."""
        found = re.fullmatch(rf"{re.escape(self.name)}-(?P<task>.+)-(?P<index>\d+)", pod)
        return int(found["index"]) if found and self.task in ("", found["task"]) else -1

    def _task(self, found: Json) -> tuple[int, Json]:
        """Position and content of the configured task. Raises ``SchedulerError`` if there is none."""
        tasks: list[Json] = found.get("spec", {}).get("tasks") or []
        names = [str(task.get("name", "")) for task in tasks]
        wanted = self.task or (names[0] if len(names) == 1 else "worker")
        if wanted not in names:
            known = ", ".join(names) or "none"
            text = f"{self.title} has no task {wanted} (tasks: {known}). Name one with --scheduler-conf=task=NAME"
            raise SchedulerError(text, retry=False)
        return names.index(wanted), tasks[names.index(wanted)]


@dataclass(frozen=True, slots=True)
class PaddleJob:
    """A batch.paddlepaddle.org/v1 PaddleJob of the Paddle operators, which has no ``/scale``."""

    title: str
    target: ApiTarget
    name: str
    labels: str = ""
    indexed: bool = True
    completes: bool = True

    def nodes(self, found: Json) -> int:
        """``spec.worker.replicas``. Raises ``SchedulerError`` if there is no ``spec.worker``."""
        worker = found.get("spec", {}).get("worker")
        if not isinstance(worker, dict):
            raise SchedulerError(f"{self.title} has no spec.worker", retry=False)
        return int(worker.get("replicas", 0))

    def patch(self, found: Json, nodes: int) -> Patch:
        """A merge patch of ``spec.worker.replicas``."""
        return Patch({"metadata": _version(found), "spec": {"worker": {"replicas": nodes}}})

    def selector(self, found: Json) -> str:
        """The configured labels, or the operator's label for workers."""
        return self.labels or "paddle-res-type=worker"

    def mine(self, pod: Json) -> bool:
        """Whether this PaddleJob owns the pod."""
        # The operator's labels do not contain the job's name; the owner references do.
        owners = pod.get("metadata", {}).get("ownerReferences") or []
        return any(owner.get("kind") == "PaddleJob" and owner.get("name") == self.name for owner in owners)

    def makes(self, node: str) -> bool:
        """Whether the name contains an index of this job's workers."""
        return self.index(node) >= 0

    def index(self, pod: str) -> int:
        """The index at the end of the pod's name."""
        return _ordinal(f"{self.name}-worker", pod)


def kind_from(wanted: str, options: Options) -> Workload:
    """The workload that ``--scheduler`` names. Raises ``SettingError``."""
    space = f"namespaces/{options.namespace}"
    if wanted.startswith("custom:"):
        return _custom(wanted, options, space)
    word, _, name = wanted.partition("/")
    if not NAME.fullmatch(name):
        raise SettingError("--scheduler", wanted, f"must be {FORMS}")
    match word:
        case "statefulset":
            target = ApiTarget(f"/apis/apps/v1/{space}/statefulsets/{name}/scale", "apps", "statefulsets/scale")
            return Scaled(wanted, target, name, True, options.selector)
        case "job":
            target = ApiTarget(f"/apis/batch/v1/{space}/jobs/{name}", "batch", "jobs")
            return IndexedJob(wanted, target, name, options.selector)
        case "volcano":
            target = ApiTarget(f"/apis/batch.volcano.sh/v1alpha1/{space}/jobs/{name}", "batch.volcano.sh", "jobs")
            return VolcanoJob(wanted, target, name, options.task, options.selector)
        case "paddlejob":
            group = "batch.paddlepaddle.org"
            return PaddleJob(
                wanted,
                ApiTarget(f"/apis/{group}/v1/{space}/paddlejobs/{name}", group, "paddlejobs"),
                name,
                options.selector,
            )
    raise SettingError("--scheduler", wanted, f"must be {FORMS}")


def _custom(wanted: str, options: Options, space: str) -> Scaled:
    parts = wanted.removeprefix("custom:").split("/")
    if len(parts) != 4 or not all(NAME.fullmatch(part) for part in parts):
        raise SettingError("--scheduler", wanted, "must be custom:GROUP/VERSION/PLURAL/NAME")
    group, version, plural, name = parts
    target = ApiTarget(f"/apis/{group}/{version}/{space}/{plural}/{name}/scale", group, f"{plural}/scale")
    return Scaled(wanted, target, name, options.indexed, options.selector)


def _version(found: Json) -> Mapping[str, Any]:
    return {"resourceVersion": found["metadata"]["resourceVersion"]}


def _labels(selector: Json | None) -> str:
    """``matchLabels`` as the text of a label selector; empty if the selector also has ``matchExpressions``."""
    if not selector or selector.get("matchExpressions"):
        return ""
    return ",".join(f"{key}={value}" for key, value in sorted((selector.get("matchLabels") or {}).items()))


def _ordinal(stem: str, pod: str) -> int:
    found = re.fullmatch(rf"{re.escape(stem)}-(\d+)", pod)
    return int(found[1]) if found else -1
