"""Variables by which clusters tell every program of its place, in terms of our own options.

Each cluster environment is a pure function from the environment to ``Findings``. At most one counts, the one that
started this process. What it says is weaker than anything that a person set through ``EDL_*``, ``PET_*`` or
``PADDLE_*``. docs/cluster-env.md has a section for each.
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
    """One cluster environment: how it is recognised and read."""

    find: Callable[[Mapping[str, str]], Findings | None]
    """Raises ``SettingError`` for variables that cannot be."""
    evidence: str
    """The variables that identify it."""
    starts_by: tuple[str, ...] = ()
    """Cluster environments through which this one starts its own helpers: their variables describe those helpers."""
    on_request: bool = False
    """Other tools may have set the same variables."""


CLUSTER_ENVS: dict[str, ClusterEnv] = {
    "mpi": ClusterEnv(mpi.find, "OMPI_COMM_WORLD_SIZE, or PMI_SIZE with MPI_LOCALRANKID", starts_by=("slurm",)),
    "slurm": ClusterEnv(slurm.find, "SLURM_STEP_ID and SLURM_STEP_NUM_NODES, which srun sets"),
    "volcano": ClusterEnv(
        pods.find_volcano, "VC_TASK_INDEX or VC_TASK_HOSTS, with MASTER_ADDR and WORLD_SIZE or without"
    ),
    "kubeflow": ClusterEnv(pods.find_kubeflow, "KUBERNETES_SERVICE_HOST, and the first pod of a job in MASTER_ADDR"),
    "env": ClusterEnv(pods.find_variables, "MASTER_ADDR, WORLD_SIZE and RANK, which count launchers", on_request=True),
}
"""The nearest to the process first: mpirun is started in a batch job, and a batch job in a pod, not the other way."""


def apply(resolved: ResolvedOptions, env: Mapping[str, str]) -> None:
    """Use the cluster's values for options that were not given. Raises ``SettingError``."""
    wanted = resolved.values["cluster_env"]
    if wanted == "none":
        return
    if wanted == "auto" and not _open(resolved):
        return
    found = _recognised(resolved, env) if wanted == "auto" else _asked_for(resolved, wanted, env)
    if found is not None:
        _offer(resolved, found)


def _open(resolved: ResolvedOptions) -> bool:
    """Whether there is anything left to find out. Who names a store, or wants one node, knows what he does."""
    if resolved.values["standalone"] or str(resolved.values["rdzv_endpoint"]).strip():
        return False
    # Without --nnodes these belong to a job of one node, as in the launchers that have them. Not so an operator's.
    if any(resolved.values[name] and resolved.source(name) > OptionSource.PET for name in ("master", "master_addr")):
        return False
    external = resolved.values["rdzv_backend"] in ("etcd", "etcd-v2")  # its address is missing, which is said later
    return not external and resolved.values["role"] not in ("reader", "pserver") and _most(resolved) != 1


def _most(resolved: ResolvedOptions) -> int:
    """The greatest number of nodes, as given by the user; 0 if not given."""
    return parse_nnodes(str(resolved.values["nnodes"])).maximum if resolved.given("nnodes") else 0


def _asked_for(resolved: ResolvedOptions, wanted: str, env: Mapping[str, str]) -> Findings:
    if resolved.values["standalone"]:
        raise SettingError(
            "--cluster-env", wanted, "--standalone is one node with a store of its own", "Drop one of the two"
        )
    found = CLUSTER_ENVS[wanted].find(env)
    if found is None:
        raise SettingError("--cluster-env", wanted, f"its variables are not there: {CLUSTER_ENVS[wanted].evidence}")
    return found


def _recognised(resolved: ResolvedOptions, env: Mapping[str, str]) -> Findings | None:
    """The findings of the nearest cluster environment. A remark names one that disagrees."""
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
        return  # it does not count
    if against is not None and against.nnodes != found.nnodes:
        resolved.remark(
            f"{found.cluster} has {found.nnodes} launchers, {against.cluster} {against.nnodes}: the former counts, as "
            f"it is nearer to this process; --cluster-env={other} for the other"
        )


def _offer(resolved: ResolvedOptions, found: Findings) -> None:
    most = _most(resolved) or found.nnodes
    if most <= 1 or (found.nnodes <= 1 and not found.grows):
        return
    if found.unclear:
        resolved.remark(f"{found.cluster}: {found.unclear}")
        return
    named = bool(str(resolved.values["rdzv_endpoint"]).strip())
    if not (named or found.host):
        lacking = f"{found.cluster} has {found.nnodes} launchers, but does not say where the first one runs"
        raise SettingError("--rdzv-endpoint", "''", lacking, found.advice)
    least = parse_nnodes(str(resolved.values["nnodes"])).minimum
    if least > found.nnodes and not found.grows and not named:
        raise SettingError("--nnodes", resolved.values["nnodes"], f"{found.cluster} has only {found.nnodes} launchers")
    _take(resolved, found, most, named)


def _take(resolved: ResolvedOptions, found: Findings, most: int, named: bool) -> None:
    """Make the offers, and say in one line what has come of them."""
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
        # As without a store's name: the same for each run that goes on from the same checkpoints.
        folder = checkpoint_folder(str(resolved.values["checkpoint_dir"]))
        if resolved.offer("rdzv_id", private_name(folder) if folder else job, OptionSource.CLUSTER, found.cluster):
            said.append(f"job {resolved.values['rdzv_id']}")
    resolved.remark(f"{', '.join(said)}; --cluster-env=none or --rdzv-endpoint to choose otherwise")
    if found.hint and not resolved.given("nproc_per_node"):
        resolved.remark(f"{found.hint}, and one worker starts; --nproc-per-node=gpu for one on each")
