"""GET /metrics: who may, what the Master and the others answer, and what happens without the library."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edl.web.settings import HttpSettings
from tests.support.web_fixture import Setup, play

OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


def test_the_master_has_the_series_of_the_job() -> None:
    async def scenario(on: Setup) -> None:
        answer = await on.ask("GET", "/metrics")
        assert (answer.code, answer.headers["Content-Type"].partition(";")[0]) == (200, "text/plain")
        assert 'edl_job_phase{edl_job="train",phase="running"} 1.0' in answer.text
        assert 'edl_rounds_total{cause="first",edl_job="train"} 1.0' in answer.text
        assert 'edl_node_worker_exits_total{edl_job="train",result="error"} 2.0' in answer.text

    play(scenario)


def test_another_launcher_has_those_of_its_node() -> None:
    async def scenario(on: Setup) -> None:
        on.url = "http://10.0.0.9:1"
        answer = await on.ask("GET", "/metrics")
        assert answer.code == 200, "it does not redirect to the Master"
        assert "edl_node_slots" in answer.text
        assert "edl_job_phase" not in answer.text

    play(scenario, rules=False)


def test_a_master_that_has_stepped_down_is_silent_about_the_job() -> None:
    async def scenario(on: Setup) -> None:
        on.master.serving = False
        assert "edl_job_phase" not in (await on.ask("GET", "/metrics")).text

    play(scenario)


def test_openmetrics_for_clients_that_ask_for_it() -> None:
    async def scenario(on: Setup) -> None:
        answer = await on.ask("GET", "/metrics", headers=OPENMETRICS)
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        assert answer.text.endswith("# EOF\n")

    play(scenario)


def test_a_read_token_suffices_and_is_needed(tmp_path: Path) -> None:
    (tmp_path / "read").write_text("a-token-that-may-only-look")

    async def scenario(on: Setup) -> None:
        assert (await on.ask("GET", "/metrics", token="a-token-that-may-only-look")).code == 200
        assert (await on.ask("GET", "/metrics", token=None)).code == 401
        assert (await on.ask("POST", "/metrics", token="a-token-that-may-only-look")).code == 405

    play(scenario, HttpSettings(0, read_token_file=str(tmp_path / "read")))


def test_without_the_library_the_answer_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "edl.metrics.exposition", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)

    async def scenario(on: Setup) -> None:
        answer = await on.ask("GET", "/metrics")
        assert (answer.code, answer.json["reason"]) == (501, "NotImplemented")
        assert "pip install 'edl[metrics]'" in answer.json["message"]
        assert (await on.ask("GET", "JOB/scale")).code == 200

    assert len(play(scenario).log) == 1, "that is no defect"
