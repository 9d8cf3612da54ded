"""``--scheduler=process`` with real launchers: the Master starts nodes and gives them back, and loses no step."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edl.adapters.leftovers import here
from tests.process.harness import WORKERS, Job, OutsideEtcd, alive, until
from tests.process.test_rejoin import redone

HOST = socket.gethostname()[:100]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[OutsideEtcd]:
    with OutsideEtcd(tmp_path / "etcd") as store:
        yield store


def job(etcd: OutsideEtcd, tmp_path: Path, *options: str, **named: Any) -> Job:
    wanted = ("--scheduler=process", f"--log-dir={tmp_path / 'logs'}", *options)
    return Job(tmp_path, [etcd.endpoint], script=(str(WORKERS / "rejoin_plain.py"),), options=wanted, **named)


def scale(running: Job, nodes: int) -> None:
    done = running.cli("scale", str(nodes), "--no-wait")
    assert done.returncode == 0, done.stderr


def started(tmp_path: Path, running: Job) -> dict[str, str]:
    """Logs of launchers that the Master started, by node."""
    found = {path.name: path.read_text() for path in (tmp_path / "logs").glob("*.launcher.log")}
    return {name.removeprefix(f"{running.name}_").removesuffix(".launcher.log"): text for name, text in found.items()}


def pids(running: Job) -> dict[str, int]:
    """Launchers of the job on this host, as ``edl status`` finds them."""
    notes = (running.temporary.glob("edl-*/*@*.json"), running.temporary.glob("edl-*/*.nodes/*.json"))
    found = {}
    for path in (path for folder in notes for path in folder):
        match = re.search(r'"node": "([^"]*)".*"pid": (\d+)', path.read_text())
        if match is not None and alive(int(match[2])):
            found[match[1]] = int(match[2])
    return found


@pytest.mark.slow
def test_up_and_down_without_a_step_made_twice(etcd: OutsideEtcd, tmp_path: Path) -> None:
    with job(etcd, tmp_path) as running:
        first = running.start("first")
        running.wait_world(1)
        running.wait_steps(20)
        assert started(tmp_path, running) == {}, "nobody has asked for more"
        scale(running, 3)
        three = running.wait_world(3)
        assert sorted(three.nodes.values()) == ["first", f"{HOST}-p1", f"{HOST}-p2"]
        running.wait_steps(20)
        before = pids(running)
        scale(running, 1)
        one = running.wait_world(1, after=three.round)
        assert list(one.nodes.values()) == ["first"]
        for node in (f"{HOST}-p1", f"{HOST}-p2"):
            until(lambda node=node: not alive(before[node]), f"the end of {node}'s launcher")  # type: ignore[misc]
            first.says(f"the launcher of {node} exited with status 0")
        running.wait_steps(20)
        running.end_soon()
        assert first.exit_code() == 0
        assert redone(running.steps()) == []
        assert "SIGTERM" not in first.text, "they leave by themselves"


@pytest.mark.soak
def test_a_new_master_finds_what_the_last_one_has_started(etcd: OutsideEtcd, tmp_path: Path) -> None:
    with job(etcd, tmp_path) as running:
        running.start("first")
        running.wait_world(1)
        scale(running, 3)
        three = running.wait_world(3)
        running.wait_steps(20)
        assert running.status()["master"] == "first"
        before = pids(running)
        running.kill("first")
        again = running.wait_world(3, after=three.round)
        assert sorted(again.nodes.values()) == [f"{HOST}-p{index}" for index in range(3)], "one more, and only one"
        assert all(alive(pid) for node, pid in before.items() if node != "first"), "launchers outlive their starter"
        running.wait_steps(20)
        scale(running, 1)
        one = running.wait_world(1, after=again.round)
        until(lambda: len(pids(running)) == 1, "the others have left")
        assert list(one.nodes.values()) == list(pids(running))
        running.wait_steps(20)
        planned = [step for step in running.steps() if step.round > again.round]
        assert redone(planned) == []
        running.end_soon()
        until(lambda: not pids(running), "the end of the job")


@pytest.mark.soak
def test_a_killed_launcher_is_replaced(etcd: OutsideEtcd, tmp_path: Path) -> None:
    with job(etcd, tmp_path, nnodes="2:3") as running:
        running.start("first")
        two = running.wait_world(2)
        assert list(started(tmp_path, running)) == [f"{HOST}-p1"], "a job needs its minimum"
        os.kill(pids(running)[f"{HOST}-p1"], signal.SIGKILL)
        running.wait_world(2, after=two.round)
        running.end_soon()
        assert running.exit_codes() == {"first": 0}


@pytest.mark.slow
def test_a_launcher_that_cannot_start_is_told_of_and_holds_nothing_up(etcd: OutsideEtcd, tmp_path: Path) -> None:
    with job(etcd, tmp_path) as running:
        first = running.start("first")
        running.wait_world(1)
        # Nobody may write there any more: the next launcher cannot be started.
        folder = next(running.temporary.glob("edl-*"))
        (folder / f"{running.name}@{here()}.nodes").write_text("in the way")
        scale(running, 2)
        status = running.wait_status(lambda status: "cannot start" in status["scale"]["waiting"], "an explanation")
        assert status["phase"] == "running"
        running.wait_steps(20)
        assert first.text.count("cannot start a launcher") == 1, "said once"
        (folder / f"{running.name}@{here()}.nodes").unlink()
        running.wait_world(2)
        running.end_soon()
        assert first.exit_code() == 0
        until(lambda: not pids(running), "the end of the job")
