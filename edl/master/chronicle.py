"""Derives the lines of the history files from what the Master has written to the store. Pure.

The history has one entry for each thing that happened. These lines add what a reader of an ended job would ask for:
how long each change of the world took, the errors of failed workers, the settings and the outcome.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edl.master.events import Kind
from edl.master.state import MasterState, NodeStatus, Phase
from edl.types import FencingToken
from edl.wire.history_lines import (
    KINDS,
    UNKNOWN_S,
    Fact,
    HistoryLine,
    JobOutcome,
    MemberLine,
    RoundFormed,
    RoundUnderway,
    SizeSet,
    TermBegan,
)
from edl.wire.purpose import Purpose
from edl.wire.records import World
from edl.wire.status import HistoryEntry

MOST_MEMBERS = 64
"""Number of members of a round that are listed."""
_BUSY = frozenset({NodeStatus.RUNNING, NodeStatus.STOPPING, NodeStatus.DONE})
"""Statuses of nodes whose workers of the previous world have not stopped."""
_CHANGES = frozenset({Purpose.SWITCH, Purpose.KILL})
"""Purposes of agreements after which the world ends."""
_FORMED = Kind.WORLD_FORMED.value


@dataclass(frozen=True, slots=True)
class WrittenStep:
    """One step of the Master whose changes are in the store."""

    term: FencingToken
    before: MasterState | None
    """The state before the step; None: the Master has just taken over."""
    state: MasterState
    added: tuple[HistoryEntry, ...]
    now_s: float
    """The Master's clock."""
    at_s: float
    """Wall clock, seconds since 1970."""
    kept: tuple[HistoryEntry, ...] = ()
    """After a take-over: the entries of earlier Masters that the store has kept."""


@dataclass(frozen=True, slots=True)
class _WorldChange:
    """A change of the world that has been noticed."""

    noticed_s: float
    whole: bool = True
    stopped_s: float = UNKNOWN_S
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Chronicle:
    """What is known between two steps."""

    job: str
    run: str
    node: str
    """The Master's node."""
    edl: str
    """Version of edl."""
    settings: Mapping[str, Any]
    """See ``TermBegan``."""
    term: FencingToken = FencingToken(0)
    seq: int = 0
    last: int = 0
    """Number of the newest event."""
    began_s: float = 0.0
    change: _WorldChange | None = None
    """The change in progress; None: there is none."""
    formed: tuple[int, float, float] = (0, 0.0, 0.0)
    """The last round, and when it was formed and its change noticed; round 0: unknown."""


def step_lines(chronicle: Chronicle, written: WrittenStep) -> tuple[Chronicle, tuple[HistoryLine, ...]]:
    """The lines for one step, in order. Steps may be missing in between: then their lines are missing, too."""
    pen = _Pen(chronicle, written)
    pen.write()
    return pen.chronicle, tuple(pen.lines)


