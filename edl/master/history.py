"""The job's history, which is in the store and is shown by ``edl events``."""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import AsyncIterator, Sequence

from edl.master.events import HistoryNote, Kind
from edl.master.view import complete
from edl.wire.status import HistoryEntry

KEPT = 500
"""Number of entries kept in the store and in memory."""
RECENT = 100
"""Number of newest entries that are kept whatever they are about."""
ROUTINE = frozenset(
    kind.value
    for kind in (
        Kind.NODE_JOINED,
        Kind.NODE_RETURNED,
        Kind.WORLD_FORMED,
        Kind.WORLD_UNDERWAY,
        Kind.BOUNDARY,
        Kind.STATE,
        Kind.SERVICE,
        Kind.WAITING,
    )
)
"""Kinds of entries that make room for others. Entries about causes, such as failures, losses, ends and requests, are
kept longer: they explain the rest."""
ALSO = "also "
"""Beginning of the text about a failure that is not the first of its incident."""

FOLDED = 8
"""Number of nodes that are named individually in one write, per kind of entry. Further ones are only counted, so that
a thousand joining nodes do not push older entries out of the history."""
_FOLDS = {
    Kind.NODE_JOINED: "are ready",
    Kind.NODE_RETURNED: "are ready again",
    Kind.NODE_LOST: "were lost",
    Kind.NODE_LEAVING: "leave",
}
"""Kinds whose entries in one write are combined, and what the combined entry says. Entries of different writes are not
combined, because each has its time and its node; checkpoints are the exception (see ``JobHistory``)."""


def folded(notes: Sequence[HistoryNote]) -> list[HistoryNote]:
    """The notes of one write; more than ``FOLDED`` of one kind in ``_FOLDS`` are combined into one."""
    counts = collections.Counter(note.kind for note in notes)
    many = {kind for kind in _FOLDS if counts[kind] > FOLDED}
    found: list[HistoryNote] = []
    for note in notes:
        if note.kind not in many:
            found.append(note)
            continue
        named = [one.node for one in notes if one.kind is note.kind]
        if note.node == named[0]:
            some, more = ", ".join(named[:FOLDED]), len(named) - FOLDED
            text = f"{len(named)} nodes {_FOLDS[note.kind]}: {some} and {more} more"
            found.append(HistoryNote(note.kind, text, round=note.round))
    return _failures_folded(found)


def _failures_folded(notes: list[HistoryNote]) -> list[HistoryNote]:
    """``notes`` with the first ``FOLDED`` failures that are not the first of their incident; the others become one."""
    others = [index for index, note in enumerate(notes) if _is_other_failure(note)]
    if len(others) <= FOLDED + 1:
        return notes
    more = [notes[index].node for index in others[FOLDED:]]
    nodes = list(dict.fromkeys(more))
    some = ", ".join(nodes[:FOLDED]) + (f" and {len(nodes) - FOLDED} more nodes" if len(nodes) > FOLDED else "")
    text = f"{ALSO}{len(more)} more workers failed, on {some}"
    dropped = {*others[FOLDED + 1 :]}
    rest = [note for index, note in enumerate(notes) if index not in dropped]
    rest[others[FOLDED]] = HistoryNote(Kind.WORKER_FAILED, text, round=notes[others[FOLDED]].round)
    return rest


def _is_other_failure(note: HistoryNote) -> bool:
    return note.kind is Kind.WORKER_FAILED and note.text.startswith(ALSO)


def remaining(entries: Sequence[HistoryEntry]) -> tuple[HistoryEntry, ...]:
    """The ``KEPT`` entries that stay. Old routine entries go first, then the oldest; the ``RECENT`` newest ones stay,
    and so does the newest one about a complete checkpoint, which the status shows."""
    surplus = len(entries) - KEPT
    if surplus <= 0:
        return tuple(entries)
    checkpoint = next((entry.number for entry in reversed(entries) if complete(entry)), 0)
    old = [entry for entry in entries[:-RECENT] if entry.number != checkpoint]
    gone = {entry.number for entry in itertools.islice(filter(_is_routine, old), surplus)}
    causes = (entry.number for entry in old if entry.number not in gone)
    gone.update(itertools.islice(causes, surplus - len(gone)))
    return tuple(entry for entry in entries if entry.number not in gone)


def _is_routine(entry: HistoryEntry) -> bool:
    """Whether an entry makes room for others. Of those about the state, only complete checkpoints do."""
    return entry.kind in ROUTINE and (entry.kind != Kind.STATE.value or complete(entry) is not None)


class JobHistory:
    """The ``KEPT`` entries of the history that ``remaining`` chooses, and the readers that follow it.

    Of consecutive entries about complete checkpoints only the newest is kept. Otherwise, in a job that saves every
    minute, these entries would displace all others from the history, and from the status, within hours.
    """

    def __init__(self) -> None:
        self._entries: tuple[HistoryEntry, ...] = ()
        self._next = 1
        self._followers: set[asyncio.Queue[HistoryEntry | None]] = set()
        self._closed = False

    def load(self, entries: Sequence[HistoryEntry]) -> None:
        """Continue the history of the last Master."""
        self._entries = tuple(sorted(entries, key=lambda entry: entry.number))
        if self._entries:
            self._next = self._entries[-1].number + 1

    def make(self, note: HistoryNote, number_of_round: int, at_s: float) -> HistoryEntry:
        """Create the next numbered entry from a note. It becomes visible with ``publish``. ``at_s``: seconds since the
        Unix epoch."""
        number = note.round or number_of_round
        entry = HistoryEntry(self._next, at_s, note.kind.value, note.text, note.node, number, note.severity)
        self._next += 1
        return entry

    def change(self, added: Sequence[HistoryEntry]) -> tuple[list[HistoryEntry], list[int]]:
        """What adding these entries changes in the store: the entries to write, and the numbers of those to delete."""
        kept = {entry.number for entry in self._with(added)}
        return (
            [entry for entry in added if entry.number in kept],
            [entry.number for entry in self._entries if entry.number not in kept],
        )

    def _with(self, added: Sequence[HistoryEntry]) -> tuple[HistoryEntry, ...]:
        """The entries that are kept once these are added."""
        kept: list[HistoryEntry] = []
        for entry in (*self._entries, *added):
            if kept and complete(kept[-1]) and complete(entry):
                kept.pop()
            kept.append(entry)
        return remaining(kept)

    def publish(self, added: Sequence[HistoryEntry]) -> None:
        """Make entries visible that have been written to the store. Readers that follow get all of them."""
        self._entries = self._with(added)
        for follower in self._followers:
            for entry in added:
                follower.put_nowait(entry)

    def last(self, count: int) -> tuple[HistoryEntry, ...]:
        """The newest ``count`` entries, oldest first."""
        return self._entries[-count:]

    async def read(self, after: int, follow: bool) -> AsyncIterator[HistoryEntry]:
        """Yields entries with a number above ``after``; with ``follow`` also new ones, until the Master steps down."""
        queue: asyncio.Queue[HistoryEntry | None] = asyncio.Queue()
        follow = follow and not self._closed
        if follow:
            self._followers.add(queue)
        try:
            for entry in self._entries:
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
