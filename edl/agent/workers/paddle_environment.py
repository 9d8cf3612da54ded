"""Paddle's environment variables of a worker, as ``paddle.distributed.launch`` 3.3 defines them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edl.config import ScriptServers
from edl.types import NodeId
from edl.wire.address import address

if TYPE_CHECKING:  # the command line only needs KINDS
    from edl.wire.records import Member, World

LIMITED = ("PADDLE_TRAINER_ENDPOINTS",)
"""Variables whose length grows with the job. Linux refuses to start a process with one of 128 KiB."""
LIMIT_VARIABLE = "PADDLE_ENV_LIMIT_LEN"
LIMIT = 48000
"""Paddle's default: number of characters from which such a variable is left out and read from the backup file."""
BACKUP_VARIABLE = "PADDLE_BACKUP_ENV_PATH"


@dataclass(frozen=True, slots=True)
class PaddleKind:
    """A kind of accelerator, as Paddle sees it."""

    package: str
    """The Paddle package, or plug-in package, for it."""
    name: str
    """Its name in ``FLAGS_selected_<name>s``."""
    variable: str
    """Variable that lists the devices a process may use."""
    plugged_in: bool = False
    """Paddle supports it through a plug-in, and communicates through the plug-in's own library (xccl)."""


GPU = PaddleKind("paddlepaddle-gpu", "gpu", "CUDA_VISIBLE_DEVICES")
KINDS = (
    GPU,
    PaddleKind("paddlepaddle-xpu", "xpu", "XPU_VISIBLE_DEVICES"),
    PaddleKind("paddle-custom-npu", "npu", "ASCEND_RT_VISIBLE_DEVICES", plugged_in=True),
)


def place(
    base: Mapping[str, str],
    world: World,
    node: NodeId,
    member: Member,
    endpoints: Sequence[str],
    local_rank: int,
    devices: Mapping[str, str],
) -> dict[str, str]:
    """Variables for a worker's place in a world. ``endpoints``: of all workers, by rank. ``devices``: see
    ``selected``."""
    rank = member.first_rank + local_rank
    master = address(world.master_host, world.master_port)
    return {
        "PADDLE_MASTER": master,
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
        "PADDLE_AUTO_CLUSTER": base.get("PADDLE_AUTO_CLUSTER", "0"),
        # For paddle.distributed.rpc. A script uses either this store or that of a group, at the same address.
        "PADDLE_MASTER_ENDPOINT": master,
        "PADDLE_WORKER_ENDPOINT": endpoints[rank],
        # Tells Paddle's auto-parallel API that a launcher has started it, so that it sets up what it needs.
        "POD_NAME": base.get("POD_NAME", "") or str(node),
        **devices,
    }


def backend(base: Mapping[str, str], kind: PaddleKind, devices: int) -> dict[str, str]:
    """Paddle's communication backend, where Paddle does not choose it itself."""
    if devices and kind.plugged_in:
        return {"PADDLE_DISTRI_BACKEND": "xccl", "PADDLE_XCCL_BACKEND": kind.name}
    if devices:
        return {}
    # Without it, Paddle on CPU forms no group at all, without a message.
    return {"PADDLE_DISTRI_BACKEND": base.get("PADDLE_DISTRI_BACKEND", "gloo")}


def selected(kind: PaddleKind, devices: int, local_rank: int, workers: int) -> dict[str, str]:
    """The devices of one worker, numbered among the visible ones, as Paddle does; a lone worker gets all of them.

    ``devices``: number of devices that Paddle may use here, 0 when it runs on the CPU.
    """
    if not devices:
        return {}
    mine = [local_rank % devices] if workers > 1 else range(devices)
    return {f"FLAGS_selected_{kind.name}s": ",".join(str(index) for index in mine)}


def trainer(endpoint: str) -> dict[str, str]:
    """The variables that Paddle's launcher adds for a trainer with parameter servers."""
    host, _, port = endpoint.rpartition(":")
    # Our pservers do not run the script, so there is no server for the rendezvous of Paddle's gloo.
    return {**_role("TRAINER"), "POD_IP": host.strip("[]"), "PADDLE_PORT": port, "PADDLE_WITH_GLOO": "0"}


@dataclass(frozen=True, slots=True)
class ScriptPlaces:
    """The pservers and trainers of a node that run the script."""

    servers: int = 0
    """Number of pservers, which have the first local ranks."""
    addresses: tuple[str, ...] = ()
    """``host:port`` by local rank, if they were given one by one."""


NOWHERE = ScriptPlaces()


def in_role(
    base: Mapping[str, str],
    job: ScriptServers,
    here: ScriptPlaces,
    world: World,
    node: NodeId,
    member: Member,
    endpoints: Sequence[str],
    local_rank: int,
) -> dict[str, str]:
    """The variables that Paddle's launcher sets for a pserver or trainer that runs the script. Ranks of a world are not
    among them."""
    servers, trainers = (job.servers, job.trainers) if job.servers else _by_role(job.each, world, endpoints)
    mine = here.addresses[local_rank] if here.addresses else endpoints[member.first_rank + local_rank]
    host, _, port = mine.rpartition(":")
    meeting = servers[0].rpartition(":")[0]
    environment = {
        **_role("PSERVER" if local_rank < here.servers else "TRAINER"),
        "PADDLE_NNODES": str(len(world.members)),
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(servers),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(trainers),
        "PADDLE_TRAINERS_NUM": str(len(trainers)),
        "PADDLE_PORT": port,
        "POD_IP": host.strip("[]"),
        "POD_NAME": base.get("POD_NAME", "") or str(node),
        # The first pserver serves it. A job's own store may use --gloo_port; this port is free in each round.
        "PADDLE_WITH_GLOO": job.gloo,
        "PADDLE_GLOO_RENDEZVOUS": "3",
        "PADDLE_GLOO_HTTP_ENDPOINT": f"{meeting}:{world.master_port}",
    }
    if local_rank >= here.servers:
        environment["PADDLE_TRAINER_ID"] = str(trainers.index(mine))
    return environment


def _role(name: str) -> dict[str, str]:
    return {"PADDLE_ROLE": name, "TRAINING_ROLE": name}


def _by_role(each: int, world: World, endpoints: Sequence[str]) -> tuple[list[str], list[str]]:
    """Addresses of all pservers and of all trainers, node by node."""
    servers: list[str] = []
    trainers: list[str] = []
    for member in world.members:
        mine = endpoints[member.first_rank : member.first_rank + member.slots]
        servers += mine[:each]
        trainers += mine[each:]
    return servers, trainers


def too_long(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the variables that are better passed in a file."""
    text = environment.get(LIMIT_VARIABLE, "")
    limit = int(text) if text.isdecimal() else LIMIT
    return tuple(name for name in LIMITED if len(environment.get(name, "")) >= limit)


def shortened(environment: Mapping[str, str], path: str) -> dict[str, str]:
    """The environment without variables that are too long. ``path``: the JSON file that contains them."""
    left_out = too_long(environment)
    return {**{name: value for name, value in environment.items() if name not in left_out}, BACKUP_VARIABLE: path}
