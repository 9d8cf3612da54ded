"""Makes spans from the lines of the history: one trace for each change of the world, and its parts. Pure.

The parts are sent when they end. The whole change ends when all workers train, which only scripts report that use
``edl.run``; for others it ends when the world is formed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from edl.wire.history_lines import UNKNOWN_S, HistoryLine

CHANGE = "world change"
STOP = "stop workers"
FORM = "form world"
START = "start training"
MOST_ERRORS = 8
"""Failed workers noted in one trace."""

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class WorkerError:
    """A failed worker, for the change of the world that it has caused."""

    at_s: float
    kind: str
    """The exception, or ``worker failure``."""
    message: str
    stack: str


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a change of the world, or the whole of it."""

    trace: str
    """The change that it belongs to, unique among all jobs."""
    name: str
    begin_s: float
    """Wall clock, seconds since 1970; ``end_s`` as well."""
    end_s: float
    attributes: Mapping[str, Value]
    errors: tuple[WorkerError, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it is the whole change, to which the others belong."""
        return self.name == CHANGE


@dataclass(frozen=True, slots=True)
class TraceState:
    """What is known between two lines."""

    change: Span | None = None
    """The change whose workers do not train yet."""
    errors: tuple[WorkerError, ...] = ()
    """Failures since the last world was formed."""
    zero_s: float = 0.0
    """Wall clock at which the Master's clock was 0, as it was when the world was formed: durations between lines are
    those of the Master's clock."""


def spans(pending: TraceState, line: HistoryLine, *, reports: bool) -> tuple[TraceState, tuple[Span, ...]]:
    """What a line of the history completes. ``reports``: the script reports when its workers train. Lines about
    something before the Master's term are left out: the Master of that time has sent it."""
    if line.copied:
        return pending, ()
    body = line.body
    if line.kind == "failure":
        kind = str(body["exception"]) or "worker failure"
        where = f"rank {body['rank']} on {body['node']} {body['what']}"
        error = WorkerError(float(body["time_s"]) or line.at_s, kind, where, str(body["traceback"]))
        return dataclasses.replace(pending, errors=(*pending.errors, error)[:MOST_ERRORS]), ()
    if line.kind == "round":
        parts = tuple(_formed(line, pending.errors))
        late = (pending.change,) if pending.change is not None else ()  # its workers never trained
        *others, change = parts
        zero_s = line.at_s - line.up_s
        if reports:
            return TraceState(change, (), zero_s), (*late, *others)
        return TraceState(zero_s=zero_s), (*late, *parts)
    if line.kind == "underway" and body["formed_s"] != UNKNOWN_S:
        return _trains(pending, line)
    if line.kind == "end" and pending.change is not None:
        return TraceState(), (pending.change,)
    return pending, ()


def _formed(line: HistoryLine, errors: tuple[WorkerError, ...]) -> Iterator[Span]:
    """The parts up to the new world, and the change so far as the last one."""
    body, end_s, trace = line.body, line.at_s, _trace(line, line.body["round"])
    begin_s = end_s - max(0.0, body["formed_s"])
    stopped_s = begin_s + body["stopped_s"] if body["stopped_s"] != UNKNOWN_S else begin_s
    if stopped_s > begin_s:
        yield Span(trace, STOP, begin_s, stopped_s, {"edl.at_step_boundary": bool(body["boundary"])})
    yield Span(trace, FORM, stopped_s, end_s, {"edl.reason": str(body["reason"])})
    known = {name: body[name] for name in ("round", "nodes", "workers", "cause", "reason")}
    attributes = {f"edl.{name}": value for name, value in known.items() if value != ""}
    yield Span(trace, CHANGE, begin_s, end_s, {**attributes, "edl.at_step_boundary": bool(body["boundary"])}, errors)


def _trains(pending: TraceState, line: HistoryLine) -> tuple[TraceState, tuple[Span, ...]]:
    """All workers of a round train."""
    body, trace = line.body, _trace(line, line.body["round"])
    end_s = pending.zero_s + line.up_s
    start = Span(trace, START, end_s - body["formed_s"], end_s, {})
    change = pending.change
    if change is None or change.trace != trace:  # sent when the world was formed
        return pending, (start,)
    return dataclasses.replace(pending, change=None), (start, dataclasses.replace(change, end_s=end_s))


def _trace(line: HistoryLine, number: int) -> str:
    return f"{line.job} {line.run} {number}"
