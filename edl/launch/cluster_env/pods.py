"""Kubernetes pods of Kubeflow and Volcano jobs, and plain ``MASTER_ADDR`` variables on request.

``WORLD_SIZE`` and ``RANK`` count pods here, that is launchers; in workers the same names count workers. Other tools
export them as well, so they are used only together with variables that only a cluster sets.
Sources: kubeflow/trainer (release 1.x: pkg/controller.v1/pytorch/envvar.go; 2.x: pkg/runtime/framework/plugins/torch),
volcano (pkg/controllers/job/plugins: env, svc, distributed-framework/pytorch).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from edl.launch.cluster_env.findings import Findings, first_of, host_name, in_range, job_name, number

SIZES = ("PET_NNODES", "WORLD_SIZE")
"""Variables with the number of launchers, the first one that is set counts: newer operators count workers in
WORLD_SIZE, and nodes in PET_NNODES."""
RANKS = ("PET_NODE_RANK", "RANK")
ADDRESSES = ("PET_MASTER_ADDR", "MASTER_ADDR")
PORTS = ("PET_MASTER_PORT", "MASTER_PORT")
KUBEFLOW_HOSTS = (
    r"(?P<job>.+)-master-0(?:\..+)?",  # PyTorchJob: the pod's name is that of its Service
    r"(?P<job>.+)-node-0-0\.(?P=job)(?:\..+)?",  # TrainJob: pod 0 of the JobSet's job "node"
)
"""Patterns of the first pod's host name."""
VOLCANO_TASKS = ("MASTER", "WORKER")
"""Tasks whose pods train, in rank order, as in Volcano's pytorch plugin."""


def find_volcano(env: Mapping[str, str]) -> Findings | None:
    """Findings from Volcano's plugin ``pytorch``, or from ``svc`` alone. Raises ``SettingError`` for invalid
    variables."""
    listed = {
        match[1]: [host.strip() for host in value.split(",") if host.strip()]
        for name, value in sorted(env.items())
        if (match := re.fullmatch(r"VC_([A-Z0-9_]+)_HOSTS", name))
    }
    tasks = {name: hosts for name, hosts in listed.items() if hosts}
    if not tasks and not first_of(env, "VC_TASK_INDEX", "VK_TASK_INDEX"):
        return None
    if first_of(env, "MASTER_ADDR") and first_of(env, "WORLD_SIZE"):
        return _by_variables("Volcano", env, job=_stem(env["MASTER_ADDR"]))
    if not tasks:
        return None  # only the plugin env: an index without addresses
    return _by_hosts(env, tasks)


def _by_hosts(env: Mapping[str, str], tasks: Mapping[str, list[str]]) -> Findings:
    """Findings from the host lists of the plugin ``svc``. ``tasks``: hosts by task."""
    training = [name for name in VOLCANO_TASKS if name in tasks] if len(tasks) > 1 else list(tasks)
    hosts = [host for name in training for host in tasks[name]]
    if set(tasks) - set(training):
        listed = ", ".join(sorted(name.lower() for name in tasks))
        unclear = (
            f"unknown which of the tasks {listed} train, so its variables are not used. To run them as one job, give "
            "--nnodes and --rdzv-endpoint"
        )
        return Findings("Volcano", len(hosts), unclear=unclear)
    variable = f"VC_{training[0]}_HOSTS"
    me = env.get("HOSTNAME", "")
    rank = next((index for index, host in enumerate(hosts) if me and host.partition(".")[0] == me), -1)
    if rank < 0 and len(training) == 1:
        rank = number(env, "VC_TASK_INDEX", "VK_TASK_INDEX")
    host = host_name({variable: hosts[0]}, variable)
    return Findings("Volcano", len(hosts), rank, host, 0, job_name(_stem(host)), variable, grows=True)


def _stem(host: str) -> str:
    """The job's name in a pod's host name: ``train`` for ``train-worker-0.train``. An address is returned as it is."""
    if re.fullmatch(r"[0-9.]+|.*:.*", host.strip()):
        return host.strip()
    name, _, service = host.strip().partition(".")
    return service.partition(".")[0] or re.sub(r"-[^-]+-\d+$", "", name)


def find_kubeflow(env: Mapping[str, str]) -> Findings | None:
    """Findings from a PyTorchJob (release 1) without an elastic policy, or a TrainJob (release 2). Raises
    ``SettingError`` for invalid variables."""
    address = first_of(env, *ADDRESSES)
    if not address or not first_of(env, "KUBERNETES_SERVICE_HOST"):
        return None
    host, me = env[address].strip(), env.get("HOSTNAME", "")
    if host in ("localhost", "127.0.0.1"):
        host = me  # early operators set this in the first pod; the other pods get its name
    match = next(filter(None, (re.fullmatch(pattern, host) for pattern in KUBEFLOW_HOSTS)), None)
    if match is None or not first_of(env, *SIZES):
        return None
    return _by_variables("Kubeflow", {**env, address: host}, job=match["job"])


def find_variables(env: Mapping[str, str]) -> Findings | None:
    """Findings from ``MASTER_ADDR``, ``WORLD_SIZE`` and ``RANK`` of launchers, from any cluster manager; used
    only on request."""
    if not all(first_of(env, name) for name in ("MASTER_ADDR", "WORLD_SIZE", "RANK")):
        return None
    bare = {name: value for name, value in env.items() if not name.startswith("PET_")}
    return _by_variables("MASTER_ADDR and WORLD_SIZE", bare, job="")


def _by_variables(title: str, env: Mapping[str, str], job: str) -> Findings:
    address = first_of(env, *ADDRESSES)
    size = next(name for name in SIZES if env.get(name, "").strip())
    if ":" in env[size]:
        # PET_NNODES=MIN:MAX becomes --nnodes as it is; the number of launchers is in WORLD_SIZE.
        size = "WORLD_SIZE" if env.get("WORLD_SIZE", "").strip() else size
    nnodes = number(env, size, least=1)
    name = first_of(env, *RANKS)
    rank = in_range(name, number(env, name), nnodes) if name else -1
    host, port = host_name(env, address, nnodes), max(number(env, *PORTS, least=1, most=65535), 0)
    # Without a port variable the port is derived from the job's name, so that pods with hostNetwork do not collide.
    return Findings(title, nnodes, rank, host, port, job_name(job), address, grows=True)
