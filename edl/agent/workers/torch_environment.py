"""What torchrun's workers find in their environment (torch 2.13), as ours do."""

from __future__ import annotations

from collections.abc import Mapping

from edl.agent.workers.devices import Devices
from edl.config import JobSpec
from edl.wire.messages import Member, World

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""torchrun's default of ``--signals-to-handle``."""
ROLE = "default"
"""The name of a role that nobody has named."""


def place(spec: JobSpec, world: World, member: Member, position: int, local_rank: int) -> dict[str, str]:
    """A worker's place in a world. Nodes may have different roles: ranks by role count the workers of one of them, in
    the order of their ranks."""
    rank = member.first_rank + local_rank
    same = [peer for peer in world.members if peer.role == member.role]
    before = sum(peer.slots for peer in same if peer.first_rank < member.first_rank)
    return {
        "LOCAL_RANK": str(local_rank),
        "RANK": str(rank),
        "GROUP_RANK": str(position),
        "ROLE_RANK": str(before + local_rank),
        "ROLE_NAME": member.role or ROLE,
        "LOCAL_WORLD_SIZE": str(member.slots),
        "WORLD_SIZE": str(world.size),
        "GROUP_WORLD_SIZE": str(len(world.members)),
        "ROLE_WORLD_SIZE": str(sum(peer.slots for peer in same)),
        "MASTER_ADDR": world.master_host,
        "MASTER_PORT": str(world.master_port),
        # torch counts from 0, and counts rounds: a change of membership is a restart for its scripts as well.
        "TORCHELASTIC_RESTART_COUNT": str(world.round - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        # Each round's rank 0 serves its own store, so that no launcher is needed once the workers run.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def one_device(devices: Devices, slot: int) -> dict[str, str]:
    """``--virtual-local-rank``: a worker that sees one device, the one of its slot, and counts it as 0.

    As with torchrun, the slot's device is the one at its place in the list, however many more there are; on a node
    whose devices are not known ``CUDA_VISIBLE_DEVICES`` is the slot's number. The launcher has seen to it that no list
    is too short.
    """
    seen: Mapping[str, str] = {variable: entries[slot] for variable, entries in devices.items() if slot < len(entries)}
    return {"LOCAL_RANK": "0", **(seen or {"CUDA_VISIBLE_DEVICES": str(slot)})}
