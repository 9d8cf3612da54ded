"""The environment of a worker, for every framework at once.

torch's names and meanings are those of torchrun (torch.distributed.run of torch 2.13), Paddle's those of
paddle.distributed.launch 3.3; a script reads whichever it knows. Ours begin with ``EDL_``. docs/environment.md lists
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
from edl.wire.messages import Member, World


@dataclass(frozen=True, slots=True)
class LocalPaths:
    """Where one worker of one round may write."""

    error_file: str
    log_dir: str


@dataclass(frozen=True, slots=True)
class Local:
    """What one launcher's workers have in common."""

    gpus: int = 0
    """How many of this node's accelerators Paddle may use, 0 when it runs on the CPU."""
    checkpoint_dir: str = ""
    slots: int = 0
    """Slots of this node, spare ones included; 0: those that are used."""
    devices: Devices = field(default_factory=dict)
    """The node's own list of each kind of accelerator that it has."""
    paddle: PaddleKind = paddle_environment.GPU
    """The kind that Paddle may use."""
    virtual: bool = False
    """Each worker sees the device of its own slot only, and finds 0 in ``LOCAL_RANK``."""
    signals: str = torch_environment.SIGNALS
    """``--signals-to-handle``."""
    cores: tuple[tuple[int, ...], ...] = ()
    """Processor cores by slot that its worker is bound to; empty: none is bound."""
    scripts: ScriptPlaces = NOWHERE
    """Which of them are pservers that run the script."""


def fork_server_environment(base: Mapping[str, str], slots: int) -> dict[str, str]:
    """The environment in which the framework is imported: what workers will see of the values read at import."""
    environment = dict(base)
    if slots > 1:
        # As torchrun does: several workers on a host would otherwise start as many threads as it has cores, each.
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def worker_environment(
    base: Mapping[str, str],
    spec: JobSpec,
    world: World,
    node: NodeId,
    local_rank: int,
    paths: LocalPaths,
    deps: Local,
) -> dict[str, str]:
    """The complete environment of one worker: the launcher's own, and what its place in the world adds."""
    position = world.position(node)
    member = world.members[position]
    environment = fork_server_environment(base, member.slots)
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


def _everywhere(base: Mapping[str, str], spec: JobSpec, node: NodeId, paths: LocalPaths, deps: Local) -> dict[str, str]:
    """What a worker is told whether or not its world is known."""
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
    deps: Local,
) -> dict[str, str]:
    """The environment of a worker that is started before its world is known: no rank, no size, no addresses. ``uses``:
    all slots of this node that the next world is likely to use."""
    environment = fork_server_environment(base, len(uses))
    environment["LOCAL_RANK"] = environment["PADDLE_LOCAL_RANK"] = str(uses.index(slot))
    environment["LOCAL_WORLD_SIZE"] = environment["PADDLE_LOCAL_SIZE"] = str(len(uses))
    environment.update(_everywhere(base, spec, node, paths, deps))
    environment.update(_in_slot(deps, uses, slot))
    return environment


def _in_slot(deps: Local, used: Sequence[int], slot: int) -> dict[str, str]:
    """What follows from the slot that a worker is in: its number, and the devices of those that are used."""
    environment = {"EDL_SLOT": str(slot), **visible(deps.devices, deps.slots or len(used), used)}
    if deps.virtual:
        environment.update(torch_environment.one_device(deps.devices, slot))
        environment.update(paddle_environment.selected(deps.paddle, min(deps.gpus, 1), 0, 1))
    return environment


def _gpus(deps: Local, used: Sequence[int]) -> int:
    """Accelerators that Paddle may use in these slots."""
    narrowed = visible(deps.devices, deps.slots or len(used), used).get(deps.paddle.variable)
    return len(narrowed.split(",")) if narrowed and deps.gpus else deps.gpus


def _paddle(
    base: Mapping[str, str],
    spec: JobSpec,
    world: World,
    node: NodeId,
    member: Member,
    local_rank: int,
    deps: Local,
) -> dict[str, str]:
    if spec.script_servers:
        places = (spec.script_servers, deps.scripts, world, node, member, _endpoints(world), local_rank)
        return paddle_environment.in_role(base, *places)
    devices = paddle_environment.selected(deps.paddle, _gpus(deps, member.used), local_rank, member.slots)
    return paddle_environment.place(base, world, node, member, _endpoints(world), local_rank, devices)


def seat(world: World, node: NodeId, local_rank: int, environment: dict[str, str], deps: Local, secret: str) -> Seat:
    """A worker's place in a world, as it is told over the worker server."""
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
