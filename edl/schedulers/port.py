"""The interface between the Master and a scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SchedulerSize:
    """How many nodes a scheduler intends to provide."""

    nodes: int
    """The requested number, such as ``spec.replicas`` of a StatefulSet, or queued and running jobs in Slurm."""
    there: int = -1
    """How many of these have been placed on a host; -1: unknown."""
    detail: str = ""
    """Pending nodes, in the scheduler's own words: ``2 pods pending: insufficient cpu``."""


@dataclass(frozen=True, slots=True)
class Sized:
    """The scheduler's size, reported at the beginning of a watch and after each change."""

    size: SchedulerSize


@dataclass(frozen=True, slots=True)
class Disruption:
    """The scheduler announces that it will remove a node."""

    node: str
    """Its name (``NodeInfo.node``), or the name or the address of its host."""
    reason: str
    lead_s: float = 0.0
    """Seconds until the removal; 0: unknown."""


Observation = Sized | Disruption


class Scheduler(Protocol):
    """The object of a scheduler that provides this job's nodes.

    Every call may raise ``SchedulerError``, whose ``retry`` says whether to try again later (no answer, 429, 500, a
    conflict) or not (forbidden, no such object). Each adapter limits the duration of its calls.
    """

    name: str
    """Name for messages: ``statefulset/train in namespace ml``."""
    indexed: bool
    """Whether it removes nodes by their index, the highest first (``NodeInfo.index``)."""
    ask_none_at_end: bool
    """Whether it must be asked for 0 nodes when the job has ended, because it would restart nodes that have exited, or
    still has some in its queue."""

    async def current(self) -> SchedulerSize:
        """The size that it intends to provide now."""
        ...

    async def request(self, nodes: int, reason: str) -> None:
        """Provide ``nodes`` nodes, at least as many as now; for fewer see ``release``. Idempotent."""
        ...

    async def release(self, names: Sequence[str], nodes: int, reason: str) -> None:
        """Remove these nodes, so that ``nodes`` are left. They have been ordered to leave, and do not train any more.
        Idempotent."""
        ...

    def watch(self) -> AsyncIterator[Observation]:
        """Yields the current size and then changes made by others, until it is closed. It reconnects by itself, and
        raises ``SchedulerError`` only if a retry is useless. With a scheduler that cannot report changes it ends at
        once."""
        ...

    async def close(self) -> None:
        """Close connections. What was requested stays in effect."""
        ...
