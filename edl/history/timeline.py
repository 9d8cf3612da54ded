"""What happened in a run of a job, as rows for people. Pure.

Rounds, failures and the outcome have rows of their own; they replace the events that say the same in fewer words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from edl.rendezvous.phrases import count
from edl.wire.history_lines import (
    UNKNOWN_S,
    HistoryLine,
    JobOutcome,
    RoundFormed,
    RoundUnderway,
    TermBegan,
)
from edl.wire.records import Failure
from edl.wire.status import HistoryEntry, Kind

SHORT_LINES = 3
"""Last lines of a traceback that are shown."""
FOLDED = 8
"""Names in a row about many nodes."""
_COMPLETE = re.compile(r"commit \d+ is complete in .*", re.DOTALL)
_FOLDS = {
    Kind.NODE_JOINED.value: "nodes are ready",
    Kind.NODE_RETURNED.value: "nodes are ready again",
    Kind.NODE_LOST.value: "nodes were lost",
    Kind.NODE_LEAVING.value: "nodes leave",
}
"""Kinds of events of which more than ``FOLDED`` in a row become one row."""
_COST = re.compile(r"; the change took .*? and (cost .*)", re.DOTALL)
"""What a change of the world has cost, at the end of the event that it is underway."""
_GOODPUT = re.compile(r"; (goodput .*)", re.DOTALL)
"""That of the whole job, at the end of the event that it has ended."""
_BAD = frozenset({Kind.WORKER_FAILED.value, Kind.NODE_LOST.value, Kind.DRAIN_FAILED.value})


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One row."""

    at_s: float
    label: str
    text: str
    """May have several lines, whose indentation counts."""
    mark: str = ""
    """``bad``, ``good`` or ``quiet``: how it is coloured."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One run of a job in short."""

    job: str
    run: str
    began_s: float
    """Wall clock of the first line that is left, seconds since 1970."""
    total_s: float
    outcome: JobOutcome | None
    """None: the job runs, or its last Master could not write the end."""
    rounds: int
    restarts: int
    """Restarts that were used; -1: unknown, because the job has not ended."""


def summary(lines: Sequence[HistoryLine], first: HistoryLine | None = None) -> Summary:
    """The run in short. ``first``: its first line, if it is not among ``lines``. Raises ``ValueError`` if
    there are no lines."""
    if not lines:
        raise ValueError("a run without lines")
    first = first if first is not None else lines[0]
    end = next((line for line in reversed(lines) if line.kind == "end"), None)
    outcome = end.fact() if end is not None else None
    ended = outcome if isinstance(outcome, JobOutcome) else None
    rounds = max((_number(line) for line in lines), default=0)
    return Summary(
        *(first.job, first.run, first.at_s, total_s(lines, first), ended),
        ended.rounds if ended is not None else rounds,
        ended.restarts if ended is not None else -1,
    )


def _number(line: HistoryLine) -> int:
    found = line.body.get("round", 0)
    return found if isinstance(found, int) else 0


def total_s(lines: Sequence[HistoryLine], first: HistoryLine) -> float:
    """Seconds from the first to the last line: by the wall clock, but at least what the Masters have measured in their
    terms, because a clock may have been set back."""
    terms: dict[int, float] = {}
    for line in lines:
        terms[line.term] = max(line.up_s, terms.get(line.term, 0.0))
    return max(lines[-1].at_s - first.at_s, sum(terms.values()))


def rows(lines: Sequence[HistoryLine], first: HistoryLine | None, *, errors: bool = False) -> list[TimelineRow]:
    """The rows of a run, in order. ``first``: see ``summary``. ``errors``: show whole tracebacks."""
    return list(_folded(_rows(lines, first, errors)))


def _rows(
    lines: Sequence[HistoryLine], first: HistoryLine | None, errors: bool
) -> Iterator[tuple[str, TimelineRow, str]]:
    """Rows with the kind of their event, empty for other rows, and its node."""
    facts = [(line, line.fact()) for line in lines]
    formed = {fact.round for _, fact in facts if isinstance(fact, RoundFormed)}
    underway = {fact.round: fact for _, fact in facts if isinstance(fact, RoundUnderway)}
    ended = any(isinstance(fact, JobOutcome) for _, fact in facts)
    events = [fact for _, fact in facts if isinstance(fact, HistoryEntry)]
    costs = {one.round: _tail(_COST, one) for one in events if one.kind == Kind.WORLD_UNDERWAY.value}
    goodput = "".join(_tail(_GOODPUT, one) for one in events if one.kind == Kind.JOB_ENDED.value)
    began = False
    for line, fact in facts:
        match fact:
            case TermBegan():
                start = not began and (first is None or first == line)
                began = True
                yield "", _began(line, fact) if start else TimelineRow(line.at_s, "Master", _master(fact), "quiet"), ""
            case HistoryEntry():
                replaced = _replaced(fact, formed, set(underway), ended)
                if not replaced:
                    mark = "bad" if fact.kind in _BAD else ""
                    yield fact.kind, TimelineRow(line.moment_s, fact.kind, fact.text, mark), fact.node
            case RoundFormed():
                yield "", _round(line, fact, underway.get(fact.round), costs.get(fact.round, "")), ""
            case RoundUnderway(round=number) if number not in formed:
                yield (
                    "",
                    TimelineRow(line.at_s, "underway", f"round {number}{_span(fact.formed_s, 'after it was formed')}"),
                    "",
                )
            case Failure() if errors or _tells_more(fact):
                yield "", TimelineRow(line.at_s, "error", failure_text(fact, whole=errors), "bad"), ""
            case JobOutcome():
                yield "", _end(line, fact, goodput), ""


