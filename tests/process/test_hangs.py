"""A plain torch script of which one rank stops calling all_reduce: found by its activity and by its collectives."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.process.harness import WORKERS, Job, OutsideEtcd, until

SLOW_S = 400.0
"""The limit follows the pauses of the script, which are long on a busy machine."""
SCRIPT = (str(WORKERS / "hang_gloo.py"),)


def job(
    etcd: OutsideEtcd, folder: Path, timeout: str, hang_after_s: float, *arguments: str, nnodes: str = "1:1"
) -> Job:
    options = (f"--hang-timeout={timeout}", "--shutdown-timeout=2")
    named = (f"--hang-after={hang_after_s:g}", *arguments)
    return Job(folder, [etcd.endpoint], script=SCRIPT, options=options, arguments=named, nnodes=nnodes)


@pytest.mark.slow
@pytest.mark.soak_but("spinning")
@pytest.mark.parametrize("arguments", [(), ("--spins",)], ids=["waiting", "spinning"])
def test_a_rank_that_leaves_the_others_alone_is_found(
    etcd: OutsideEtcd, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    with job(etcd, tmp_path, "5", 3.0, *arguments) as running:
        node = running.start("a", nproc=2)
        running.wait_world(2)
        until(lambda: any(one["kind"] == "worker-failed" for one in running.events()), "the hang", SLOW_S, 1.0)
        (hang,) = [one for one in running.events() if one["kind"] == "worker-failed"]
        assert "rank 1 at hang_gloo.py:" in hang["text"] and "in gone_astray" in hang["text"]
        assert "waits for gloo:all_reduce of 1024, number" in hang["text"]
        report = running.cli("errors").stdout
        assert "made no progress for" in report and "in left_alone" in report and "in gone_astray" in report
        (recorded,) = node.folder.glob("*/attempt_0/0/flight-recorder.json")
        assert str(recorded) in hang["text"]
        calls = [call for dump in json.loads(recorded.read_text()) for call in dump["entries"]]
        assert [call["profiling_name"] for call in calls if not call["retired"]] == ["gloo:all_reduce"]
        assert running.exit_codes() == {"a": 0}, "the second round does not hang"


@pytest.mark.soak
@pytest.mark.slow
def test_with_a_learnt_limit_the_alarm_comes_first_and_the_dead_round_is_restarted(
    etcd: OutsideEtcd, tmp_path: Path
) -> None:
    with job(etcd, tmp_path, "auto:5", 20.0) as running:
        running.start("a", nproc=2)
        running.wait_world(2)
        learning = running.cli("status").stdout
        assert "Hang detection: off until a limit is learnt (" in learning
        until(lambda: "Hang detection: after " in running.cli("status").stdout, "a limit", SLOW_S, 1.0)
        until(lambda: any(one["kind"] == "worker-failed" for one in running.events()), "the hang", SLOW_S, 1.0)
        kinds = {one["kind"]: one["text"] for one in running.events()}
        assert kinds["alarm"].startswith("hang: local ranks 0, 1: ")
        assert ", learnt from " in kinds["alarm"] and "in gone_astray" in kinds["alarm"]
        assert "restart 1 of 3" in kinds["worker-failed"]
        assert running.exit_codes() == {"a": 0}
        assert list(kinds).index("alarm") < list(kinds).index("worker-failed")
        assert re.search(r"goodput .*\bhang [1-9]", running.nodes["a"].text), "the hang counts as one"


@pytest.mark.soak
def test_nodes_that_wait_for_one_that_works_are_reported_and_not_restarted(etcd: OutsideEtcd, tmp_path: Path) -> None:
    with job(etcd, tmp_path, "auto:5", 15.0, "--evaluate", nnodes="2:2") as running:
        running.start("a", "b")
        running.wait_world(2)
        until(lambda: any(one["kind"] == "alarm" for one in running.events()), "the suspicion", SLOW_S, 1.0)
        (alarm,) = [one["text"] for one in running.events() if one["kind"] == "alarm"]
        assert "rank 1 at hang_gloo.py:" in alarm and "waits for gloo:all_reduce" in alarm
        (running.steps_folder / "evaluated").touch()
        until(lambda: any(one["kind"] == "alarm-cleared" for one in running.events()), "the end of it", SLOW_S, 0.2)
        assert [one["text"] for one in running.events() if one["kind"] == "worker-failed"] == []
        assert running.exit_codes() == {"a": 0, "b": 0}
