"""A timeline on screens of any width."""

from __future__ import annotations

import random
from typing import Any

import click
import pytest

from edl.history.layout import job_lines, row_lines, summary_lines
from edl.history.timeline import TimelineRow, rows, seconds, summary
from edl.master.goodput.report import cost_text, total_text
from edl.master.goodput.slot_times import Cost, SlotTimes
from edl.master.goodput.slot_use import SlotUse
from edl.wire.history_lines import KINDS, HistoryLine, JobOutcome, MemberLine, RoundFormed, RoundUnderway, TermBegan
from edl.wire.json_messages import to_plain
from edl.wire.records import Failure
from edl.wire.status import HistoryEntry, Kind
from tests.support.history_fixture import RUN


class Story:
    """Lines of a job, one second apart."""

    def __init__(self) -> None:
        self.lines: list[HistoryLine] = []
        self.number = 0

    def add(self, fact: Any, term: int = 3) -> None:
        seq = len(self.lines) + 1
        body = to_plain(fact)
        self.lines.append(
            HistoryLine("job", RUN, term, seq, self.number, 1e9 + seq, float(seq), KINDS[type(fact)], body)
        )

    def event(self, kind: Kind, text: str, node: str = "", round: int = 1) -> None:
        self.number += 1
        self.add(HistoryEntry(self.number, 1e9 + len(self.lines) + 1, kind.value, text, node, round))

    def round(self, number: int, **times: Any) -> None:
        self.event(Kind.WORLD_FORMED, f"round {number}: 2 nodes", round=number)
        self.add(RoundFormed(number, 2, 4, (MemberLine("a", 2, 0), MemberLine("b", 2, 2)), "2 nodes ready", **times))

    def told(self, *, errors: bool = False) -> list[tuple[str, str]]:
        return [(row.label, row.text) for row in rows(self.lines, self.lines[0], errors=errors)]


def failure(**more: Any) -> Failure:
    text = "Traceback (most recent call last):\n" + "".join(f'  File "f{n}"\n' for n in range(9)) + "ValueError: boom\n"
    return Failure("b", 1, 3, 1, 1, "ended with exit status 1", "ValueError: boom", text, pid=71, **more)  # type: ignore[arg-type]


def a_story() -> Story:
    story = Story()
    nodes = {"minimum": 1, "maximum": 4, "unit": 1}
    story.add(TermBegan("a", "1.2", {"nodes": nodes, "fault_tolerance": "elastic"}))
    story.event(Kind.NODE_JOINED, "node a is ready", "a", 0)
    story.round(1, formed_s=1.0)
    story.event(Kind.WORLD_UNDERWAY, "round 1 is underway", round=1)
    story.add(RoundUnderway(1, 2.0, 3.0))
    story.event(Kind.WORKER_FAILED, "worker 3 on b failed; restart 1 of 3", "b")
    story.add(failure())
    story.round(2, cause="worker 3 on b failed", stopped_s=0.25, formed_s=12.0, whole=False)
    story.event(Kind.JOB_ENDED, "all done", round=2)
    story.add(JobOutcome(0, "all done", 2, 1))
    return story


class TestRows:
    def test_a_job_from_beginning_to_end(self) -> None:
        assert a_story().told() == [
            ("began", "1 to 4 nodes, elastic, Master on a (edl 1.2)"),
            ("node-joined", "node a is ready"),
            ("round 1", "2 nodes, 4 workers: 2 nodes ready [took 3.00 s: formed 1.00 s, underway 3.00 s]"),
            ("worker-failed", "worker 3 on b failed; restart 1 of 3"),
            (
                "error",
                'rank 3 on b (pid 71) ended with exit status 1\n    File "f7"\n    File "f8"\n  ValueError: boom',
            ),
            (
                "round 2",
                "2 nodes, 4 workers: worker 3 on b failed "
                "[took at least 12.0 s: workers stopped 0.25 s, formed 12.0 s]",
            ),
            ("ended", "exit code 0: all done"),
        ]

    def test_costs_and_the_goodput_are_told(self) -> None:
        story = Story()
        story.round(1, formed_s=1.0)
        cost = cost_text(Cost(3.0, 2, {SlotUse.RENDEZVOUS: 1_500_000_000}))
        story.event(Kind.WORLD_UNDERWAY, f"round 1 is underway: in process; {cost}", round=1)
        story.add(RoundUnderway(1, 2.0, 3.0))
        times = SlotTimes(spent={SlotUse.USEFUL: 9_000_000_000, SlotUse.RENDEZVOUS: 1_000_000_000})
        story.event(Kind.JOB_ENDED, f"all done; {total_text(times)}", round=1)
        story.add(JobOutcome(0, "all done", 1, 0))
        (_, first), (_, last) = story.told()
        assert first.endswith("underway 3.00 s]; cost 1.50 s of slot time (rendezvous 1.50 s), no training redone")
        assert last.startswith("exit code 0: all done; goodput 90")

    def test_whole_tracebacks_on_request_and_none_of_consequences(self) -> None:
        story = Story()
        story.add(failure())
        assert len(story.told(errors=True)[0][1].splitlines()) == 12
        story.add(failure(peer_loss=True))
        assert len(story.told()) == 1
        assert story.told(errors=True)[1][1].startswith(
            "rank 3 on b (pid 71) ended with exit status 1 (it had lost a peer)"
        )

    def test_without_lines_of_rounds_the_events_speak(self) -> None:
        story = Story()
        story.event(Kind.WORLD_FORMED, "round 7: 2 nodes", round=7)
        story.event(Kind.WORLD_UNDERWAY, "round 7 is underway", round=7)
        story.event(Kind.JOB_ENDED, "all done", round=7)
        assert [label for label, _ in story.told()] == ["world-formed", "world-underway", "job-ended"]

    def test_a_later_master_is_named(self) -> None:
        story = a_story()
        story.add(TermBegan("b", "1.2"), term=9)
        assert story.told()[-1] == ("Master", "node b is the Master")

    def test_many_nodes_in_a_row_and_checkpoints_are_one_row(self) -> None:
        story = Story()
        for one in range(1000):
            story.event(Kind.NODE_LOST, f"node n{one} lost", f"n{one}")
        for commit in range(40):
            story.event(Kind.STATE, f"commit {commit} is complete in /ckpt", "a")
        story.event(Kind.STATE, "commit 40 could not be written: disk full", "a")
        assert [text for _, text in story.told()] == [
            "1000 nodes were lost: n0, n1, n2, n3, n4, n5, n6, n7 and 992 more",
            "commit 39 is complete in /ckpt (and 39 before it)",
            "commit 40 could not be written: disk full",
        ]


