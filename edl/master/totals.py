"""Counters of one Master for its metrics: entries of the history, causes of rounds, and durations of changes."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from edl.master.state import Phase, Record
from edl.master.view import complete, unwritten
from edl.metrics.facts import HistoryTotals
from edl.wire.status import HistoryEntry, Kind

CAUSES = (
    Kind.WORKER_FAILED,
    Kind.NODE_LOST,
    Kind.NODE_LEAVING,
    Kind.SLOT,
    Kind.SCALE,
    Kind.NODE_RETURNED,
    Kind.NODE_JOINED,
)
"""Kinds of entries that can be the cause of a new world, the most serious first."""
FIRST, OTHER = "first", "other"
"""Causes of the first world, and of one that none of ``CAUSES`` explains."""
FORMING, STARTING = "forming", "starting"
_SERIOUSNESS = {kind.value: number for number, kind in enumerate(CAUSES)}


class HistoryTally:
    """Counts from a take-over on. The counters begin at 0; a later Master does not know them."""

    def __init__(self) -> None:
        self._entries: collections.Counter[str] = collections.Counter()
        causes = (FIRST, *_SERIOUSNESS, OTHER)
        self._rounds = collections.Counter(dict.fromkeys(causes, 0))
        self._changes = collections.Counter({FORMING: 0, STARTING: 0})
        self._change_s = dict.fromkeys((FORMING, STARTING), 0.0)
        self._unwritten = 0
        self._checkpoint_at_s = 0.0
        self._cause = ""
        """The most serious kind of entry since the last world was formed."""
        self._round = 0
        self._forming_s: float | None = None
        """Time since which a world is being formed; None: one runs, or none should."""
        self._starting_s: float | None = None
        """Time at which the last world was formed; None: it trains, or was there before this Master."""

    def take_over(self, entries: Sequence[HistoryEntry], record: Record | None) -> None:
        """Begin where the history and the record of earlier Masters end."""
        for entry in entries:
            self._note(entry)
        self._round = record.round if record is not None else 0

    def stepped(self, record: Record, added: Sequence[HistoryEntry], now_s: float) -> None:
        """Count what one decision has changed. ``added``: its entries. ``now_s``: the Master's clock."""
        if record.round > self._round:  # perhaps one that ended in the same step
            self._measured(FORMING, self._forming_s, now_s)
            self._round, self._forming_s, self._starting_s = record.round, None, now_s
        if record.phase is not Phase.FORMING or record.sizing.suspended:
            self._forming_s = None
        elif self._forming_s is None:
            self._forming_s = now_s
        for entry in added:
            self._entries[entry.kind] += 1
            if entry.kind == Kind.WORLD_FORMED.value:
                self._rounds[FIRST if entry.round == 1 else self._cause or OTHER] += 1
            elif entry.kind == Kind.WORLD_UNDERWAY.value and self._starting_s is not None:
                self._measured(STARTING, self._starting_s, now_s)
                self._starting_s = None
            self._unwritten += unwritten(entry) is not None
            self._note(entry)

    def _note(self, entry: HistoryEntry) -> None:
        """Follow what does not begin at 0: the cause of the next world, and the newest checkpoint."""
        if complete(entry) is not None:
            self._checkpoint_at_s = entry.at_s
        if entry.kind == Kind.WORLD_FORMED.value:
            self._cause = ""
        elif _SERIOUSNESS.get(entry.kind, len(CAUSES)) < _SERIOUSNESS.get(self._cause, len(CAUSES)):
            self._cause = entry.kind

    def _measured(self, phase: str, since_s: float | None, now_s: float) -> None:
        self._changes[phase] += 1
        self._change_s[phase] += now_s - since_s if since_s is not None else 0.0

    @property
    def totals(self) -> HistoryTotals:
        """The current values."""
        return HistoryTotals(
            entries=dict(self._entries),
            rounds=dict(self._rounds),
            changes=dict(self._changes),
            change_s=dict(self._change_s),
            unwritten=self._unwritten,
            checkpoint_at_s=self._checkpoint_at_s,
        )
