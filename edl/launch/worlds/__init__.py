"""Variables by which clusters tell every program of its place, in terms of our own options.

Each world is a pure function from the environment to ``Findings``. At most one counts, the one that has started this
very process; what it says is weaker than anything that somebody has said by hand, by ``EDL_*``, ``PET_*`` or
``PADDLE_*``. docs/worlds.md has a section for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from edl.config import parse_nnodes
from edl.errors import SettingError
from edl.launch.naming import checkpoint_folder, private_name
from edl.launch.told import Source, Told
from edl.launch.worlds import mpi, pods, slurm
from edl.launch.worlds.findings import Findings, job_name, store_port
from edl.wire.address import address


@dataclass(frozen=True, slots=True)
class World:
    """One of them."""

    find: Callable[[Mapping[str, str]], Findings | None]
    """Raises ``SettingError`` for variables that cannot be."""
    evidence: str
    """What tells it."""
    starts_by: tuple[str, ...] = ()
    """Worlds that it starts its own helpers by: what they say is about these."""
    on_request: bool = False
    """Its variables may be anybody's."""


WORLDS: dict[str, World] = {
    "mpi": World(mpi.find, "OMPI_COMM_WORLD_SIZE, or PMI_SIZE with MPI_LOCALRANKID", starts_by=("slurm",)),
    "slurm": World(slurm.find, "SLURM_STEP_ID and SLURM_STEP_NUM_NODES, which srun sets"),
    "volcano": World(pods.find_volcano, "VC_TASK_INDEX or VC_TASK_HOSTS, with MASTER_ADDR and WORLD_SIZE or without"),
    "kubeflow": World(pods.find_kubeflow, "KUBERNETES_SERVICE_HOST, and the first pod of a job in MASTER_ADDR"),
    "env": World(pods.find_variables, "MASTER_ADDR, WORLD_SIZE and RANK, which count launchers", on_request=True),
}
"""The nearest to the process first: mpirun is started in a batch job, and a batch job in a pod, not the other way."""

WORLD_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--world",
        type=click.Choice(["auto", "none", *WORLDS]),
        default="auto",
        help="Whose variables say how many nodes there are and where the store is: see docs/worlds.md. Default: auto.",
    ),
]


def apply(told: Told, env: Mapping[str, str]) -> None:
    """Offer what the world says for options that nobody has given. Raises ``SettingError``."""
    wanted = told.values["world"]
    if wanted == "none":
        return
    if wanted == "auto" and not _open(told):
        return
    found = _recognised(told, env) if wanted == "auto" else _asked_for(told, wanted, env)
    if found is not None:
        _offer(told, found)


def _open(told: Told) -> bool:
    """Whether there is anything left to find out. Who names a store, or wants one node, knows what he does."""
    if told.values["standalone"] or str(told.values["rdzv_endpoint"]).strip():
        return False
    # Without --nnodes these belong to a job of one node, as in the launchers that have them. Not so an operator's.
    if any(told.values[name] and told.source(name) > Source.PET for name in ("master", "master_addr")):
        return False
    external = told.values["rdzv_backend"] in ("etcd", "etcd-v2")  # its address is missing, which is said later
    return not external and told.values["role"] not in ("reader", "pserver") and _most(told) != 1


def _most(told: Told) -> int:
    """Most nodes, by what somebody has said; 0: nobody has."""
    return parse_nnodes(str(told.values["nnodes"])).maximum if told.given("nnodes") else 0


def _asked_for(told: Told, wanted: str, env: Mapping[str, str]) -> Findings:
    if told.values["standalone"]:
        raise SettingError("--world", wanted, "--standalone is one node with a store of its own", "Drop one of the two")
    found = WORLDS[wanted].find(env)
    if found is None:
        raise SettingError("--world", wanted, f"its variables are not there: {WORLDS[wanted].evidence}")
    return found


def _recognised(told: Told, env: Mapping[str, str]) -> Findings | None:
    """What the first world says that there is. One that says otherwise is named."""
    names = [name for name, world in WORLDS.items() if not world.on_request]
    for name in names:
        found = WORLDS[name].find(env)
        if found is None:
            continue
        for other in names[names.index(name) + 1 :]:
            if other not in WORLDS[name].starts_by:
                _compare(told, found, other, env)
        return found
    return None


def _compare(told: Told, found: Findings, other: str, env: Mapping[str, str]) -> None:
    try:
        against = WORLDS[other].find(env)
    except SettingError:
        return  # it does not count
    if against is not None and against.nnodes != found.nnodes:
        told.remark(
            f"{found.world} has {found.nnodes} launchers, {against.world} {against.nnodes}: the former counts, as it "
            f"is nearer to this process; --world={other} for the other"
        )


def _offer(told: Told, found: Findings) -> None:
    most = _most(told) or found.nnodes
    if most <= 1 or (found.nnodes <= 1 and not found.grows):
        return
    if found.unclear:
        told.remark(f"{found.world}: {found.unclear}")
        return
    named = bool(str(told.values["rdzv_endpoint"]).strip())
    if not (named or found.host):
        lacking = f"{found.world} has {found.nnodes} launchers, but does not say where the first one runs"
        raise SettingError("--rdzv-endpoint", "''", lacking, found.advice)
    least = parse_nnodes(str(told.values["nnodes"])).minimum
    if least > found.nnodes and not found.grows and not named:
        raise SettingError("--nnodes", told.values["nnodes"], f"{found.world} has only {found.nnodes} launchers")
    _take(told, found, most, named)


def _take(told: Told, found: Findings, most: int, named: bool) -> None:
    """Make the offers, and say in one line what has come of them."""
    said = [f"{found.world}: {found.nnodes} nodes"]
    if not told.values["trainers"] and not told.offer("nnodes", str(found.nnodes), Source.WORLD, found.world):
        said = [f"{found.world}: {found.nnodes} launchers, --nnodes={told.values['nnodes']}"]
    if 0 <= found.node_rank < most and told.offer("node_rank", found.node_rank, Source.WORLD, found.world):
        said.append(f"this is node {found.node_rank}")
    job = found.job or job_name(found.host, str(found.port or ""))
    if not named and found.host:
        store = address(found.host, found.port or store_port(job))
        if told.offer("rdzv_endpoint", store, Source.WORLD, found.origin):
            said.append(f"store at {store} ({found.origin})")
    if not str(told.values["rdzv_id"]).strip():
        # As without a store's name: the same for each run that goes on from the same checkpoints.
        folder = checkpoint_folder(str(told.values["checkpoint_dir"]))
        if told.offer("rdzv_id", private_name(folder) if folder else job, Source.WORLD, found.world):
            said.append(f"job {told.values['rdzv_id']}")
    told.remark(f"{', '.join(said)}; --world=none or --rdzv-endpoint to choose otherwise")
    if found.hint and not told.given("nproc_per_node"):
        told.remark(f"{found.hint}, and one worker starts; --nproc-per-node=gpu for one on each")
