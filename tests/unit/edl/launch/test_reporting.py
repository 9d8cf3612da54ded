"""Reports that a launcher writes about a failed job."""

from __future__ import annotations

import json
from pathlib import Path

from edl.launch.reporting import Reporter
from edl.types import NodeId, Rank, Round
from edl.wire.messages import Failure
from edl.wire.status import JournalEntry


def failure(error_file: str = "") -> Failure:
    return Failure(
        NodeId("a"), Round(1), Rank(0), 0, 3, "ended", "ValueError: x", "Traceback: …", error_file=error_file
    )


def test_files_are_written_at_once_and_the_text_comes_last(tmp_path: Path) -> None:
    said: list[str] = []
    worker = tmp_path / "worker.json"
    worker.write_text('{"message": {"message": "by @record", "extraInfo": {}}}')
    reporter = Reporter("job", str(tmp_path / "logs"), str(tmp_path / "outer" / "error.json"), said.append)
    reporter.keep(1, "all is lost", [failure(str(worker))])
    assert said == []
    assert json.loads((tmp_path / "logs" / "error.json").read_text())["reason"] == "all is lost"
    outer = json.loads((tmp_path / "outer" / "error.json").read_text())
    assert outer["message"] == {"message": "by @record", "extraInfo": {}, "errorCode": 3}
    reporter.close()
    (text,) = said
    assert text.count("Traceback") == 1 and text.endswith("=")


def test_a_failure_of_another_node_is_told_from_what_it_said(tmp_path: Path) -> None:
    reporter = Reporter("job", "", str(tmp_path / "error.json"), print)
    reporter.keep(1, "r", [failure("/on/another/host/error.json")])
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "ValueError: x"
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


def test_a_job_without_failures_is_told_in_one_line(tmp_path: Path) -> None:
    said: list[str] = []
    reporter = Reporter("job", str(tmp_path), str(tmp_path / "error.json"), said.append)
    reporter.keep(0, "the only worker ended with status 0", [])
    reporter.close()
    assert said == ["the only worker ended with status 0"]
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_costs_a_line_each(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "taken").write_text("")
    reporter = Reporter("job", str(tmp_path / "taken"), str(tmp_path / "taken" / "x"), said.append)
    reporter.keep(1, "r", [failure()])
    assert len(said) == 2
    assert all("cannot write " in line for line in said)


def test_the_history_that_goes_from_the_store_stays_in_the_folder(tmp_path: Path) -> None:
    reporter = Reporter("job", str(tmp_path), "", print)
    history = [JournalEntry(n, 7.0, "node-lost", f"line {n}", "a", 1) for n in (1, 2)]
    reporter.keep(0, "done", [], history)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == ["line 1", "line 2"]
    assert set(lines[0]) == {"number", "at_s", "kind", "text", "node", "round"}
    Reporter("job", "", "", print).keep(0, "done", [], history)
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]
