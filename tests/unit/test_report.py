"""The report of a failed job, for people and for tools."""

from __future__ import annotations

import dataclasses
import json

from edl.agent.report import TAIL_LINES_SHOWN, json_report, text_report
from edl.types import NodeId, Rank, Round
from edl.wire.messages import Failure
from edl.wire.plain import from_plain

CAUSE = Failure(
    NodeId("node-b"),
    Round(4),
    Rank(5),
    1,
    1,
    "ended with exit status 1",
    exception="ValueError: 7 is odd",
    traceback='Traceback (most recent call last):\n  File "train.py", line 3\nValueError: 7 is odd',
    tail="loading\nValueError: 7 is odd",
)
CONSEQUENCE = Failure(
    NodeId("node-a"),
    Round(4),
    Rank(0),
    0,
    -6,
    "was killed by SIGABRT",
    exception="RuntimeError: Connection closed by peer",
    traceback="a long story",
    peer_loss=True,
)


class TestText:
    def test_the_root_cause_comes_first_and_in_full(self) -> None:
        lines = text_report("my-job", "all 3 restarts are used", [CAUSE, CONSEQUENCE]).splitlines()
        assert "edl: job my-job failed: all 3 restarts are used" in lines
        root, then = lines.index("Root Cause (first observed failure):"), lines.index("[1] then:")
        first, second = lines[root:then], lines[then:]
        assert first[1:6] == [
            "  rank      : 5 (local rank 1)",
            "  node      : node-b",
            "  round     : 4",
            "  exit code : 1",
            "  what      : ended with exit status 1",
        ]
        assert "  error     : ValueError: 7 is odd" in first
        assert '      File "train.py", line 3' in first
        assert "  what      : was killed by SIGABRT (it had lost a peer: a consequence)" in second
        assert "  error     : RuntimeError: Connection closed by peer" in second
        assert not any("a long story" in line for line in second)

    def test_without_a_traceback_the_last_lines_are_shown(self) -> None:
        tail = "\n".join(f"line {number}" for number in range(100))
        report = text_report("j", "r", [dataclasses.replace(CAUSE, exception="", traceback="", tail=tail)])
        shown = [line for line in report.splitlines() if line.startswith("    line ")]
        assert shown[0] == f"    line {100 - TAIL_LINES_SHOWN}"
        assert shown[-1] == "    line 99"
        assert len(shown) == TAIL_LINES_SHOWN

    def test_with_a_traceback_they_are_not_repeated(self) -> None:
        assert "loading" not in text_report("j", "r", [CAUSE])

    def test_a_failure_nobody_reported_is_said_so(self) -> None:
        report = text_report("j", "too few nodes", [])
        assert "failed: too few nodes" in report
        assert "No worker reported a failure." in report
        assert "Root Cause" not in report


class TestJson:
    def test_has_the_shape_that_tools_read(self) -> None:
        report = json.loads(json.dumps(json_report("my-job", 1, "why", [CAUSE, CONSEQUENCE])))
        assert list(report) == ["job", "exit_code", "reason", "failures"]
        assert (report["job"], report["exit_code"], report["reason"]) == ("my-job", 1, "why")
        assert list(report["failures"][0]) == [field.name for field in dataclasses.fields(Failure)]
        assert [failure["rank"] for failure in report["failures"]] == [5, 0]
        assert report["failures"][1]["peer_loss"] is True

    def test_loses_nothing(self) -> None:
        report = json.loads(json.dumps(json_report("j", 1, "r", (CAUSE, CONSEQUENCE))))
        assert from_plain(tuple[Failure, ...], report["failures"]) == (CAUSE, CONSEQUENCE)

    def test_no_failures_are_an_empty_list(self) -> None:
        assert json_report("j", 3, "too few nodes", ())["failures"] == []
