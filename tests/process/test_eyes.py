"""Observing a job: status, events, errors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edl.exit_codes import ExitCode
from tests.process.harness import Job, OutsideEtcd


@pytest.mark.slow
def test_status_for_people_and_for_tools(tmp_path: Path, etcd: OutsideEtcd) -> None:
    arguments = ("--fail=1:3:3", f"--say={'[x]' * 3}")
    with Job(tmp_path, [etcd.endpoint], arguments=arguments) as job:
        job.start("a", nproc=2)
        charged = job.wait_world(2, after=1)  # rank 1 has failed; a change of nodes that came first would swallow it
        job.start("b")
        seen = job.wait_world(3, after=charged.round)
        status = job.status()
        assert (status["job"], status["phase"], status["round"]) == (job.name, "running", seen.round)
        assert (status["world_size"], status["restarts_used"], status["restarts_allowed"]) == (3, 1, 3)
        assert (status["nnodes"], status["fault_tolerance"], status["master"]) == ("1:4", "elastic", "a")
        places = [(node["node"], node["slots"], node["first_rank"], node["attached"]) for node in status["nodes"]]
        assert places == [("a", 2, 0, True), ("b", 1, 2, True)]
        (root,) = [failure for failure in status["failures"] if not failure["peer_loss"]]
        assert (root["rank"], root["exit_code"], root["what"]) == (1, 3, "ended with exit status 3")
        assert "giving up with status 3" in root["tail"]
        assert status["journal"] == status["history"] and status["history"], "under its former name as well"

        text = job.cli("status").stdout
        for part in (
            job.name,
            "running",
            f"round {seen.round}, 3 workers",
            "restarts 1 of 3",
            "Master a",
            "0-1",
            "[x]",
        ):
            assert part in text, text
        assert "giving up with status 3" in text
        # A user's shell on this host needs no options.
        command = [sys.executable, "-m", "edl.cli", "status"]
        bare = subprocess.run(command, env=job.base_environment(), capture_output=True, text=True, check=True)
        assert job.name in bare.stdout


@pytest.mark.slow
def test_events_are_told_as_they_happen(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with Job(tmp_path, [etcd.endpoint], nnodes="2") as job, contextlib.ExitStack() as stack:
        job.start("a", "b")
        before = job.wait_world(2)
        where = [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={job.name}"]
        follower = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-u", "-m", "edl.cli", "events", "-f", "--json", *where],
                env=job.base_environment(), stdout=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        stack.callback(follower.kill)
        assert follower.stdout is not None
        events = [json.loads(follower.stdout.readline())]
        while events[-1]["kind"] != "world-formed":
            events.append(json.loads(follower.stdout.readline()))
        formed = [event["kind"] for event in events if event["kind"] != "waiting"]  # for the second node, perhaps
        assert formed == ["node-joined", "node-joined", "world-formed"]
        before_kill = len(events)
        os.kill(before.pids[0], signal.SIGKILL)
        while events[-1]["round"] < 2:
            events.append(json.loads(follower.stdout.readline()))
        job.wait_world(2, after=1)
        kinds = [event["kind"] for event in events]
        assert kinds[before_kill] == "worker-failed"
        assert kinds[-1] == "world-formed"
        assert [event["number"] for event in events] == list(range(1, len(events) + 1))
        text = job.cli("events").stdout
        assert "worker 0 on" in text
        assert "was killed by SIGKILL" in text
        assert len(text.splitlines()) >= len(events)
        for node in job.nodes.values():
            node.send(signal.SIGTERM)
        # It looks for another Master for a while, of which there is none.
        assert follower.wait(180) in (0, ExitCode.STORE_UNREACHABLE)


@pytest.mark.slow
def test_looking_is_quick_and_needs_no_framework(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with Job(tmp_path, [etcd.endpoint]) as job:
        job.start("a")
        job.wait_world(1)
        for word in ("status", "events", "config", "health"):
            done = subprocess.run(
                [sys.executable, "-X", "importtime", "-m", "edl.cli", word, "--json",
                 f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={job.name}"],
                env=job.base_environment(), capture_output=True, text=True, check=True, timeout=60,
            )  # fmt: skip
            imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
            assert "grpc" in imported
            assert not imported & {"torch", "paddle", "numpy"}


def test_asking_for_what_is_not_there(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with Job(tmp_path, [etcd.endpoint], name="nobody-runs-this") as job:
        done = job.cli("status")
        assert done.returncode == ExitCode.USAGE
        assert "no job nobody-runs-this in this store" in done.stderr
        assert "Traceback" not in done.stderr
        job.endpoints = ["127.0.0.1:9"]
        done = job.cli("events")
        assert done.returncode == ExitCode.STORE_UNREACHABLE
        assert "127.0.0.1:9" in done.stderr
        assert "Traceback" not in done.stderr


def test_torch_tools_find_their_error_file(tmp_path: Path, etcd: OutsideEtcd) -> None:
    """torch.distributed.elastic reads ``TORCHELASTIC_ERROR_FILE``; the script here has no decorator."""
    with Job(tmp_path, [etcd.endpoint], arguments=("--fail=0:3:raise",), options=("--max-restarts=0",)) as job:
        job.start("a")
        assert job.exit_codes() == {"a": ExitCode.WORKER_FAILED}
        (path,) = job.nodes["a"].folder.glob("*/attempt_0/0/error.json")
        message = json.loads(path.read_text())["message"]
        assert message["message"] == "ValueError: the loss is not a number"
        assert "in misbehave" in message["extraInfo"]["py_callstack"]


def test_the_console_shows_what_workers_write_and_the_files_too(tmp_path: Path, etcd: OutsideEtcd) -> None:
    options = ("--tee=3",)
    with Job(tmp_path, [etcd.endpoint], arguments=("--steps=3", "--say=hello there"), options=options) as job:
        job.start("a", nproc=2)
        assert job.exit_codes() == {"a": 0}
        for rank in (0, 1):
            assert f"[default{rank}]:hello there" in job.nodes["a"].text
            (path,) = job.nodes["a"].folder.glob(f"*/attempt_0/{rank}/stderr.log")
            assert path.read_text() == "hello there\n"
