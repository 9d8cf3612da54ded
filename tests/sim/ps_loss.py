"""What a death may take along when copies are asynchronous: the check of ``--replication=async`` in the simulation.

An acknowledged push may be missing only if a pserver that acknowledged it without waiting for the copy was buried while
it owned the bucket, and only if that was at most ``lag_s`` before the last push that it acknowledged so: while its copy
is further behind it acknowledges nothing. Hand-overs, drains and broken streams excuse nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tests.sim.ps_server import Pserver

Place = tuple[int, int, tuple[int, int]]
"""Bucket, row, push."""


class Losses:
    """Records which pserver acknowledged which push and when, and which owners died."""

    def __init__(self, lag_s: float) -> None:
        self._lag_s = lag_s
        self._acks: dict[tuple[int, tuple[int, int]], list[tuple[int, int, float]]] = {}
        """By bucket and push: (owner, copy that it did not wait for, when)."""
        self._last: dict[tuple[int, int], float] = {}
        """By owner and copy: when the last one was."""
        self._dead: set[tuple[int, int]] = set()
        """(pserver, bucket that it owned)."""
        self._living: frozenset[int] = frozenset()
        self.seen = 0
        """Pushes that were lost and might be."""

    def acknowledged(self, pserver: Pserver, push: tuple[int, int], buckets: Iterable[int], now_s: float) -> None:
        """A pserver acknowledges a part of a push."""
        owner = pserver.number
        for bucket in buckets:
            to, wait = pserver.followers(bucket)
            for copy in sorted(to - wait):
                self._acks.setdefault((bucket, push), []).append((owner, copy, now_s))
                self._last[owner, copy] = now_s

    def stepped(self, living: Iterable[int], roles: Collection[tuple[int, int]]) -> None:
        """The Master has taken an event. ``roles``: as they were before it."""
        before, self._living = self._living, frozenset(living)
        gone = before - self._living
        self._dead |= {(owner, bucket) for bucket, (owner, _) in enumerate(roles) if owner in gone}

    def unexcused(self, missing: Iterable[Place]) -> list[Place]:
        """Those of the missing places that had to be there."""
        missing = list(missing)
        found = sorted(place for place in missing if not self._excused(place[0], place[2]))
        self.seen += len(missing) - len(found)
        return found

    def _excused(self, bucket: int, push: tuple[int, int]) -> bool:
        return any(
            (owner, bucket) in self._dead and at_s >= self._last[owner, copy] - self._lag_s
            for owner, copy, at_s in self._acks.get((bucket, push), ())
        )
