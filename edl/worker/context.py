"""``context()``: the place of this process in its world."""

from __future__ import annotations

import os
from dataclasses import dataclass

from edl.worker import session as sessions
from edl.worker.session import Session


@dataclass(frozen=True, slots=True)
class Context:
    """This worker's place in the running world. Immutable: call ``context()`` again in the next round."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: str
    nodes: int
    round: int
    """From 1, the same number on all workers."""
    should_stop: bool
    """This worker is about to leave this world or to end, at the agreed step boundary or at the next one."""
    reason: str
    """The reason for ``should_stop``; else empty."""
    launched: bool
    """Started by the launcher; False means that the process runs alone."""
    replica_size: int = 1
    """Workers that hold one replica of the model together (``--replica-size``)."""


def context() -> Context:
    """The current place of this process; waits until it has one in a world.

    Child processes of a worker, such as data loaders, get the worker's place.
    """
    if sessions.is_helper(os.environ):
        return _inherited()
    return context_of(sessions.current())


def context_of(session: Session) -> Context:
    """The context of a given session."""
    if session.seat is None:
        if session.environment.get("EDL_PS"):
            session.enter_alone()  # one that parks might be given a second process, if the world changes meanwhile
        else:
            session.enter(sessions.introduced() if session.framework is None else session.framework)
        session.place()
    seat, link = session.seat, session.link
    assert seat is not None, "place() sets it"  # noqa: S101
    reason = link.leaving if link is not None else ""
    return Context(
        rank=seat.rank,
        local_rank=seat.local_rank,
        world_size=seat.world_size,
        local_world_size=seat.local_world_size,
        node=seat.node,
        nodes=seat.nodes,
        round=seat.round,
        should_stop=bool(reason),
        reason=reason,
        launched=link is not None,
        replica_size=number("EDL_REPLICA_SIZE", 1),
    )


def number(name: str, default: int) -> int:
    """An environment variable as a number."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


def _inherited() -> Context:
    return Context(
        rank=number("RANK", 0),
        local_rank=number("LOCAL_RANK", 0),
        world_size=number("WORLD_SIZE", 1),
        local_world_size=number("LOCAL_WORLD_SIZE", 1),
        node=os.environ.get("EDL_NODE_ID", ""),
        nodes=number("EDL_NODES", 1),
        round=number("EDL_ROUND", 1),
        should_stop=False,
        reason="",
        launched=True,
        replica_size=number("EDL_REPLICA_SIZE", 1),
    )
