"""How a worker spent one window of time: what agents report for each rank, and the Master compares."""

from __future__ import annotations

from dataclasses import dataclass

UNKNOWN = -1.0
"""The value of a share that nothing has measured."""


@dataclass(frozen=True, slots=True)
class RankPace:
    """One worker in its last window, of at least some seconds and one step. Shares are of the window's time, from 0 to
    1. They need no common clock: the ranks of a world step together, so their windows contain the same kind of
    steps."""

    slot: int
    step_s: float
    """Median seconds from commit to commit."""
    slowest_s: float
    """Longest time from commit to commit."""
    peers_share: float = UNKNOWN
    """Waiting in collectives, for the other ranks and the network; ``UNKNOWN``: not measured."""
    commit_share: float = 0.0
    """Waiting for commits."""
    data_share: float = 0.0
    """Waiting for a data loader."""
    stopped_share: float = 0.0
    """Not running because it was stopped, as by SIGSTOP."""
    starved_share: float = 0.0
    """Its main thread could run, and had no CPU."""
    idle_share: float = 1.0
    """Its main thread used no CPU, and waited neither in collectives nor for commits: it was starved, or slept, or
    waited for data, a disk or a device."""
    samples: float = 0.0
    """Samples per step; 0: not known."""

    @property
    def kept_share(self) -> float:
        """The part of ``own_share`` in which it had no CPU. Not all of ``starved_share`` is that: a rank also waits for
        a CPU when it wakes up in a collective."""
        return min(self.starved_share, self.idle_share)

    @property
    def own_share(self) -> float:
        """Time that the other ranks may have had to wait for: neither spent in collectives nor on commits; ``UNKNOWN``
        if the time in collectives is."""
        if self.peers_share < 0:
            return UNKNOWN
        return min(1.0, max(0.0, 1.0 - self.peers_share - self.commit_share))

    @property
    def own_s(self) -> float:
        """The same in seconds per step; ``UNKNOWN`` likewise."""
        return UNKNOWN if self.peers_share < 0 else self.own_share * self.step_s
