"""The environment variables of a worker, for all frameworks at once.

torch's variables have the meaning that torchrun gives them (torch.distributed.run of torch 2.13), Paddle's that of
paddle.distributed.launch 3.3; a script reads those that it knows. Ours begin with ``EDL_``. docs/environment.md lists
them all.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edl.agent.workers import paddle_environment, torch_environment
from edl.agent.workers.devices import Devices, visible
from edl.agent.workers.paddle_environment import NOWHERE, PaddleKind, ScriptPlaces
from edl.arithmetic import hyper
from edl.config import JobSpec, VerifyRules
from edl.job_records import environment_text
from edl.types import NodeId, Rank
from edl.wire.address import address
from edl.wire.local import Seat
from edl.wire.records import Member, World


@dataclass(frozen=True, slots=True)
class LocalPaths:
    """Paths that one worker of one round may write to."""

    error_file: str
    log_dir: str


@dataclass(frozen=True, slots=True)
class WorkerGroupDeps:
    """Settings that all workers of one launcher share."""

    gpus: int = 0
    """Number of this node's accelerators that Paddle may use, 0 when it runs on the CPU."""
    checkpoint_dir: str = ""
    slots: int = 0
    """Slots of this node, spare ones included; 0: as many as are used."""
    devices: Devices = field(default_factory=dict)
    """The node's device list for each kind of accelerator."""
    paddle: PaddleKind = paddle_environment.GPU
    """The kind of accelerator that Paddle uses."""
    virtual: bool = False
    """Each worker sees only the device of its own slot, and its ``LOCAL_RANK`` is 0."""
    signals: str = torch_environment.SIGNALS
    """Value of ``--signals-to-handle``."""
    cores: tuple[tuple[int, ...], ...] = ()
    """CPU cores to which the worker of each slot is bound; empty: no binding."""
    scripts: ScriptPlaces = NOWHERE
    """Pservers and trainers here that run the script."""
    share_cores: bool = True
    """See ``fork_server_environment``."""


def fork_server_environment(base: Mapping[str, str], slots: int, *, share_cores: bool = True) -> dict[str, str]:
    """The environment in which the framework is imported: as workers will see it, for values read at import.

    ``share_cores``: whether several workers use one thread each, unless the user says otherwise, as torchrun has it.
    torch's API does not do so for functions.
    """
    environment = dict(base)
    if slots > 1 and share_cores:
        # Otherwise each of several workers on a host would start as many threads as there are cores.
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def worker_environment(
    base: Mapping[str, str],
    spec: JobSpec,
    world: World,
    node: NodeId,
    local_rank: int,
    paths: LocalPaths,
    deps: WorkerGroupDeps,
) -> dict[str, str]:
    """The complete environment of one worker: the launcher's, plus the variables for its place in the world."""
    position = world.position(node)
    member = world.members[position]
    environment = fork_server_environment(base, member.slots, share_cores=deps.share_cores)
    environment.update(torch_environment.place(spec, world, member, position, local_rank))
    environment.update(_paddle(base, spec, world, node, member, local_rank, deps))
    environment.update(_everywhere(base, spec, node, paths, deps))
    environment.update(_in_slot(deps, member.used, member.used[local_rank]))
    environment.update(hyper.environment(world.settings, world.size, member.first_rank + local_rank))
    if spec.servers:
        environment.update(paddle_environment.trainer(environment["PADDLE_CURRENT_ENDPOINT"]))
    environment["EDL_ROUND"] = str(world.round)
    environment["EDL_NODES"] = str(len(world.members))
    return environment


