"""Spans from the lines of real Masters: one trace for each change of the world, whose parts fill it."""

from __future__ import annotations

import dataclasses

import pytest

from edl.config import NodeRange
from edl.traces.spans import CHANGE, FORM, START, STOP, Span, TraceState, spans
from edl.wire.messages import Ready, Underway
from edl.wire.records import Holding, Version
from tests.unit.edl.master.test_chronicle import Recorded


class Traced(Recorded):
    """A Master whose changes are traced."""

    def __init__(self, bounds: NodeRange, restarts: int = 3) -> None:
        self.pending = TraceState()
        self.spans: list[Span] = []
        super().__init__(bounds, restarts)

    def _record(self, before: object) -> None:
        seen = len(self.lines)
        super()._record(before)
        for line in self.lines[seen:]:
            self.pending, found = spans(self.pending, line, reports=self.state.record.rejoins)
            self.spans += found

    def train(self, names: str, after_s: float) -> None:
        for name in names:
            self.now_s += after_s / len(names)
            self.say(name, Underway(self.state.record.round, "started"))

    def park(self, name: str) -> None:
        """Its workers have stopped, and wait for the next world."""
        held = (Holding(Version(self.state.record.era, 7)),)
        self.say(name, Ready(self.state.record.round, (9000 + ord(name), 1, 2), True, held))

    def trace(self, number: int) -> dict[str, Span]:
        """The spans of one round by name, each of which is there once."""
        found = [span for span in self.spans if span.trace.endswith(f" {number}")]
        assert len({span.name for span in found}) == len(found)
        return {span.name: span for span in found}


def started() -> Traced:
    job = Traced(NodeRange(1, 4))
    job.join("a", "b")
    job.wait(5)
    return job


def lengths(trace: dict[str, Span]) -> dict[str, float]:
    return {name: round(span.end_s - span.begin_s, 6) for name, span in trace.items()}


def test_the_start_of_a_job_whose_script_reports_nothing_ends_when_the_world_is_formed() -> None:
    job = started()
    assert set(job.trace(1)) == {FORM, CHANGE}
    assert job.trace(1)[CHANGE].attributes["edl.workers"] == 4
    assert "edl.cause" not in job.trace(1)[CHANGE].attributes
    job.train("ab", 2.0)
    assert lengths(job.trace(1))[START] == pytest.approx(2.0 + job.now_s - 2.0 - job.state.formed_at_s)


def test_a_failure_is_one_trace_with_its_cause_and_error() -> None:
    job = started()
    job.train("ab", 2.0)
    job.wait(60)
    job.fail("a")
    noticed_s = 1e9 + job.now_s
    job.wait(0.5)
    job.park("a")
    job.now_s += 0.25
    job.park("b")
    assert CHANGE not in job.trace(2), "its workers do not train yet"
    job.train("ab", 3.0)
    trace = job.trace(2)
    assert lengths(trace) == {STOP: 0.75, FORM: 0.0, START: 3.0, CHANGE: 3.75}
    assert trace[CHANGE].begin_s == trace[STOP].begin_s == noticed_s
    assert trace[STOP].end_s == trace[FORM].begin_s and trace[FORM].end_s == trace[START].begin_s
    assert trace[START].end_s == trace[CHANGE].end_s
    assert "ended with exit status 1; restart 1 of 3" in str(trace[CHANGE].attributes["edl.cause"])
    (error,) = trace[CHANGE].errors
    assert error.message == "rank 0 on a ended with exit status 1"
    assert not trace[START].errors


def test_a_world_that_is_lost_before_it_trains_has_its_trace_too() -> None:
    job = started()
    job.train("ab", 2.0)
    job.fail("a")
    for name in "ab":
        job.park(name)
    job.fail("b", round=2)
    for name in "ab":
        job.park(name)
    assert lengths(job.trace(2))[CHANGE] == 0.0
    assert [error.message for error in job.trace(2)[CHANGE].errors] == ["rank 0 on a ended with exit status 1"]
    job.train("ab", 1.0)
    assert lengths(job.trace(3))[CHANGE] == 1.0
    assert [error.message for error in job.trace(3)[CHANGE].errors] == ["rank 0 on b ended with exit status 1"]


def test_what_an_earlier_master_has_sent_is_not_sent_again() -> None:
    job = started()
    job.train("ab", 2.0)
    sent = len(job.spans)
    job.follow("ab")
    for name in "ab":
        job.attach(name, 1, 1)
    assert job.spans[sent:] == []


def test_failures_are_bounded() -> None:
    job = started()
    job.fail("a")
    (line,) = [one for one in job.lines if one.kind == "failure"]
    pending = TraceState()
    for number in range(100):
        one = dataclasses.replace(line, seq=number)
        pending, _ = spans(pending, one, reports=True)
    assert len(pending.errors) == 8