class _Pen:
    """Writes the lines of one step."""

    def __init__(self, chronicle: Chronicle, written: WrittenStep) -> None:
        self.chronicle = chronicle
        self.lines: list[HistoryLine] = []
        self._written = written

    def write(self) -> None:
        """Write all lines of the step."""
        if self._written.term != self.chronicle.term:
            self._begin()
        for entry in self._written.added:
            self._set(last=entry.number)
            self._line(entry, entry.number)
        repeated = self._written.before is None and bool(self._written.kept)
        for fact in self._facts():
            self._line(fact, self.chronicle.last, copied=repeated and not isinstance(fact, JobOutcome))
        self._follow_change()

    def _set(self, **changes: Any) -> None:
        self.chronicle = dataclasses.replace(self.chronicle, **changes)

    def _line(self, fact: Fact, after: int, *, copied: bool = False) -> None:
        now, seq = self._written, self.chronicle.seq + 1
        self._set(seq=seq)
        where = self.chronicle.job, self.chronicle.run, int(now.term), seq, after
        body = {field.name: getattr(fact, field.name) for field in dataclasses.fields(fact)}
        up_s = round(now.now_s - self.chronicle.began_s, 6)
        self.lines.append(HistoryLine(*where, now.at_s, up_s, KINDS[type(fact)], body, copied))

    def _begin(self) -> None:
        """The first step of a term that is seen: what an earlier Master may not have written is repeated. Readers
        recognise repetitions."""
        now, record = self._written, self._written.state.record
        last = max((entry.number for entry in now.kept), default=0)
        self._set(term=now.term, seq=0, last=last, began_s=now.now_s, change=None, formed=(0, 0.0, 0.0))
        if record.phase is not Phase.RUNNING and now.before is None:
            self._set(change=_WorldChange(now.now_s, whole=not record.round and not last))
        own = self.chronicle
        self._line(TermBegan(own.node, own.edl, own.settings), last)
        for entry in now.kept:
            self._line(entry, entry.number, copied=True)
        if now.before is None and record.world is not None and now.kept:
            formed = [one.number for one in now.kept if one.kind == _FORMED and one.round == record.round]
            reason = record.reason if record.phase is Phase.RUNNING else ""
            self._line(_formed(record.world, reason), formed[0] if formed else last, copied=True)

    def _facts(self) -> Iterator[Fact]:
        """What is new in the record."""
        now, state = self._written, self._written.state
        record, before = state.record, now.before.record if now.before is not None else None
        yield from (one for one in record.failures if before is None or one not in before.failures)
        if record.settings.number and (before is None or record.settings != before.settings):
            yield record.settings
        sizing = record.sizing
        if sizing.generation and (before is None or sizing != before.sizing):
            bounds = sizing.bounds(state.spec.nodes)
            who = sizing.by, sizing.reason, sizing.suspended
            yield SizeSet(sizing.generation, sizing.desired, bounds.minimum, bounds.maximum, *who)
        if record.world is not None and before is not None and record.round > before.round:
            yield self._round(record.world, record.reason)
        number, formed_s, noticed_s = self.chronicle.formed
        for entry in now.added:
            if entry.kind == Kind.WORLD_UNDERWAY.value:
                known = number == entry.round
                spans = (now.now_s - formed_s, now.now_s - noticed_s) if known else (UNKNOWN_S, UNKNOWN_S)
                yield RoundUnderway(entry.round, *(round(span, 6) for span in spans))
        outcome = record.outcome
        if outcome is not None and (before is None or before.outcome is None) and (now.added or now.kept):
            restarts = min(record.restarts, state.spec.max_restarts)
            yield JobOutcome(outcome.exit_code, outcome.reason, record.round, restarts)

    def _round(self, world: World, reason: str) -> RoundFormed:
        now_s = self._written.now_s
        change = self.chronicle.change or _WorldChange(now_s)
        spent_s = round(now_s - change.noticed_s, 6)
        self._set(change=None, formed=(world.round, now_s, change.noticed_s))
        return dataclasses.replace(
            _formed(world, reason),
            cause=change.cause,
            # A world forms when the last one has stopped, perhaps in the same step.
            stopped_s=spent_s if change.stopped_s == UNKNOWN_S and world.round > 1 else change.stopped_s,
            formed_s=spent_s,
            boundary=self._written.state.planned,
            whole=change.whole,
        )

    def _follow_change(self) -> None:
        """Note when a change of the world is noticed, and when the workers have stopped for it."""
        now, state, change = self._written, self._written.state, self.chronicle.change
        record = state.record
        before = now.before.record if now.before is not None else None
        resumed = before is not None and bool(before.sizing.suspended) and not record.sizing.suspended
        if record.phase is Phase.ENDED or not _changing(state):
            self._set(change=None)
            return
        if change is None or resumed:
            change = _WorldChange(now.now_s)
        if not change.cause and record.phase is Phase.FORMING and record.world is not None:
            change = dataclasses.replace(change, cause=record.reason)
        waits = record.phase is Phase.FORMING and change.stopped_s == UNKNOWN_S
        members = record.world.members if record.world is not None and waits else ()
        if members and not any(_is_busy(state, member.node, member.incarnation) for member in members):
            change = dataclasses.replace(change, stopped_s=round(now.now_s - change.noticed_s, 6))
        self._set(change=change)


def _formed(world: World, reason: str) -> RoundFormed:
    members = (MemberLine(one.node, one.slots, one.first_rank) for one in world.members[:MOST_MEMBERS])
    return RoundFormed(world.round, len(world.members), world.size, tuple(members), reason, whole=False)


def _changing(state: MasterState) -> bool:
    """Whether the world is about to change, or there is none."""
    agreed = state.agreement is not None and state.agreement.purpose in _CHANGES
    return state.record.phase is Phase.FORMING or agreed or bool(state.held)


def _is_busy(state: MasterState, node: Any, incarnation: int) -> bool:
    entry = state.nodes.get(node)
    return entry is not None and entry.info.incarnation == incarnation and entry.status in _BUSY
