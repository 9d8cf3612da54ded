"""Lines of the history files (docs/history.md): their frame, and the content of each kind.

A line is one JSON object. Readers skip fields and kinds that they do not know, so a newer edl may add some.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from edl.errors import ProtocolError
from edl.wire import json_messages
from edl.wire.records import Failure, Settings
from edl.wire.status import HistoryEntry

FORMAT = 1
"""Version of the lines (``v``). Incremented when an older edl would misread them."""
UNKNOWN_S = -1.0
"""A duration that the Master does not know."""


@dataclass(frozen=True, slots=True)
class TermBegan:
    """A Master took over."""

    node: str
    """Node of the Master."""
    edl: str
    """Version of edl."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What all launchers of the job agree on, as in ``JobSpec``."""


@dataclass(frozen=True, slots=True)
class MemberLine:
    """One node of a round."""

    node: str
    slots: int
    """Number of its workers."""
    first_rank: int


@dataclass(frozen=True, slots=True)
class RoundFormed:
    """A world was formed. Durations are in seconds since the change was noticed, by the Master's monotonic clock."""

    round: int
    nodes: int
    workers: int
    members: tuple[MemberLine, ...]
    """In the order of their ranks; only the first ones of a large world."""
    reason: str
    """Why these nodes: ``3 nodes ready``."""
    cause: str = ""
    """Why the previous world ended; empty: there was none, or an earlier Master knows."""
    stopped_s: float = UNKNOWN_S
    """Until the last worker of the previous world had stopped, or waited at the step boundary."""
    formed_s: float = UNKNOWN_S
    """Until the world was formed."""
    boundary: bool = False
    """Whether the previous world was left at a step boundary."""
    whole: bool = True
    """Whether this Master has noticed the change itself. Otherwise the change began before it took over, and the
    durations count from then."""


@dataclass(frozen=True, slots=True)
class RoundUnderway:
    """All workers of a round train; reported only by scripts that use ``edl.run``."""

    round: int
    formed_s: float = UNKNOWN_S
    """Seconds since the world was formed."""
    noticed_s: float = UNKNOWN_S
    """Seconds since the change was noticed."""


@dataclass(frozen=True, slots=True)
class SizeSet:
    """Another size was requested."""

    generation: int
    """Number of accepted requests so far."""
    desired: int
    """Requested number of nodes; 0: none."""
    minimum: int
    maximum: int
    by: str = ""
    reason: str = ""
    suspended: str = ""
    """Who has suspended the job; empty: it is not suspended."""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The job has ended."""

    exit_code: int
    reason: str
    rounds: int
    restarts: int


Fact = TermBegan | HistoryEntry | RoundFormed | RoundUnderway | Failure | Settings | SizeSet | JobOutcome
"""The content of a line."""

KINDS: Mapping[type, str] = {
    TermBegan: "begin",
    HistoryEntry: "event",
    RoundFormed: "round",
    RoundUnderway: "underway",
    Failure: "failure",
    Settings: "settings",
    SizeSet: "size",
    JobOutcome: "end",
}
"""Names of the kinds of lines."""
_TYPES: Mapping[str, type] = {name: kind for kind, name in KINDS.items()}


@dataclass(frozen=True, slots=True)
class HistoryLine:
    """One line of a history file."""

    job: str
    run: str
    """Tells apart jobs that have had the same name, one after the other."""
    term: int
    """The fencing token of the Master that wrote the line."""
    seq: int
    """Counts this Master's lines from 1."""
    after: int
    """Number of the newest event that precedes the line; for an event its own number."""
    at_s: float
    """Wall clock of the Master's host, seconds since 1970; for display only."""
    up_s: float
    """Seconds since this Master took over, by its monotonic clock."""
    kind: str
    """A value of ``KINDS``, or one that only a newer edl knows."""
    body: Mapping[str, Any]
    """The fields of the fact."""
    copied: bool = False
    """Whether the line is about something before this Master's term, read from the store."""
    v: int = FORMAT

    @property
    def moment_s(self) -> float:
        """Wall clock of what the line is about, which may be older than the line."""
        own = self.body.get("at_s") if self.kind == "event" else None
        return float(own) if isinstance(own, (int, float)) else self.at_s

    def fact(self) -> Fact | None:
        """The content; None if this edl does not know it. Fields that it does not know are left out."""
        kind = _TYPES.get(self.kind)
        if kind is None:
            return None
        try:
            found: Fact = json_messages.from_plain(kind, self.body)
        except ProtocolError:
            return None
        return found


def line_text(line: HistoryLine) -> bytes:
    """A line of a file, with its end."""
    return json_messages.encode(line) + b"\n"


def parse_line(text: bytes) -> HistoryLine | None:
    """The inverse of ``line_text``; None for a torn or foreign line, and for one of a format that is too new."""
    try:
        line = _decoder().decode(text)
    except (ValueError, RecursionError):
        return None
    return line if line.v <= FORMAT else None


@functools.cache
def _decoder() -> msgspec.json.Decoder[HistoryLine]:
    return msgspec.json.Decoder(HistoryLine)
