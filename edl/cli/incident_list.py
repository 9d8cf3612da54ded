"""The incidents of a job, from its history and from the failures that the Master keeps. Pure.

The Master keeps the failures of the last incident with their tracebacks; of earlier ones the history has a line for
each failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edl.wire.records import Failure
from edl.wire.status import HistoryEntry, Kind


@dataclass(frozen=True, slots=True)
class PastIncident:
    """What failed in one round."""

    round: int
    at_s: float
    """Seconds since 1970, by the clock of the Master's host or of the failed worker's; for display only. 0: unknown."""
    events: tuple[HistoryEntry, ...]
    """Its lines of the history, the root cause first. Empty if they are no longer kept."""
    failures: tuple[Failure, ...] = ()
    """The failed workers, the root cause first. Empty for all but the last incident."""


def incidents(history: Iterable[HistoryEntry], failures: Sequence[Failure]) -> list[PastIncident]:
    """All known incidents, the newest first. ``history``: oldest first. ``failures``: those of the last incident."""
    events: dict[int, list[HistoryEntry]] = {}
    for entry in history:
        if entry.kind == Kind.WORKER_FAILED.value:
            events.setdefault(entry.round, []).append(entry)
    failed: dict[int, list[Failure]] = {}
    for failure in failures:
        failed.setdefault(failure.round, []).append(failure)
    found = []
    for number in sorted({*events, *failed}, reverse=True):
        lines = sorted(events.get(number, ()), key=_distance)
        workers = sorted(failed.get(number, ()), key=lambda failure: failure.peer_loss)
        at_s = lines[0].at_s if lines else workers[0].time_s
        found.append(PastIncident(number, at_s, tuple(lines), tuple(workers)))
    return found


def _distance(entry: HistoryEntry) -> int:
    """Sorts the line that states the root cause first, consequences last; see ``edl.master.incidents``."""
    if "had lost a peer" in entry.text:
        return 2
    return 1 if entry.text.startswith("also ") else 0