def _everywhere(
    base: Mapping[str, str], spec: JobSpec, node: NodeId, paths: LocalPaths, deps: WorkerGroupDeps
) -> dict[str, str]:
    """Variables that do not depend on the world."""
    environment = {
        "TORCHELASTIC_RUN_ID": str(spec.job),
        "TORCHELASTIC_ERROR_FILE": paths.error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": deps.signals,
        "PADDLE_LOG_DIR": paths.log_dir,
        "EDL_JOB_ID": str(spec.job),
        "EDL_NODE_ID": str(node),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if spec.data:
        environment["EDL_DATA_SETS"] = environment_text(spec.data)
    if spec.verify != VerifyRules():
        environment["EDL_VERIFY"] = spec.verify.text
    if spec.replicas.size > 1:
        environment["EDL_REPLICA_SIZE"] = str(spec.replicas.size)
    if spec.servers:
        environment["EDL_PS"] = "1"
    if not spec.script_servers:
        environment.update(paddle_environment.backend(base, deps.paddle, deps.gpus))
    return environment


def ahead_environment(
    base: Mapping[str, str],
    spec: JobSpec,
    node: NodeId,
    uses: tuple[int, ...],
    slot: int,
    paths: LocalPaths,
    deps: WorkerGroupDeps,
) -> dict[str, str]:
    """The environment of a worker that is started before its world is known: no rank, no size, no addresses. ``uses``:
    all slots of this node that the next world is likely to use."""
    environment = fork_server_environment(base, len(uses), share_cores=deps.share_cores)
    environment["LOCAL_RANK"] = environment["PADDLE_LOCAL_RANK"] = str(uses.index(slot))
    environment["LOCAL_WORLD_SIZE"] = environment["PADDLE_LOCAL_SIZE"] = str(len(uses))
    environment.update(_everywhere(base, spec, node, paths, deps))
    environment.update(_in_slot(deps, uses, slot))
    return environment


def _in_slot(deps: WorkerGroupDeps, used: Sequence[int], slot: int) -> dict[str, str]:
    """Variables that depend on the worker's slot: its number, and the devices of the used slots."""
    environment = {"EDL_SLOT": str(slot), **visible(deps.devices, deps.slots or len(used), used)}
    if deps.virtual:
        environment.update(torch_environment.one_device(deps.devices, slot))
        environment.update(paddle_environment.selected(deps.paddle, min(deps.gpus, 1), 0, 1))
    return environment


def _gpus(deps: WorkerGroupDeps, used: Sequence[int]) -> int:
    """Number of accelerators that Paddle may use in these slots."""
    narrowed = visible(deps.devices, deps.slots or len(used), used).get(deps.paddle.variable)
    return len(narrowed.split(",")) if narrowed and deps.gpus else deps.gpus


def _paddle(
    base: Mapping[str, str],
    spec: JobSpec,
    world: World,
    node: NodeId,
    member: Member,
    local_rank: int,
    deps: WorkerGroupDeps,
) -> dict[str, str]:
    if spec.script_servers:
        places = (spec.script_servers, deps.scripts, world, node, member, _endpoints(world), local_rank)
        return paddle_environment.in_role(base, *places)
    devices = paddle_environment.selected(deps.paddle, _gpus(deps, member.used), local_rank, member.slots)
    return paddle_environment.place(base, world, node, member, _endpoints(world), local_rank, devices)


def seat(
    world: World, node: NodeId, local_rank: int, environment: dict[str, str], deps: WorkerGroupDeps, secret: str
) -> Seat:
    """A worker's place in a world, as sent through the worker server."""
    position = world.position(node)
    member = world.members[position]
    return Seat(
        round=world.round,
        rank=Rank(member.first_rank + local_rank),
        local_rank=local_rank,
        world_size=world.size,
        local_world_size=member.slots,
        node=node,
        nodes=len(world.members),
        position=position,
        endpoints=_endpoints(world),
        master=address(world.master_host, world.master_port),
        era=world.era,
        restore_era=world.restore.era,
        restore_commit=world.restore.commit,
        shards=world.shards,
        stored=world.stored,
        checkpoint_dir=deps.checkpoint_dir,
        token=secret,
        settings=world.settings,
        slot=member.used[local_rank],
        environment=environment,
    )


@functools.lru_cache(maxsize=1)
def _endpoints(world: World) -> tuple[str, ...]:
    return tuple(address(peer.host, port) for peer in world.members for port in peer.ports[1 : 1 + peer.slots])
