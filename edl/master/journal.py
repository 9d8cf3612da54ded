"""A job's history: kept in the store, read by ``edl events``."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Sequence

from edl.master.events import Kind, Note
from edl.wire.status import JournalEntry

KEPT = 500
"""Lines kept in the store and in memory."""


FOLDED = 8
"""Nodes of one kind of line that are named one by one; of more that come together only the number is told, so that a
thousand nodes which join do not push the cause of it out of the history."""
_FOLDS = {Kind.NODE_JOINED: "are ready", Kind.NODE_LOST: "were lost"}


def folded(notes: Sequence[Note]) -> list[Note]:
    """The same notes of one write; many of a kind as one."""
    counts = collections.Counter(note.kind for note in notes)
    many = {kind for kind in _FOLDS if counts[kind] > FOLDED}
    found: list[Note] = []
    for note in notes:
        if note.kind not in many:
            found.append(note)
            continue
        named = [one.node for one in notes if one.kind is note.kind]
        if note.node == named[0]:
            some, more = ", ".join(named[:FOLDED]), len(named) - FOLDED
            found.append(Note(note.kind, f"{len(named)} nodes {_FOLDS[note.kind]}: {some} and {more} more"))
    return found


class Journal:
    """The last lines, and everybody who follows them."""

    def __init__(self) -> None:
        self._entries: collections.deque[JournalEntry] = collections.deque(maxlen=KEPT)
        self._next = 1
        self._followers: set[asyncio.Queue[JournalEntry | None]] = set()
        self._closed = False

    def load(self, entries: Sequence[JournalEntry]) -> None:
        """Go on where the last Master stopped."""
        self._entries.extend(sorted(entries, key=lambda entry: entry.number))
        if self._entries:
            self._next = self._entries[-1].number + 1

    def make(self, note: Note, number_of_round: int, at_s: float) -> JournalEntry:
        """Number a note. It counts once ``publish`` has been called."""
        entry = JournalEntry(self._next, at_s, note.kind.value, note.text, note.node, number_of_round)
        self._next += 1
        return entry

    def outdated(self, added: Sequence[JournalEntry]) -> list[int]:
        """Numbers of lines that fall out of the store when these are added."""
        return [entry.number - KEPT for entry in added if entry.number > KEPT]

    def publish(self, added: Sequence[JournalEntry]) -> None:
        """The lines are in the store: show them."""
        self._entries.extend(added)
        for follower in self._followers:
            for entry in added:
                follower.put_nowait(entry)

    def last(self, count: int) -> tuple[JournalEntry, ...]:
        """The newest lines, oldest first."""
        return tuple(self._entries)[-count:]

    async def read(self, after: int, follow: bool) -> AsyncIterator[JournalEntry]:
        """Lines numbered above ``after``; with ``follow`` until the Master goes."""
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
        """End every follower, also those that come later."""
        self._closed = True
        for follower in self._followers:
            follower.put_nowait(None)
