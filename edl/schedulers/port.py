"""What the Master needs from a scheduler, and what a scheduler has to tell it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Size:
    """How many nodes a scheduler means to give."""

    nodes: int
    """Asked for: ``spec.replicas`` of a StatefulSet, jobs that are queued or run in Slurm."""
    there: int = -1
    """Of these, how many have been placed as far as it says; -1: it does not."""
    detail: str = ""
    """What holds it up, in its own words: ``2 pods pending: insufficient cpu``."""


@dataclass(frozen=True, slots=True)
class Sized:
    """Somebody else has changed the size, or this is what it is at the beginning of a watch."""

    size: Size


@dataclass(frozen=True, slots=True)
class Doomed:
    """A node is going to be taken away."""

    node: str
    """As in ``NodeInfo.node``; or the name or the address of its host."""
    reason: str
    lead_s: float = 0.0
    """Seconds that are left, as far as known; 0: unknown."""


Observation = Sized | Doomed


class Scheduler(Protocol):
    """One kind of scheduler, and in it the one object that this job's nodes come from.

    Every call raises ``SchedulerError``: ``retry`` says whether to try again later (no answer, 429, 500, a conflict) or
    not (forbidden, no such object). A call takes no longer than its own time limit.
    """

    name: str
    """In words, for people: ``statefulset/train in namespace ml``."""
    indexed: bool
    """It takes away nodes by their index, the highest first (``NodeInfo.index``)."""
    ask_none_at_end: bool
    """When the job has ended it has to be asked for none: it starts nodes again that have ended in good order, or still
    has some in its queue."""

    async def current(self) -> Size:
        """What it means to give now."""
        ...

    async def request(self, nodes: int, reason: str) -> None:
        """Give so many, no fewer than are there (see ``release``); asking twice for the same changes nothing."""
        ...

    async def release(self, names: Sequence[str], nodes: int, reason: str) -> None:
        """Take these nodes away, so that ``nodes`` are left. They take no part in training any more, and leave by
        themselves when told to. Doing it twice changes nothing."""
        ...

    def watch(self) -> AsyncIterator[Observation]:
        """What others do to it, beginning with what is; goes on until it is closed. It reconnects by itself; raises
        ``SchedulerError`` only where trying again is of no use. One that cannot tell ends at once."""
        ...

    async def close(self) -> None:
        """Let go of connections. Nothing that was asked for is taken back."""
        ...
