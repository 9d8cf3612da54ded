"""The report of a failed job, for people and for tools."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

from edl.agent.failure_report import RULE, TAIL_LINES_SHOWN, error_file, failure_text, json_report, text_report
from edl.types import NodeId, Rank, Round
from edl.wire.json_messages import from_plain
from edl.wire.records import Failure

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
    slot=2,
    host="host-7",
    pid=4711,
    time_s=1_700_000_000.5,
    error_file="/logs/attempt_3/1/error.json",
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
    def test_the_root_cause_comes_last_in_full_and_under_the_keys_of_torchrun(self) -> None:
        failures, logs = [CAUSE, CONSEQUENCE], {CAUSE: "/logs/attempt_3/1/stderr.log", CONSEQUENCE: "elsewhere"}
        report = text_report("my-job", "all 3 restarts are used", failures, "/logs/my-job_b", lambda one: logs[one])
        lines = report.splitlines()
        assert lines[0] == lines[-1] == RULE
        assert lines[1] == "edl: job my-job FAILED: all 3 restarts are used"
        assert lines[2].endswith(": /logs/my-job_b")
        others, root = lines.index("Failures:"), lines.index("Root Cause (first observed failure):")
        assert others < root
        moment = time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(CAUSE.time_s))
        assert lines[root + 1 :] == [
            "[0]:",
            f"  time      : {moment}",
            "  host      : host-7 (node: node-b)",
            "  rank      : 5 (local_rank: 1, slot: 2)",
            "  exitcode  : 1 (pid: 4711)",
            "  error_file: /logs/attempt_3/1/error.json",
            "  log_file  : /logs/attempt_3/1/stderr.log",
            "  round     : 4",
            "  what      : ended with exit status 1",
            "  error     : ValueError: 7 is odd",
            "  traceback : Traceback (most recent call last):",
            '      File "train.py", line 3',
            "    ValueError: 7 is odd",
            RULE,
        ]
        assert lines[others + 1 : root - 1] == [
            "[1]:",
            "  time      : <N/A>",
            "  host      : <N/A> (node: node-a)",
            "  rank      : 0 (local_rank: 0)",
            "  exitcode  : -6 (pid: <N/A>) (SIGABRT)",
            "  error_file: <N/A>",
            "  log_file  : elsewhere",
            "  round     : 4",
            "  what      : was killed by SIGABRT (it had lost a peer: a consequence)",
            "  error     : RuntimeError: Connection closed by peer",
        ]

    def test_a_lone_failure_has_no_others(self) -> None:
        report = text_report("j", "r", [CAUSE])
        assert "Failures:\n  <NO_OTHER_FAILURES>\n" in report
        assert report.count("Traceback") == 1

    def test_what_a_job_survived_is_told_root_cause_first(self) -> None:
        lines = failure_text([CAUSE, CONSEQUENCE]).splitlines()
        assert lines[:2] == ["Root Cause (first observed failure):", "[0]:"]
        assert lines.index("[0]:") < lines.index("[1]:")

    def test_without_a_traceback_the_last_lines_are_shown(self) -> None:
        tail = "\n".join(f"line {number}" for number in range(100))
        report = text_report("j", "r", [dataclasses.replace(CAUSE, exception="", traceback="", tail=tail)])
        shown = [line for line in report.splitlines() if line.startswith("    line ")]
        assert shown[0] == f"    line {100 - TAIL_LINES_SHOWN}"
        assert shown[-1] == "    line 99"
        assert len(shown) == TAIL_LINES_SHOWN

    def test_with_a_traceback_they_are_not_repeated(self) -> None:
        assert "loading" not in text_report("j", "r", [CAUSE])


class TestJson:
    def test_has_the_shape_that_tools_read(self) -> None:
        report = json.loads(json.dumps(json_report("my-job", 1, "why", [CAUSE, CONSEQUENCE])))
        assert list(report) == ["job", "exit_code", "reason", "log_dir", "failures"]
        assert (report["job"], report["exit_code"], report["reason"]) == ("my-job", 1, "why")
        assert list(report["failures"][0]) == [field.name for field in dataclasses.fields(Failure)]
        assert [failure["rank"] for failure in report["failures"]] == [5, 0]
        assert report["failures"][1]["peer_loss"] is True

    def test_loses_nothing(self) -> None:
        report = json.loads(json.dumps(json_report("j", 1, "r", (CAUSE, CONSEQUENCE))))
        assert from_plain(tuple[Failure, ...], report["failures"]) == (CAUSE, CONSEQUENCE)

    def test_no_failures_are_an_empty_list(self) -> None:
        assert json_report("j", 3, "too few nodes", ())["failures"] == ()


class TestOuterErrorFile:
    """What whoever started the launcher finds in the file it has named."""

    def test_is_what_the_worker_has_written_with_its_exit_status(self) -> None:
        written = json.dumps({"message": {"message": "ValueError: 7 is odd", "extraInfo": {"py_callstack": "t"}}})
        told = json.loads(error_file(CAUSE, written))
        assert told == {
            "message": {"message": "ValueError: 7 is odd", "extraInfo": {"py_callstack": "t"}, "errorCode": 1}
        }

    def test_a_plain_message_is_handed_on_as_it_is(self) -> None:
        assert json.loads(error_file(CAUSE, '{"message": "out of memory", "timestamp": 5}')) == {
            "message": "out of memory",
            "timestamp": 5,
        }

    @pytest.mark.parametrize("written", ["", "no json", "[]", '{"other": 1}'])
    def test_is_made_from_the_failure_where_there_is_no_file(self, written: str) -> None:
        message = json.loads(error_file(CAUSE, written))["message"]
        assert message == {
            "message": "ValueError: 7 is odd",
            "extraInfo": {"py_callstack": CAUSE.traceback, "timestamp": "1700000000"},
            "errorCode": 1,
        }

    def test_names_a_worker_that_a_signal_has_ended(self) -> None:
        killed = dataclasses.replace(CONSEQUENCE, exception="", traceback="", tail="last words")
        message = json.loads(error_file(killed))["message"]
        assert message["message"] == "rank 0 on node-a was killed by SIGABRT"
        assert (message["extraInfo"]["py_callstack"], message["errorCode"]) == ("last words", -6)
