"""The interface between the Master and a scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SchedulerSize:
    """How many nodes a scheduler intends to provide."""

    nodes: int
    """The requested number: ``spec.replicas`` of a StatefulSet, or queued and running jobs in Slurm."""
    there: int = -1
    """How many of these have been placed; -1: unknown."""
    detail: str = ""
    """Pending nodes, in the scheduler's own words: ``2 pods pending: insufficient cpu``."""


@dataclass(frozen=True, slots=True)
class Sized:
    """The size has been changed by others, or is reported at the beginning of a watch."""

    size: SchedulerSize


@dataclass(frozen=True, slots=True)
class Doomed:
    """A node is going to be removed."""

    node: str
    """As in ``NodeInfo.node``; or the name or the address of its host."""
    reason: str
    lead_s: float = 0.0
    """Seconds left, as far as known; 0: unknown."""


Observation = Sized | Doomed


class Scheduler(Protocol):
    """One kind of scheduler, and in it the one object that provides this job's nodes.

    Every call raises ``SchedulerError``, whose ``retry`` says whether to try again later (no answer, 429, 500, a
    conflict) or not (forbidden, no such object). A call takes no longer than its own time limit.
    """

    name: str
    """Name for messages: ``statefulset/train in namespace ml``."""
    indexed: bool
    """Whether it removes nodes by their index, the highest first (``NodeInfo.index``)."""
    ask_none_at_end: bool
    """Whether it must be asked for 0 nodes when the job has ended, because it would restart nodes that have exited
    normally, or still has some in its queue."""

    async def current(self) -> SchedulerSize:
        """The size that it intends to provide now."""
        ...

    async def request(self, nodes: int, reason: str) -> None:
        """Provide that many nodes, at least as many as now (see ``release`` for fewer). Idempotent."""
        ...

    async def release(self, names: Sequence[str], nodes: int, reason: str) -> None:
        """Remove these nodes, so that ``nodes`` are left. They no longer take part in training, and exit on request.
        Idempotent."""
        ...

    def watch(self) -> AsyncIterator[Observation]:
        """Yields changes made by others, beginning with the current size, until it is closed. It reconnects
        automatically, and raises ``SchedulerError`` only where retrying is useless. A scheduler that cannot report
        changes ends at once."""
        ...

    async def close(self) -> None:
        """Close connections. Nothing that was requested is undone."""
        ...
