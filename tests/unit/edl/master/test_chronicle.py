"""The lines of the history files, from the steps of real Masters."""

from __future__ import annotations

import random

import pytest

from edl.config import NodeRange
from edl.history.merge import merged
from edl.master import events as ev
from edl.master.chronicle import Chronicle, WrittenStep, step_lines
from edl.master.history import JobHistory, folded
from edl.master.machine import step, take_over
from edl.types import FencingToken, NodeId, Round
from edl.wire.history_lines import (
    HistoryLine,
    JobOutcome,
    RoundFormed,
    RoundUnderway,
    SizeSet,
    TermBegan,
    line_text,
    parse_line,
)
from edl.wire.messages import Boundary, Ready, Underway, WorkerFailed, WorkersDone
from edl.wire.records import Failure
from edl.wire.scale_requests import Resize
from edl.wire.status import HistoryEntry, Kind
from tests.unit.edl.master.test_machine import Rule, info

RUN = "0123456789ab"


class Recorded(Rule):
    """A Master whose steps are recorded. ``follow`` replaces it by the next one."""

    def __init__(self, bounds: NodeRange, restarts: int = 3) -> None:
        super().__init__(bounds, restarts=restarts)
        self.lines: list[HistoryLine] = []
        self.history = JobHistory()
        self.term = 7
        self.chronicle = self._chronicle("m1")
        self._record(None)

    def _chronicle(self, node: str) -> Chronicle:
        return Chronicle("job", RUN, node, "1", {"job": "job"})

    def _record(self, before: object) -> None:
        notes = folded([effect for effect in self.effects if isinstance(effect, ev.HistoryNote)])
        added = tuple(self.history.make(note, self.state.record.round, self.now_s) for note in notes)
        kept = self.history.last(1000) if before is None else ()
        self.history.publish(added)
        times = self.now_s, 1e9 + self.now_s
        written = WrittenStep(FencingToken(self.term), before, self.state, added, *times, kept)  # type: ignore[arg-type]
        self.chronicle, lines = step_lines(self.chronicle, written)
        self.lines += lines

    def feed(self, event: ev.Event) -> None:
        before = self.state
        super().feed(event)
        self._record(before)

    def follow(self, present: str, after_s: float = 0.0) -> None:
        """Another Master, on another node and with another clock, takes over."""
        last, self.history = self.history.last(1000), JobHistory()
        self.history.load(last)
        self.term, self.now_s = self.term + 3, self.now_s + after_s + 5000
        self.chronicle = self._chronicle("m2")
        nodes = [info(name) for name in present]
        decision = take_over(self.spec, self.state.record, nodes, self.now_s)
        self.state, self.effects, self.reason = decision.state, decision.effects, decision.reason
        self._record(None)

    def facts(self, kind: type) -> list[object]:
        """Facts of this kind, merged as a reader does."""
        texts = (parse_line(line_text(line)) for line in self.lines)
        return [fact for line in merged(filter(None, texts)) if isinstance(fact := line.fact(), kind)]


def two_nodes() -> Recorded:
    job = Recorded(NodeRange(1, 4))
    job.join("a", "b")
    job.wait(5)
    assert job.members == "ab"
    return job


def test_a_first_round_counts_from_the_start_of_the_job() -> None:
    job = two_nodes()
    (begin,) = job.facts(TermBegan)
    assert begin == TermBegan("m1", "1", {"job": "job"})
    (one,) = job.facts(RoundFormed)
    assert isinstance(one, RoundFormed)
    assert (one.round, one.nodes, one.whole, one.cause, one.stopped_s) == (1, 2, True, "", -1.0)
    assert [member.node for member in one.members] == ["a", "b"]
    assert one.formed_s == job.state.formed_at_s - 100.0


def test_a_change_after_a_failure_tells_each_part_of_its_time() -> None:
    job = two_nodes()
    job.wait(60)
    job.fail("a")
    job.wait(0.5)
    job.ready("a", 1)
    job.now_s += 0.25
    job.ready("b", 1)
    job.now_s += 2
    job.say("a", Underway(job.state.record.round, "started"))
    job.now_s += 1
    job.say("b", Underway(job.state.record.round, "started"))
    _, second = job.facts(RoundFormed)
    assert isinstance(second, RoundFormed)
    assert (second.stopped_s, second.formed_s, second.boundary, second.whole) == (0.75, 0.75, False, True)
    assert "ended with exit status 1; restart 1 of 3" in second.cause
    assert job.facts(RoundUnderway) == [RoundUnderway(2, 3.0, 3.75)]
    (failure,) = job.facts(Failure)
    assert isinstance(failure, Failure)
    assert (failure.node, failure.round) == ("a", 1)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_world_was_left_at_a_boundary_unless_something_interrupted_that(interrupted: bool) -> None:
    job = two_nodes()
    for name in "ab":
        job.say(name, Underway(Round(1), "in process"))
    job.feed(ev.NodeRegistered(info("c")))
    job.attach("c")
    job.say("c", Ready(Round(0), (9003, 1, 2), True))
    assert job.state.agreement is not None
    for name in "ab":
        job.say(name, Boundary(Round(1), job.state.agreement.number, 8))
    job.say("a", Ready(Round(1), (9001, 1, 2), True))
    if interrupted:
        job.lose("b")
    else:
        job.say("b", Ready(Round(1), (9002, 1, 2), True))
    second = job.facts(RoundFormed)[1]
    assert isinstance(second, RoundFormed)
    assert (second.nodes, second.boundary) == ((2, False) if interrupted else (3, True))