def _tail(what: re.Pattern[str], entry: HistoryEntry) -> str:
    """A part of an event's text that no other line contains, after a semicolon; empty if it has none."""
    found = what.search(entry.text)
    return f"; {found[1]}" if found is not None else ""


def _replaced(entry: HistoryEntry, formed: set[int], underway: set[int], ended: bool) -> bool:
    """Whether another row says the same as this event, and more."""
    match entry.kind:
        case Kind.WORLD_FORMED.value:
            return entry.round in formed
        case Kind.WORLD_UNDERWAY.value:
            return entry.round in formed and entry.round in underway
        case Kind.JOB_ENDED.value:
            return ended
        case _:
            return False


def _folded(found: Iterable[tuple[str, TimelineRow, str]]) -> Iterator[TimelineRow]:
    """Combine rows that would fill the screen: many nodes in a row, and checkpoints of which only the last counts."""
    group: list[tuple[str, TimelineRow, str]] = []
    for one in found:
        if group and _fold_kind(group[0]) != _fold_kind(one):
            yield from _fold(group)
            group = []
        if not _fold_kind(one):
            yield one[1]
        else:
            group.append(one)
    yield from _fold(group)


def _fold_kind(one: tuple[str, TimelineRow, str]) -> str:
    kind, row, node = one
    if kind in _FOLDS and node:
        return kind
    return "complete" if kind == Kind.STATE.value and _COMPLETE.fullmatch(row.text) else ""


def _fold(group: Sequence[tuple[str, TimelineRow, str]]) -> Iterator[TimelineRow]:
    if not group:
        return
    kind, last = group[0][0], group[-1][1]
    if kind == Kind.STATE.value:
        before = f" (and {len(group) - 1} before it)" if len(group) > 1 else ""
        yield TimelineRow(last.at_s, last.label, last.text + before, "quiet")
    elif len(group) > FOLDED:
        names = ", ".join(node for _, _, node in group[:FOLDED])
        text = f"{len(group)} {_FOLDS[kind]}: {names} and {len(group) - FOLDED} more"
        yield TimelineRow(last.at_s, last.label, text, last.mark)
    else:
        yield from (row for _, row, _ in group)


def _began(line: HistoryLine, fact: TermBegan) -> TimelineRow:
    nodes = fact.settings.get("nodes")
    wanted = f"{nodes.get('minimum')} to {nodes.get('maximum')} nodes, " if isinstance(nodes, dict) else ""
    level = f"{fact.settings.get('fault_tolerance')}, " if fact.settings.get("fault_tolerance") else ""
    return TimelineRow(line.at_s, "began", f"{wanted}{level}Master on {fact.node} (edl {fact.edl})", "good")


def _master(fact: TermBegan) -> str:
    return f"node {fact.node} is the Master"


def _round(line: HistoryLine, fact: RoundFormed, underway: RoundUnderway | None, cost: str) -> TimelineRow:
    what = f"{count(fact.nodes)}, {count(fact.workers, 'worker')}"
    why = f": {fact.cause or fact.reason}" if fact.cause or fact.reason else ""
    return TimelineRow(line.at_s, f"round {fact.round}", f"{what}{why}{_took(fact, underway)}{cost}", "good")


def _took(fact: RoundFormed, underway: RoundUnderway | None) -> str:
    """What the change took, in brackets; empty if it is unknown."""
    steps = [("at the boundary" if fact.boundary else "workers stopped", fact.stopped_s), ("formed", fact.formed_s)]
    total = fact.formed_s
    if underway is not None and underway.noticed_s != UNKNOWN_S:
        total = underway.noticed_s
        steps.append(("underway", total))
    if total == UNKNOWN_S:
        return ""
    parts = [f"{name} {seconds(at_s)}" for name, at_s in steps if at_s != UNKNOWN_S]
    least = "" if fact.whole else "at least "
    return f" [took {least}{seconds(total)}: {', '.join(parts)}]"


def _span(value_s: float, what: str) -> str:
    return f", {seconds(value_s)} {what}" if value_s != UNKNOWN_S else ""


def _tells_more(fact: Failure) -> bool:
    """Whether a failure tells more than its event. One that lost a peer is a consequence, whose traceback only says
    so."""
    return bool(fact.traceback or fact.tail) and not fact.peer_loss


def failure_text(fact: Failure, *, whole: bool) -> str:
    """A failure, and the end of its traceback or output; with ``whole`` all of it."""
    note = " (it had lost a peer)" if fact.peer_loss else ""
    head = f"rank {fact.rank} on {fact.node} (pid {fact.pid}) {fact.what}{note}"
    details = (fact.traceback or fact.tail).rstrip().splitlines()
    if not whole:
        details = details[-SHORT_LINES:]
    return "\n".join([head, *(f"  {line}" for line in details)])


def _end(line: HistoryLine, fact: JobOutcome, goodput: str) -> TimelineRow:
    good = "good" if fact.exit_code == 0 else "bad"
    return TimelineRow(line.at_s, "ended", f"exit code {fact.exit_code}: {fact.reason}{goodput}", good)


def seconds(value_s: float) -> str:
    """A duration: ``0.21 s``, ``42.0 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 d 4 h``."""
    if value_s < 10:
        return f"{value_s:.2f} s"
    if value_s < 60:
        return f"{value_s:.1f} s"
    whole = round(value_s)
    for large, small, size, unit in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size} {large} {whole % size // unit} {small}"
    return f"{whole} s"
