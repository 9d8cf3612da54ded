"""torchrun's environment variables of a worker (torch 2.13)."""

from __future__ import annotations

from collections.abc import Mapping

from edl.agent.workers.devices import Devices
from edl.config import JobSpec
from edl.wire.records import Member, World

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""torchrun's default of ``--signals-to-handle``."""
ROLE = "default"
"""Default role name."""


def place(spec: JobSpec, world: World, member: Member, position: int, local_rank: int) -> dict[str, str]:
    """Variables for a worker's place in a world. Nodes may have different roles: ranks within a role count its workers
    in the order of their ranks."""
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
        # torch counts from 0, and counts rounds: for its scripts a change of membership is also a restart.
        "TORCHELASTIC_RESTART_COUNT": str(world.round - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        # Rank 0 of each round serves its own store, so the launchers are not needed once the workers run.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def one_device(devices: Devices, slot: int) -> dict[str, str]:
    """``--virtual-local-rank``: the worker sees only the device of its slot, and counts it as 0.

    As with torchrun, the slot's device is the one at its place in the list, even if the list is longer. If the node's
    devices are unknown, ``CUDA_VISIBLE_DEVICES`` is the slot's number. The launcher has checked that no list is too
    short.
    """
    seen: Mapping[str, str] = {variable: entries[slot] for variable, entries in devices.items() if slot < len(entries)}
    return {"LOCAL_RANK": "0", **(seen or {"CUDA_VISIBLE_DEVICES": str(slot)})}
