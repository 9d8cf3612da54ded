"""Reports that a launcher writes about a failed job."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from edl.config import LogLayout, LogPlan
from edl.launch.reporting import Reporter
from edl.types import NodeId, Rank, Round
from edl.wire.records import Failure
from edl.wire.status import HistoryEntry


def failure(error_file: str = "") -> Failure:
    return Failure(
        NodeId("a"), Round(1), Rank(0), 0, 3, "ended", "ValueError: x", "Traceback: …", error_file=error_file
    )


def test_files_are_written_at_once_and_the_text_comes_last(tmp_path: Path) -> None:
    said: list[str] = []
    worker = tmp_path / "worker.json"
    worker.write_text('{"message": {"message": "by @record", "extraInfo": {}}}')
    outer_file = tmp_path / "outer" / "error.json"
    reporter = Reporter("job", "a", LogPlan(str(tmp_path / "logs")), str(outer_file), said.append)
    reporter.keep(1, "all is lost", [failure(str(worker))])
    assert said == []
    assert json.loads((tmp_path / "logs" / "error.json").read_text())["reason"] == "all is lost"
    outer = json.loads(outer_file.read_text())
    assert outer["message"] == {"message": "by @record", "extraInfo": {}, "errorCode": 3}
    reporter.close()
    (text,) = said
    assert text.count("Traceback") == 1 and text.endswith("=")


def test_a_failure_of_another_node_is_told_from_what_it_said(tmp_path: Path) -> None:
    reporter = Reporter("job", "a", LogPlan(""), str(tmp_path / "error.json"), print)
    reporter.keep(1, "r", [failure("/on/another/host/error.json")])
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "ValueError: x"
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


def test_a_job_without_failures_is_told_in_one_line(tmp_path: Path) -> None:
    said: list[str] = []
    reporter = Reporter("job", "a", LogPlan(str(tmp_path)), str(tmp_path / "error.json"), said.append)
    reporter.keep(0, "the only worker ended with status 0", [])
    reporter.close()
    assert said == ["the only worker ended with status 0"]
    assert list(tmp_path.iterdir()) == []


def test_an_outer_launcher_learns_why_a_job_without_failed_workers_has_ended(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "outer" / "error.json"
    Reporter("job", "a", LogPlan(""), str(path), said.append).keep(3, "too few nodes", [])
    message = json.loads(path.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("too few nodes", 3)
    assert message["extraInfo"].keys() == {"py_callstack", "timestamp"}
    assert said == ["too few nodes"]


def test_a_report_that_cannot_be_written_costs_a_line_each(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "taken").write_text("")
    reporter = Reporter("job", "a", LogPlan(str(tmp_path / "taken")), str(tmp_path / "taken" / "x"), said.append)
    reporter.keep(1, "r", [failure()])
    assert len(said) == 2
    assert all("cannot write " in line for line in said)


def test_the_history_that_goes_from_the_store_stays_in_the_folder(tmp_path: Path) -> None:
    reporter = Reporter("job", "a", LogPlan(str(tmp_path)), "", print)
    history = [HistoryEntry(n, 7.0, "node-lost", f"line {n}", "a", 1) for n in (1, 2)]
    reporter.keep(0, "done", [], history)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == ["line 1", "line 2"]
    assert set(lines[0]) == {"number", "at_s", "kind", "text", "node", "round", "severity"}
    Reporter("job", "a", LogPlan(""), "", print).keep(0, "done", [], history)
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]


def log_file(plan: LogPlan, of: Failure, node: str = "a") -> str:
    """The line about the worker's log in the report."""
    said: list[str] = []
    reporter = Reporter("job", node, plan, "", said.append)
    reporter.keep(1, "r", [of])
    reporter.close()
    (line,) = (line for line in said[-1].splitlines() if "log_file" in line)
    return line.partition(": ")[2]


def test_the_report_names_the_log_of_the_failed_worker(tmp_path: Path) -> None:
    plan = LogPlan(str(tmp_path), redirect_all=3)
    of = dataclasses.replace(failure(), round=Round(2))
    without = "<N/A> (--redirects=3 or --tee=3 keeps the workers' output in files)"
    assert log_file(LogPlan(""), of) == log_file(LogPlan(str(tmp_path)), of) == without
    folder = tmp_path / "attempt_1" / "0"
    folder.mkdir(parents=True)
    (folder / "stdout.log").touch()
    assert log_file(plan, of) == str(folder / "stdout.log")
    (folder / "stderr.log").touch()
    assert log_file(plan, of) == str(folder / "stderr.log")
    second = tmp_path / "attempt_1" / "0.2"
    second.mkdir()
    (second / "stderr.log").touch()
    assert log_file(plan, of) == str(second / "stderr.log"), "a second process in this place"
    assert log_file(plan, of, node="b") == "see the report of node a"
    (folder / "workerlog").touch()
    second.rename(tmp_path / "away")
    assert log_file(dataclasses.replace(plan, layout=LogLayout.PADDLE), of) == str(folder / "workerlog")


def test_the_last_line_of_a_job_without_failures_says_where_the_output_is(tmp_path: Path) -> None:
    for plan, where in ((LogPlan("/l/job_a", tee_all=3), "/l/job_a"), (LogPlan("/l/job_a", links="/l"), "/l")):
        said: list[str] = []
        reporter = Reporter("job", "a", plan, "", said.append)
        reporter.keep(9, "stopped by kim", [])
        reporter.close()
        assert said == ["stopped by kim", f"the workers' output is in {where}"]
