"""A node that is taken away while the job goes on: signals, a notice, and the last node of a job."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from edl.checkpoint.directory.manifest import MANIFEST_FILE, folder_version
from edl.exit_codes import ExitCode
from edl.wire.records import Version
from tests.process.harness import ROOT, WORKERS, Job, Node, OutsideEtcd, until
from tests.process.test_rejoin import redone

GRACE_S = 30.0
"""Kubernetes' default, and that of --shutdown-timeout."""


@pytest.fixture
def job(etcd: OutsideEtcd, tmp_path: Path) -> Iterator[Job]:
    options = (f"--checkpoint-dir={tmp_path / 'checkpoints'}", f"--shutdown-timeout={GRACE_S:g}")
    with Job(tmp_path, [etcd.endpoint], script=(str(WORKERS / "rejoin_plain.py"),), options=options) as running:
        yield running


def checkpoints(job: Job) -> list[Version]:
    """Complete checkpoints of the job."""
    found = [folder_version(path.parent.name) for path in (job.folder / "checkpoints").glob(f"*/{MANIFEST_FILE}")]
    return sorted(version for version in found if version is not None)


def last_step(job: Job, round: int) -> int:
    return max(step.step for step in job.steps() if step.round == round)


def boundary(job: Job) -> int:
    """Commit at which the world was left, as the history tells."""
    found = [re.search(r"\(at commit (\d+)\)", event["text"]) for event in job.events()]
    return max(int(match[1]) for match in found if match is not None)


def goes(node: Node, number: signal.Signals) -> tuple[int, float]:
    """Send the signal; the exit status, and how long that took."""
    sent = node.send(number)
    code = node.exit_code(GRACE_S)
    return code, time.monotonic() - sent


@pytest.mark.soak_but("the one that rules")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("leaver", "number"),
    [
        pytest.param("a", signal.SIGTERM, id="the one that rules, SIGTERM"),
        pytest.param("b", signal.SIGUSR2, id="another, SIGUSR2"),
        pytest.param("a", signal.SIGUSR2, id="the one that rules, SIGUSR2", marks=pytest.mark.soak),
        pytest.param("b", signal.SIGTERM, id="another, SIGTERM", marks=pytest.mark.soak),
    ],
)
def test_a_node_leaves_with_a_checkpoint_and_nobody_redoes_a_step(
    job: Job, leaver: str, number: signal.Signals
) -> None:
    """A committed checkpoint, the launcher ends with 0, the others go on without a step made twice."""
    job.start("a")
    job.wait_world(1)
    job.start("b")
    before = job.wait_world(2)
    job.wait_steps(5)
    code, took_s = goes(job.nodes[leaver], number)
    print(f"{number.name} to the committed checkpoint and the end of the launcher: {took_s:.2f} s")
    assert code == ExitCode.OK
    # A copy of a commit that those who stay have made since is as good, and newer.
    (saved,) = checkpoints(job)
    assert saved.commit >= boundary(job)
    after = job.wait_world(1, after=before.round)
    assert leaver not in after.nodes.values()
    job.wait_steps(10)
    assert redone(job.steps()) == []
    assert job.status()["restarts_used"] == 0
    del job.nodes[leaver]
    job.end_soon()
    assert set(job.exit_codes().values()) == {0}


@pytest.mark.soak
def test_the_last_node_saves_and_says_that_the_job_is_not_done(job: Job) -> None:
    job.start("a")
    seen = job.wait_world(1)
    job.wait_steps(5)
    code, took_s = goes(job.nodes["a"], signal.SIGTERM)
    print(f"SIGTERM to the end of the last launcher: {took_s:.2f} s")
    assert code == ExitCode.TERMINATED
    last = last_step(job, seen.round)
    assert len(checkpoints(job)) == 1
    job.start("b")
    until(lambda: any(step.node == "b" for step in job.steps()), "a step of the next launcher")
    assert min(step.step for step in job.steps() if step.node == "b") == last + 1, "it goes on from there"


@pytest.mark.soak
def test_another_exit_status_and_slurms_two_signals(job: Job) -> None:
    """USR2 some time before the limit, TERM at it: one way out, and the status that was asked for."""
    job.start("a", options=("--drained-exit-code=75", "--drain-signals=USR2"))
    job.start("b")
    before = job.wait_world(2)
    job.wait_steps(5)
    node = job.nodes["a"]
    node.send(signal.SIGUSR2)
    node.send(signal.SIGTERM)
    assert node.exit_code(GRACE_S) == 75
    job.wait_world(1, after=before.round)
    job.wait_steps(5)
    assert redone(job.steps()) == []


class Metadata(BaseHTTPRequestHandler):
    """AWS, as far as a spot instance sees it."""

    action: bytes = b""

    def do_PUT(self) -> None:
        self._answer(200, b"a-token")

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != "a-token":
            self._answer(401, b"")
        elif self.path == "/latest/meta-data/spot/instance-action" and Metadata.action:
            self._answer(200, Metadata.action)
        else:
            self._answer(404, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.soak
def test_a_spot_notice_drains_the_node(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(Metadata, "action", b"")
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        job.start("a")
        job.start("b", options=(f"--preemption-notice=aws:{url}",))
        before = job.wait_world(2)
        job.wait_steps(5)
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 120))
        monkeypatch.setattr(Metadata, "action", json.dumps({"action": "terminate", "time": at}).encode())
        assert job.nodes["b"].exit_code() == ExitCode.OK
        job.wait_world(1, after=before.round)
        job.wait_steps(5)
        assert redone(job.steps()) == []
        (saved,) = checkpoints(job)
        assert saved.commit >= boundary(job)
        assert any("spot instance-action terminate" in event["text"] for event in job.events())
    finally:
        server.shutdown()
        server.server_close()


SLOW_DISK = """
import os, time
fsync = os.fsync
os.fsync = lambda file: (time.sleep(1.5), fsync(file))[1]
"""


@pytest.mark.soak
def test_a_node_without_time_leaves_the_writing_to_the_others(job: Job) -> None:
    """The time it takes to save is known, and is more than there is: the survivor writes, at a boundary of its own."""
    slow = job.folder / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_DISK)
    job.environment = {"PYTHONPATH": f"{slow}:{ROOT}"}
    job.start("b").says("this node is the Master")  # what is owed outlives the Master that leaves
    job.start("a")
    before = job.wait_world(2)
    job.wait_steps(5)
    assert job.cli("checkpoint").returncode == 0
    need_s = job.wait_status(lambda status: status["scale"]["need_s"] > 2, "a measured time")["scale"]["need_s"]
    print(f"need: {need_s:.3f} s")
    done = job.cli("drain", "b", f"--deadline={need_s * 0.9:.2f}", "--no-wait")
    assert done.returncode == 0, done.stderr
    assert job.nodes["b"].exit_code() == ExitCode.OK
    after = job.wait_world(1, after=before.round)
    left = boundary(job)
    job.wait_status(lambda status: status["saved"]["commit"] > left, "the survivor's checkpoint")
    assert left not in [version.commit for version in checkpoints(job)], "the node that left has written nothing"
    assert any("node b left without time for a checkpoint: saving commit" in event["text"] for event in job.events())
    assert job.wait_world(1).round == after.round
    assert redone(job.steps()) == []
