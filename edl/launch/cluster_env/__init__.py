"""Derives options that were not given from the variables that a cluster manager sets for its processes.

Each cluster environment is a pure function from the environment variables to ``Findings``. At most one is used: the
one that started this process. Its values have lower precedence than ``EDL_*``, ``PET_*``, ``PADDLE_*`` and the command
line. docs/cluster-env.md has a section for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edl.config import parse_nnodes
from edl.errors import SettingError
from edl.launch.cluster_env import mpi, pods, slurm
from edl.launch.cluster_env.findings import Findings, job_name, store_port
from edl.launch.naming import checkpoint_folder, private_name
from edl.launch.resolved_options import OptionSource, ResolvedOptions
from edl.wire.address import address


@dataclass(frozen=True, slots=True)
class ClusterEnv:
    """One cluster environment: how it is detected and read."""

    find: Callable[[Mapping[str, str]], Findings | None]
    """Reads the variables; None: this environment is not present. Raises ``SettingError`` for invalid values."""
    evidence: str
    """The variables that identify it, for messages."""
    starts_by: tuple[str, ...] = ()
    """Cluster environments through which this one starts its own daemons: their variables describe the daemons, not
    the job, so a disagreement is not reported."""
    on_request: bool = False
    """Used only if ``--cluster-env`` names it, because other tools set the same variables."""


CLUSTER_ENVS: dict[str, ClusterEnv] = {
    "mpi": ClusterEnv(mpi.find, "OMPI_COMM_WORLD_SIZE, or PMI_SIZE with MPI_LOCALRANKID", starts_by=("slurm",)),
    "slurm": ClusterEnv(slurm.find, "SLURM_STEP_ID and SLURM_STEP_NUM_NODES, which srun sets"),
    "volcano": ClusterEnv(
        pods.find_volcano, "VC_TASK_INDEX or VC_TASK_HOSTS, with MASTER_ADDR and WORLD_SIZE or without"
    ),
    "kubeflow": ClusterEnv(pods.find_kubeflow, "KUBERNETES_SERVICE_HOST, and the first pod of a job in MASTER_ADDR"),
    "env": ClusterEnv(pods.find_variables, "MASTER_ADDR, WORLD_SIZE and RANK, which count launchers", on_request=True),
}
"""In the order of detection, the innermost first: mpirun runs inside a batch job, and a batch job inside a pod, never
the other way round."""


def apply(resolved: ResolvedOptions, env: Mapping[str, str]) -> None:
    """Use the cluster's values for options that were not given. Raises ``SettingError``."""
    wanted = resolved.values["cluster_env"]
    if wanted == "none":
        return
    if wanted == "auto" and not _is_needed(resolved):
        return
    found = _detect(resolved, env) if wanted == "auto" else _requested(resolved, wanted, env)
    if found is not None:
        _offer(resolved, found)


def _is_needed(resolved: ResolvedOptions) -> bool:
    """Whether ``auto`` should look for a cluster environment: not if the user named a store or asked for one node."""
    if resolved.values["standalone"] or str(resolved.values["rdzv_endpoint"]).strip():
        return False
    # Without --nnodes these options describe a job of one node, as in torchrun and Paddle's launcher. PET_* does not
    # count: an operator sets it for every pod.
    if any(resolved.values[name] and resolved.source(name) > OptionSource.PET for name in ("master", "master_addr")):
        return False
    external = resolved.values["rdzv_backend"] in ("etcd", "etcd-v2")  # without an address: reported later
    return not external and resolved.values["role"] not in ("reader", "pserver") and _max_nodes(resolved) != 1


def _max_nodes(resolved: ResolvedOptions) -> int:
    """The maximum of ``--nnodes``; 0 if the option was not given."""
    return parse_nnodes(str(resolved.values["nnodes"])).maximum if resolved.given("nnodes") else 0