class TestSummary:
    def test_of_an_ended_job(self) -> None:
        story = a_story()
        found = summary(story.lines)
        assert (found.rounds, found.restarts, found.total_s) == (2, 1, len(story.lines) - 1 + 1)
        (text,) = summary_lines(found)
        assert text == f"job  run {RUN}  succeeded  2 rounds, 1 restart, {seconds(found.total_s)}"

    def test_of_one_that_runs_or_whose_end_nobody_wrote(self) -> None:
        found = summary(a_story().lines[:-2])
        assert (found.outcome, found.restarts, found.rounds) == (None, -1, 2)
        assert "no end recorded yet" in summary_lines(found)[0]
        assert [*job_lines([found])][-1].endswith(f"no end recorded yet, 2 rounds, {seconds(found.total_s)}")

    def test_a_clock_that_was_set_back_makes_no_negative_time(self) -> None:
        lines = a_story().lines
        back = [HistoryLine("job", RUN, 3, 99, 9, 0.0, 50.0, "of the future", {})]
        assert summary([*lines, *back], lines[0]).total_s == 50.0


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (0.0, "0.00 s"),
        (9.994, "9.99 s"),
        (59.94, "59.9 s"),
        (60.0, "1 min 0 s"),
        (3601.0, "1 h 0 min"),
        (90_000.0, "1 d 1 h"),
    ],
)
def test_durations(value_s: float, text: str) -> None:
    assert seconds(value_s) == text


class TestLayout:
    @pytest.mark.parametrize("width", [40, 80])
    def test_nothing_is_wider_than_the_screen_and_no_word_is_lost(self, width: int) -> None:
        draw = random.Random(width)
        for _ in range(500):
            words = ["".join(draw.choices("abcdef", k=draw.randrange(1, 14))) for _ in range(draw.randrange(1, 60))]
            row = TimelineRow(1e9, draw.choice(["round 12", "worker-failed", "ended"]), " ".join(words))
            found = [*row_lines([row], width)]
            assert all(len(line) <= width for line in map(plain, found)), found
            said = " ".join(map(plain, found[1:])).split()
            assert said[-len(words) :] == words

    def test_a_number_and_its_unit_stay_together(self) -> None:
        for width in range(30, 80):
            text = "\n".join(
                map(plain, row_lines([TimelineRow(1e9, "round 2", "took 0.25 s: formed 3 min 5 s")], width))
            )
            assert "0.25 s" in text
            assert "3 min" in text
            assert "5 s" in text

    def test_lines_of_a_traceback_keep_their_indentation(self) -> None:
        row = TimelineRow(1e9, "error", "rank 3\n  Traceback\n    File\n  ValueError")
        for width in (0, 80):
            _, first, *more = map(plain, row_lines([row], width))
            assert first.endswith("rank 3")
            assert [len(line) - len(line.lstrip()) for line in more] == [27, 29, 27]

    def test_each_day_has_a_heading(self) -> None:
        found = [*map(plain, row_lines([TimelineRow(1e9 + 86400 * day, "x", "y") for day in (0, 0, 1)]))]
        assert [len(line) == len("2001-09-09") for line in found] == [True, False, False, True, False]


def plain(text: str) -> str:
    import click

    return click.unstyle(text)


@pytest.mark.parametrize("width", [0, 40, 100])
def test_nothing_reaches_the_terminal_but_printable_text(width: int) -> None:
    evil = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m"
    shown = [
        *row_lines([TimelineRow(1e9, f"kind{evil}", f"first{evil}\n    File{evil}")], width),
        *summary_lines(summary([HistoryLine(f"job{evil}", RUN, 1, 1, 0, 1e9, 1.0, "begin", {})]), width),
        *job_lines([summary([HistoryLine(f"job{evil}", RUN, 1, 1, 0, 1e9, 1.0, "begin", {})])], width),
    ]
    plain = [click.unstyle(text) for text in shown]
    assert all(text.isprintable() for text in plain), plain
    assert any("    File" in text for text in plain)
