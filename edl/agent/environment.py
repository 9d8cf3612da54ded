"""The environment of a worker, for every framework at once.

torch's names and meanings are those of torchrun (torch.distributed.run of torch 2.13), Paddle's those of
paddle.distributed.launch 3.3; a script reads whichever it knows. Ours begin with ``EDL_``. docs/environment.md lists
them all.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from edl.arithmetic import hyper
from edl.config import JobSpec
from edl.types import NodeId, Rank
from edl.wire.address import address
from edl.wire.local import Seat
from edl.wire.messages import Member, World


@dataclass(frozen=True, slots=True)
class LocalPaths:
    """Where one worker of one round may write."""

    error_file: str
    log_dir: str


def nursery_environment(base: Mapping[str, str], slots: int) -> dict[str, str]:
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
    gpus: int = 0,
) -> dict[str, str]:
    """The complete environment of one worker: the launcher's own, and what its place in the world adds.

    ``gpus``: how many of this node's GPUs Paddle may use, 0 when it runs on the CPU.
    """
    position = world.position(node)
    member = world.members[position]
    environment = nursery_environment(base, member.slots)
    environment.update(_torch(spec, world, member, position, local_rank))
    environment.update(_paddle(base, world, member, local_rank, gpus))
    environment.update(_everywhere(base, spec, node, paths, gpus))
    environment.update(hyper.environment(world.settings, world.size, member.first_rank + local_rank))
    if spec.servers:
        environment.update(_paddle_trainer(environment["PADDLE_CURRENT_ENDPOINT"]))
    environment["EDL_ROUND"] = str(world.round)
    environment["EDL_NODES"] = str(len(world.members))
    return environment


def _everywhere(base: Mapping[str, str], spec: JobSpec, node: NodeId, paths: LocalPaths, gpus: int) -> dict[str, str]:
    """What a worker is told whether or not its world is known."""
    environment = {
        "TORCHELASTIC_RUN_ID": str(spec.job),
        "TORCHELASTIC_ERROR_FILE": paths.error_file,
        "PADDLE_LOG_DIR": paths.log_dir,
        "EDL_JOB_ID": str(spec.job),
        "EDL_NODE_ID": str(node),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if spec.data:
        environment["EDL_DATA_SETS"] = spec.data
    if spec.servers:
        environment["EDL_PS"] = "1"
    if not gpus:
        # Without it Paddle on CPU forms no group at all and says nothing about it.
        environment["PADDLE_DISTRI_BACKEND"] = base.get("PADDLE_DISTRI_BACKEND", "gloo")
    return environment


@dataclass(frozen=True, slots=True)
class Local:
    """What one launcher's workers have in common."""

    gpus: int = 0
    """How many of this node's GPUs Paddle may use, 0 when it runs on the CPU."""
    checkpoint_dir: str = ""


def ahead_environment(
    base: Mapping[str, str],
    spec: JobSpec,
    node: NodeId,
    slots: int,
    local_rank: int,
    paths: LocalPaths,
    gpus: int = 0,
) -> dict[str, str]:
    """The environment of a worker that is started before its world is known: no rank, no size, no addresses."""
    environment = nursery_environment(base, slots)
    environment["LOCAL_RANK"] = environment["PADDLE_LOCAL_RANK"] = str(local_rank)
    environment["LOCAL_WORLD_SIZE"] = environment["PADDLE_LOCAL_SIZE"] = str(slots)
    environment.update(_everywhere(base, spec, node, paths, gpus))
    return environment


def seat(world: World, node: NodeId, local_rank: int, environment: dict[str, str], around: Local, secret: str) -> Seat:
    """A worker's place in a world, as it is told over the desk."""
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
        checkpoint_dir=around.checkpoint_dir,
        token=secret,
        settings=world.settings,
        environment=environment,
    )


@functools.lru_cache(maxsize=1)
def _endpoints(world: World) -> tuple[str, ...]:
    return tuple(address(peer.host, port) for peer in world.members for port in peer.ports[1 : 1 + peer.slots])


def _torch(spec: JobSpec, world: World, member: Member, position: int, local_rank: int) -> dict[str, str]:
    rank = str(member.first_rank + local_rank)
    return {
        "LOCAL_RANK": str(local_rank),
        "RANK": rank,
        "GROUP_RANK": str(position),
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(member.slots),
        "WORLD_SIZE": str(world.size),
        "GROUP_WORLD_SIZE": str(len(world.members)),
        "ROLE_WORLD_SIZE": str(world.size),
        "MASTER_ADDR": world.master_host,
        "MASTER_PORT": str(world.master_port),
        # torch counts from 0, and counts rounds: a change of membership is a restart for its scripts as well.
        "TORCHELASTIC_RESTART_COUNT": str(world.round - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        # Each round's rank 0 serves its own store, so that no launcher is needed once the workers run.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _paddle(base: Mapping[str, str], world: World, member: Member, local_rank: int, gpus: int) -> dict[str, str]:
    endpoints = _endpoints(world)
    rank = member.first_rank + local_rank
    environment = {
        "PADDLE_MASTER": address(world.master_host, world.master_port),
        "PADDLE_GLOBAL_SIZE": str(world.size),
        "PADDLE_LOCAL_SIZE": str(member.slots),
        "PADDLE_GLOBAL_RANK": str(rank),
        "PADDLE_LOCAL_RANK": str(local_rank),
        "PADDLE_NNODES": str(len(world.members)),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(world.size),
        "PADDLE_RANK_IN_NODE": str(local_rank),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_AUTO_CLUSTER": "0",
        "TRAINING_ROLE": "TRAINER",
    }
    if gpus:
        # Counted among the visible ones, as Paddle does; a lone worker gets all of them.
        mine = [local_rank % gpus] if member.slots > 1 else range(gpus)
        environment["FLAGS_selected_gpus"] = ",".join(str(index) for index in mine)
    return environment


def _paddle_trainer(endpoint: str) -> dict[str, str]:
    """What Paddle's launcher adds for a trainer with parameter servers."""
    host, _, port = endpoint.rpartition(":")
    return {"PADDLE_ROLE": "TRAINER", "POD_IP": host.strip("[]"), "PADDLE_PORT": port}
