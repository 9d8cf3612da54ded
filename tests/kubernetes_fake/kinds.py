"""Resources that the fake server supports, and their validation."""

from __future__ import annotations

from typing import Any

from tests.kubernetes_fake.store import ApiFailure, Check, Json, Resource, at

PODS = Resource("", "v1", "pods", "Pod", short=("po",))
NODES = Resource("", "v1", "nodes", "Node", namespaced=False, short=("no",))
SERVICES = Resource("", "v1", "services", "Service", short=("svc",))
ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount", short=("sa",))
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap", short=("cm",))
STATEFUL_SETS = Resource("apps", "v1", "statefulsets", "StatefulSet", short=("sts",), replicas="spec.replicas")
JOBS = Resource("batch", "v1", "jobs", "Job")
BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", short=("pdb",))
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
VOLCANO_JOBS = Resource("batch.volcano.sh", "v1alpha1", "jobs", "Job", short=("vcjob",))
PADDLE_JOBS = Resource("batch.paddlepaddle.org", "v1", "paddlejobs", "PaddleJob", short=("pdj",))
PYTORCH_JOBS = Resource(
    "kubeflow.org",
    "v1",
    "pytorchjobs",
    "PyTorchJob",
    replicas="spec.pytorchReplicaSpecs.Worker.replicas",
    status_replicas="status.replicaStatuses.Worker.active",
    selector="status.replicaStatuses.Worker.selector",
)
RESOURCES = (
    PODS,
    NODES,
    SERVICES,
    ACCOUNTS,
    CONFIG_MAPS,
    STATEFUL_SETS,
    JOBS,
    BUDGETS,
    ROLES,
    BINDINGS,
    VOLCANO_JOBS,
    PADDLE_JOBS,
    PYTORCH_JOBS,
)
BUILT_IN = {"", "apps", "batch", "policy", "rbac.authorization.k8s.io"}


def _invalid(kind: str, entry: Json, text: str) -> ApiFailure:
    return ApiFailure(422, "Invalid", f'{kind} "{entry["metadata"]["name"]}" is invalid: {text}')


def _number(kind: str, entry: Json, path: str) -> int:
    value = at(entry, path, 1)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ApiFailure(400, "BadRequest", f"{kind} in version v1 cannot be handled: {path} is no number: {value!r}")
    if value < 0:
        raise _invalid(kind, entry, f"{path}: Invalid value: {value}: must be greater than or equal to 0")
    return value


def _stateful_set(before: Json | None, entry: Json) -> None:
    _number("StatefulSet.apps", entry, "spec.replicas")
    if before is not None:
        fixed = ("serviceName", "selector", "podManagementPolicy", "volumeClaimTemplates")
        if any(at(before, f"spec.{name}") != at(entry, f"spec.{name}") for name in fixed):
            raise _invalid("StatefulSet.apps", entry, "spec: Forbidden: updates to statefulset spec are forbidden")


def _job(before: Json | None, entry: Json) -> None:
    """KEP-3715: completions change only in an Indexed Job, together with parallelism, to the same number."""
    kind, spec = "Job.batch", entry["spec"]
    _number(kind, entry, "spec.parallelism")
    completions = _number(kind, entry, "spec.completions")
    if before is None:
        if spec["template"]["spec"].get("restartPolicy") not in ("Never", "OnFailure"):
            raise _invalid(kind, entry, "spec.template.spec.restartPolicy: Required value")
        spec.setdefault("selector", {"matchLabels": {"batch.kubernetes.io/controller-uid": entry["metadata"]["uid"]}})
        return
    if completions == before["spec"].get("completions", 1):
        return
    elastic = spec.get("completionMode") == "Indexed" and completions == spec.get("parallelism")
    if not elastic or before["spec"].get("completions") != before["spec"].get("parallelism"):
        raise _invalid(kind, entry, f"spec.completions: Invalid value: {completions}: field is immutable")
    if any(one["type"] in ("Complete", "Failed") for one in entry["status"].get("conditions", [])):
        raise _invalid(kind, entry, "spec.completions: Invalid value: the job is finished: field is immutable")


def _volcano(before: Json | None, entry: Json) -> None:
    """Only replicas and minAvailable may change, and replicas must be enough."""
    tasks: list[Json] = entry["spec"]["tasks"]
    total, least = sum(task["replicas"] for task in tasks), entry["spec"].get("minAvailable", 1)
    if not 0 < least <= total:
        text = "job 'minAvailable' should not be greater than total replicas in tasks"
        raise ApiFailure(403, "Forbidden", f'admission webhook "validatejob.volcano.sh" denied the request: {text}')
    if before is not None and _fixed(before) != _fixed(entry):
        raise ApiFailure(
            403,
            "Forbidden",
            'admission webhook "validatejob.volcano.sh" denied the request: job updates may not change fields other '
            "than `minAvailable`, `tasks[*].replicas under spec`",
        )


def _fixed(entry: Json) -> Any:
    spec = {name: value for name, value in entry["spec"].items() if name not in ("minAvailable", "tasks")}
    tasks = [
        {name: value for name, value in task.items() if name not in ("replicas", "minAvailable")}
        for task in entry["spec"]["tasks"]
    ]
    return spec, tasks


CHECKS: dict[str, Check] = {
    STATEFUL_SETS.full: _stateful_set,
    JOBS.full: _job,
    VOLCANO_JOBS.full: _volcano,
}
