"""The history of a job that has ended, told from files: a worker, a node and the Master were killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import Job, OutsideEtcd, until


def history(job: Job, *words: str) -> str:
    """What ``edl history`` prints, with no job running that it could ask."""
    done = subprocess.run(
        [sys.executable, "-m", "edl.cli", "history", *words],
        env=job.base_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False], ids=["shared directory", "directory on each node"])
def test_the_story_is_told_in_order_with_each_event_once(shared: bool, tmp_path: Path, etcd: OutsideEtcd) -> None:
    folders = {name: tmp_path / ("history" if shared else f"history-{name}") for name in "abc"}
    with Job(tmp_path, [etcd.endpoint], options=("--slot-strikes=0",)) as job:
        for name, folder in folders.items():
            job.start(name, options=[f"--history-dir={folder}"])
        first = job.wait_world(3)
        master = job.status()["master"]
        spared = next(rank for rank in range(3) if first.nodes[rank] != master)
        os.kill(first.pids[spared], signal.SIGKILL)
        second = job.wait_world(3, after=first.round)
        victim = next(name for name in "abc" if name != master)
        job.kill(victim)
        third = job.wait_world(2, after=second.round)
        job.kill(master)
        last = next(name for name in "abc" if name not in (victim, master))
        fourth = job.wait_world(1, after=third.round)
        assert job.status()["master"] == last
        job.end_soon()
        assert job.nodes[last].exit_code() == 0
        words = [str(folder) for folder in dict.fromkeys(folders.values()) if folder.is_dir()]
        lines: list[Any] = [json.loads(line) for line in history(job, *words, "--json", "--last=0").splitlines()]
        text = history(job, *words)
    numbers = [line["body"]["number"] for line in lines if line["kind"] == "event"]
    assert numbers == list(range(1, numbers[-1] + 1))
    rounds = [line["body"]["round"] for line in lines if line["kind"] == "round"]
    assert rounds == list(range(1, fourth.round + 1))
    (failure,) = [line["body"] for line in lines if line["kind"] == "failure" and not line["body"]["peer_loss"]]
    assert (failure["node"], failure["what"]) == (first.nodes[spared], "was killed by SIGKILL")
    assert [line["body"]["node"] for line in lines if line["kind"] == "begin"] == [master, last]
    assert lines[-1]["kind"] == "end"
    assert (lines[-1]["body"]["exit_code"], lines[-1]["body"]["restarts"]) == (0, 1)
    story = [
        "began",
        "round 1 ",
        "was killed by SIGKILL",
        f"round {second.round} ",
        f"node {victim} lost",
        f"round {third.round} ",
        f"node {last} is the Master",
        f"round {fourth.round} ",
        "exit code 0",
    ]
    places = [text.index(one) for one in story]
    assert places == sorted(places), text
    rows = [line for line in text.splitlines() if " node-lost " in line]
    assert [f"node {name} lost" in row for name, row in zip((victim, master), rows, strict=True)] == [True, True], text


@pytest.mark.slow
def test_a_disk_that_vanishes_costs_lines_and_nothing_else(tmp_path: Path, etcd: OutsideEtcd) -> None:
    folder = tmp_path / "history"
    with Job(tmp_path, [etcd.endpoint], options=("--slot-strikes=0", f"--history-dir={folder}")) as job:
        node = job.start("a")
        before = job.wait_world(1)
        until(lambda: any(folder.glob("*/*.jsonl")), "a history file")
        folder.rename(tmp_path / "elsewhere")
        os.kill(before.pids[0], signal.SIGKILL)
        after = job.wait_world(1, after=before.round)
        node.says("cannot write the history")
        folder.mkdir()
        os.kill(after.pids[0], signal.SIGKILL)
        job.wait_world(1, after=after.round)
        node.says("the history is written to")
        job.end_soon()
        assert node.exit_code() == 0
        assert node.text.count("cannot write the history") == 1
        found = history(job, str(folder), str(tmp_path / "elsewhere"), "--json", "--last=0").splitlines()
    numbers = [line["body"]["number"] for line in map(json.loads, found) if line["kind"] == "event"]
    assert numbers == list(range(1, numbers[-1] + 1))
