"""Words for the status: a node's state, ranks and step time, and what the job waits for. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from edl.wire.status import JobStatus, NodeView

SLOW = 1.1
"""A node is slow if its step time is at least this many times the median."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Own times per step: the time that a rank spends on its part of a step, not waiting for others or for commits."""

    median_s: float
    slowest_s: float
    slowest: int
    """The slowest rank."""
    node: str
    """Its node."""


@dataclass(frozen=True, slots=True)
class JobPace:
    """How fast a job trains, from the step times that its nodes have reported in the current round."""

    steps_per_s: float = 0.0
    """0: no node has reported."""
    median_s: float = 0.0
    """Median of the nodes' step times in seconds."""
    slowest_s: float = 0.0
    slowest: str = ""
    """The slowest node; empty if none is at least ``SLOW`` times slower than the median."""
    slowest_ranks: str = ""
    nodes: int = 0
    """Number of nodes that have reported."""
    samples_per_s: float = 0.0
    """Of the whole world; 0: the size of a batch is not known."""
    ranks: RankTimes | None = None
    """Own times of the ranks; None: they are not known."""


def pace_of(status: JobStatus) -> JobPace:
    """The pace of the running world. Workers of a world step together, so it makes one step in the median of its nodes'
    step times."""
    reporting = [node for node in status.nodes if node.step_s > 0]
    if not reporting:
        return JobPace()
    median_s = statistics.median(node.step_s for node in reporting)
    last = max(reporting, key=lambda node: node.step_s)
    slow = is_slow(last.step_s, median_s)
    return JobPace(
        steps_per_s=1 / median_s,
        median_s=median_s,
        slowest_s=last.step_s,
        slowest=last.node if slow else "",
        slowest_ranks=ranks_of(last) if slow else "",
        nodes=len(reporting),
        samples_per_s=_samples(status) / median_s,
        ranks=_rank_times(status),
    )


def _samples(status: JobStatus) -> float:
    """Samples in a step of the whole world; 0: not known."""
    if status.settings.global_batch:
        return float(status.settings.global_batch)
    found = [one.samples for node in status.nodes for one in node.ranks]
    return sum(found) if found and min(found) > 0 and len(found) == status.world_size else 0.0


def _rank_times(status: JobStatus) -> RankTimes | None:
    """The own times of all ranks that have reported them; None for less than two."""
    found = [
        (one.own_s, node.first_rank + node.places.index(one.slot), node.node)
        for node in status.nodes
        for one in node.ranks
        if one.own_s >= 0 and one.slot in node.places
    ]
    if len(found) < 2:
        return None
    slowest_s, rank, node = max(found)
    return RankTimes(statistics.median(own_s for own_s, _, _ in found), slowest_s, rank, node)


def is_slow(step_s: float, median_s: float) -> bool:
    """Whether a node's step time is well above the median."""
    return step_s > 0 and step_s >= SLOW * median_s


def kind_of(node: NodeView) -> str:
    """The kind by which nodes are counted: state, draining, attached."""
    leaving = ", draining" if node.draining else ""
    return f"{node.state}{leaving}" if node.attached else f"{node.state}{leaving}, not attached"


def ranks_of(node: NodeView) -> str:
    """``0-3``, ``4`` for a single rank, or ``-`` outside the world."""
    if node.first_rank < 0:
        return "-"
    workers = len(node.places) or node.slots
    return str(node.first_rank) if workers == 1 else f"{node.first_rank}-{node.first_rank + workers - 1}"


def step_text(seconds: float) -> str:
    """A step time in three digits: ``81 ms``, ``1.25 s``; ``-`` if there is none."""
    if seconds <= 0:
        return "-"
    return f"{_three_digits(seconds)} s" if seconds >= 0.9995 else f"{_three_digits(1000 * seconds)} ms"


def rate_text(steps_per_s: float) -> str:
    """A step rate in three digits, or all that stand before the point."""
    return f"{_three_digits(steps_per_s)} steps/s"


def samples_text(samples_per_s: float) -> str:
    """The same for samples."""
    return f"{_three_digits(samples_per_s)} samples/s"


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 99.95 else f"{number:.3g}"


def pending(status: JobStatus) -> str:
    """What the size of the job waits for, without the reason of the status, which stands elsewhere."""
    waiting, reason = status.scale.waiting, status.reason
    return "" if waiting == reason else waiting.removeprefix(f"{reason}; ")
