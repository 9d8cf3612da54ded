"""The job's history, which is in the store and is shown by ``edl events``."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Sequence

from edl.master.events import HistoryEntry, Kind
from edl.wire.status import JournalEntry

KEPT = 500
"""Number of entries kept in the store and in memory."""


FOLDED = 8
"""Number of nodes that are named individually in one write, per kind of entry. Further ones are only counted, so that
a thousand joining nodes do not push older entries out of the history."""
_FOLDS = {Kind.NODE_JOINED: "are ready", Kind.NODE_LOST: "were lost"}
"""Kinds whose entries are combined, and what the combined entry says."""


def folded(notes: Sequence[HistoryEntry]) -> list[HistoryEntry]:
    """The notes of one write; more than ``FOLDED`` about joined or lost nodes are combined into one."""
    counts = collections.Counter(note.kind for note in notes)
    many = {kind for kind in _FOLDS if counts[kind] > FOLDED}
    found: list[HistoryEntry] = []
    for note in notes:
        if note.kind not in many:
            found.append(note)
            continue
        named = [one.node for one in notes if one.kind is note.kind]
        if note.node == named[0]:
            some, more = ", ".join(named[:FOLDED]), len(named) - FOLDED
            found.append(HistoryEntry(note.kind, f"{len(named)} nodes {_FOLDS[note.kind]}: {some} and {more} more"))
    return found


class Journal:
    """The last ``KEPT`` entries of the history, and the readers that follow it."""

    def __init__(self) -> None:
        self._entries: collections.deque[JournalEntry] = collections.deque(maxlen=KEPT)
        self._next = 1
        self._followers: set[asyncio.Queue[JournalEntry | None]] = set()
        self._closed = False

    def load(self, entries: Sequence[JournalEntry]) -> None:
        """Continue the history of the last Master."""
        self._entries.extend(sorted(entries, key=lambda entry: entry.number))
        if self._entries:
            self._next = self._entries[-1].number + 1

    def make(self, note: HistoryEntry, number_of_round: int, at_s: float) -> JournalEntry:
        """Create the next numbered entry from a note. It becomes visible with ``publish``. ``at_s``: seconds since the
        Unix epoch."""
        entry = JournalEntry(self._next, at_s, note.kind.value, note.text, note.node, number_of_round)
        self._next += 1
        return entry

    def outdated(self, added: Sequence[JournalEntry]) -> list[int]:
        """Numbers of the entries to delete from the store when these are added."""
        return [entry.number - KEPT for entry in added if entry.number > KEPT]

    def publish(self, added: Sequence[JournalEntry]) -> None:
        """Make entries visible that have been written to the store."""
        self._entries.extend(added)
        for follower in self._followers:
            for entry in added:
                follower.put_nowait(entry)

    def last(self, count: int) -> tuple[JournalEntry, ...]:
        """The newest ``count`` entries, oldest first."""
        return tuple(self._entries)[-count:]

    async def read(self, after: int, follow: bool) -> AsyncIterator[JournalEntry]:
        """Yields entries with a number above ``after``; with ``follow`` also new ones, until the Master steps down."""
        queue: asyncio.Queue[JournalEntry | None] = asyncio.Queue()
        follow = follow and not self._closed
        if follow:
            self._followers.add(queue)
        try:
            for entry in tuple(self._entries):
                if entry.number > after:
                    yield entry
            while follow and (new := await queue.get()) is not None:
                if new.number > after:
                    yield new
        finally:
            self._followers.discard(queue)

    def close(self) -> None:
        """End all readers that follow, including future ones."""
        self._closed = True
        for follower in self._followers:
            follower.put_nowait(None)