def test_a_lost_peer_is_noticed_before_its_cause_is_known() -> None:
    job = two_nodes()
    job.fail("a", peer_loss=True)
    job.wait(2)
    job.ready("a", 1)
    job.ready("b", 1)
    second = job.facts(RoundFormed)[1]
    assert isinstance(second, RoundFormed)
    assert second.formed_s == 2.0


def test_a_master_that_follows_repeats_what_may_be_missing_and_readers_see_it_once() -> None:
    job = two_nodes()
    job.fail("a")
    lines = len(job.lines)
    job.follow("ab", after_s=9)
    repeated = [line.kind for line in job.lines[lines:] if line.copied]
    assert repeated == ["event"] * len(job.history.last(99)) + ["round", "failure"]
    for name in "ab":
        job.attach(name, 1)
        job.ready(name, 1)
    job.wait(5)
    assert [one.round for one in job.facts(RoundFormed) if isinstance(one, RoundFormed)] == [1, 2]
    one, two = job.facts(RoundFormed)
    assert isinstance(one, RoundFormed)
    assert isinstance(two, RoundFormed)
    assert (one.whole, two.whole) == (True, False)
    assert len(job.facts(Failure)) == 1
    numbers = [entry.number for entry in job.facts(HistoryEntry) if isinstance(entry, HistoryEntry)]
    assert numbers == [*range(1, len(numbers) + 1)]
    # Without the files of the first Master, the second one's still tell the same rounds, without times.
    job.lines = job.lines[lines:]
    first = job.facts(RoundFormed)[0]
    assert isinstance(first, RoundFormed)
    assert (first.round, first.nodes, first.formed_s) == (1, 2, -1.0)


def test_sizes_and_the_outcome() -> None:
    job = two_nodes()
    job.feed(ev.ScaleRequested(Resize(3, by="me", reason="more data")))
    (size,) = job.facts(SizeSet)
    assert isinstance(size, SizeSet)
    assert (size.generation, size.desired, size.by, size.reason) == (1, 3, "me", "more data")
    for name in "ab":
        job.say(name, WorkersDone(job.state.record.round))
    (end,) = job.facts(JobOutcome)
    assert isinstance(end, JobOutcome)
    assert (end.exit_code, end.rounds, end.restarts) == (0, 1, 0)


def test_seeded_jobs_tell_each_round_failure_and_event_once() -> None:
    """Against the record itself: whatever happens, and however often the Master changes."""
    for seed in range(150):
        draw = random.Random(seed)
        job = Recorded(NodeRange(1, 4), restarts=50)
        present = {name: 0 for name in draw.sample("abcd", draw.randrange(1, 5))}
        job.join(*present)
        rounds, failures, worlds = 0, 0, set[int]()
        for _ in range(draw.randrange(5, 40)):
            before = job.state.record
            name = draw.choice([*present])
            match draw.randrange(6):
                case 0 | 1:
                    job.wait(draw.choice((0.1, 2.0, 20.0)))
                case 2:
                    job.ready(name, job.state.record.round)
                case 3:
                    job.say(name, Underway(job.state.record.round, "started"))
                case 4:
                    what = f"ended with exit status {seed}"
                    lost = draw.random() < 0.3
                    failure = Failure(NodeId(name), before.round, 0, 0, 1, what, pid=failures, peer_loss=lost)  # type: ignore[arg-type]
                    job.say(name, WorkerFailed(failure))
                    failures += 1
                case _ if draw.random() < 0.5:
                    job.follow("".join(present), draw.random() * 10)
                    for other in present:
                        job.attach(other, job.state.record.round, 0)
            worlds |= {job.state.record.round} - {0}
            rounds = job.state.record.round
        told_rounds = [one.round for one in job.facts(RoundFormed) if isinstance(one, RoundFormed)]
        assert told_rounds == [*range(1, rounds + 1)] == sorted(worlds), seed
        for one in job.facts(RoundFormed):
            assert isinstance(one, RoundFormed)
            assert -1.0 <= one.stopped_s <= one.formed_s or one.formed_s == -1.0, seed
        numbers = [entry.number for entry in job.facts(HistoryEntry) if isinstance(entry, HistoryEntry)]
        assert numbers == [*range(1, len(numbers) + 1)], seed
        pids = [one.pid for one in job.facts(Failure) if isinstance(one, Failure)]
        assert len(set(pids)) == len(pids), seed
        assert {one.pid for one in job.state.record.failures} <= {*pids}, seed
        underway = [one.round for one in job.facts(RoundUnderway) if isinstance(one, RoundUnderway)]
        texts = [
            one.round for one in job.facts(HistoryEntry) if isinstance(one, HistoryEntry) and one.kind == _UNDERWAY
        ]
        assert underway == sorted(set(texts)), seed


_UNDERWAY = Kind.WORLD_UNDERWAY.value


def test_a_step_that_was_lost_costs_only_its_lines() -> None:
    job = two_nodes()
    before = job.state
    job.chronicle = job._chronicle("m1")  # the thread has seen nothing of this term
    job.lines = []
    job.now_s += 3
    decision = step(before, ev.NodeSaid(NodeId("a"), info("a").incarnation, Ready(before.record.round, ())), job.now_s)
    job.state, job.effects = decision.state, decision.effects
    job._record(before)
    assert [line.kind for line in job.lines][:1] == ["begin"]