def _requested(resolved: ResolvedOptions, wanted: str, env: Mapping[str, str]) -> Findings:
    """The findings of the environment that ``--cluster-env`` names. Raises ``SettingError`` if it is not present."""
    if resolved.values["standalone"]:
        raise SettingError(
            "--cluster-env", wanted, "--standalone means one node with a private store", "Drop one of the two options"
        )
    found = CLUSTER_ENVS[wanted].find(env)
    if found is None:
        raise SettingError("--cluster-env", wanted, f"its variables are not set: {CLUSTER_ENVS[wanted].evidence}")
    return found


def _detect(resolved: ResolvedOptions, env: Mapping[str, str]) -> Findings | None:
    """The findings of the innermost cluster environment that is present. A remark reports an outer one with another
    number of launchers."""
    names = [name for name, env_kind in CLUSTER_ENVS.items() if not env_kind.on_request]
    for name in names:
        found = CLUSTER_ENVS[name].find(env)
        if found is None:
            continue
        for other in names[names.index(name) + 1 :]:
            if other not in CLUSTER_ENVS[name].starts_by:
                _compare(resolved, found, other, env)
        return found
    return None


def _compare(resolved: ResolvedOptions, found: Findings, other: str, env: Mapping[str, str]) -> None:
    try:
        against = CLUSTER_ENVS[other].find(env)
    except SettingError:
        return  # the outer environment is not used, so its invalid variables do not matter
    if against is not None and against.nnodes != found.nnodes:
        resolved.remark(
            f"{found.cluster} has {found.nnodes} launchers, {against.cluster} has {against.nnodes}: using "
            f"{found.cluster}, which started this process. To use the other one: --cluster-env={other}"
        )


def _offer(resolved: ResolvedOptions, found: Findings) -> None:
    """Check the findings against the options, and offer them. Raises ``SettingError``."""
    most = _max_nodes(resolved) or found.nnodes
    if most <= 1 or (found.nnodes <= 1 and not found.grows):
        return
    if found.unclear:
        resolved.remark(f"{found.cluster}: {found.unclear}")
        return
    named = bool(str(resolved.values["rdzv_endpoint"]).strip())
    if not (named or found.host):
        lacking = f"{found.cluster} has {found.nnodes} launchers, but its variables do not name the first one's host"
        raise SettingError("--rdzv-endpoint", None, lacking, found.advice)
    least = parse_nnodes(str(resolved.values["nnodes"])).minimum
    if least > found.nnodes and not found.grows and not named:
        raise SettingError("--nnodes", resolved.values["nnodes"], f"{found.cluster} has only {found.nnodes} launchers")
    _take(resolved, found, most, named)


def _take(resolved: ResolvedOptions, found: Findings, most: int, named: bool) -> None:
    """Offer the values, and report in one remark which of them are used. ``most``: largest number of nodes. ``named``:
    whether the user gave the store's address."""
    said = [f"{found.cluster}: {found.nnodes} nodes"]
    if not resolved.values["trainers"] and not resolved.offer(
        "nnodes", str(found.nnodes), OptionSource.CLUSTER, found.cluster
    ):
        said = [f"{found.cluster}: {found.nnodes} launchers, --nnodes={resolved.values['nnodes']}"]
    if 0 <= found.node_rank < most and resolved.offer(
        "node_rank", found.node_rank, OptionSource.CLUSTER, found.cluster
    ):
        said.append(f"this is node {found.node_rank}")
    job = found.job or job_name(found.host, str(found.port or ""))
    if not named and found.host:
        store = address(found.host, found.port or store_port(job))
        if resolved.offer("rdzv_endpoint", store, OptionSource.CLUSTER, found.origin):
            said.append(f"store at {store} ({found.origin})")
    if not str(resolved.values["rdzv_id"]).strip():
        # As for a private store: the same name for each run that continues from the same checkpoints.
        folder = checkpoint_folder(str(resolved.values["checkpoint_dir"]))
        if resolved.offer("rdzv_id", private_name(folder) if folder else job, OptionSource.CLUSTER, found.cluster):
            said.append(f"job {resolved.values['rdzv_id']}")
    resolved.remark(f"{', '.join(said)}; override with --cluster-env=none or --rdzv-endpoint")
    if found.hint and not resolved.given("nproc_per_node"):
        resolved.remark(f"{found.hint}, but only one worker is started; for one per GPU use --nproc-per-node=gpu")
