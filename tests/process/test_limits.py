"""Open files: a launcher takes what the system allows, its workers get back what they had, and strangers a part."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from pathlib import Path

import psutil
import pytest

from edl.exit_codes import ExitCode
from tests.process.harness import Job, OutsideEtcd, until


def limited(soft: int, hard: int) -> list[str]:
    return ["bash", "-c", f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"', "bash"]


def limits_of(pid: int) -> tuple[int, int]:
    found = re.search(r"Max open files +(\d+) +(\d+)", Path(f"/proc/{pid}/limits").read_text())
    assert found is not None
    return int(found[1]), int(found[2])


def test_a_launcher_takes_the_hard_limit_and_its_workers_keep_the_soft_one(tmp_path: Path) -> None:
    with Job(tmp_path, [], "etcd-embedded", nnodes="1") as job:
        job.prefix = limited(256, 2048)
        node = job.start("a")
        seen = job.wait_world(1)
        assert limits_of(node.process.pid) == (2048, 2048)
        assert [limits_of(pid) for pid in seen.pids.values()] == [(256, 2048)]
        assert "files may be open" not in node.text


def test_too_few_for_the_largest_world_are_said_at_the_start(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with Job(tmp_path, [etcd.endpoint], nnodes="1:100") as job:
        job.prefix = limited(256, 256)
        job.start("a").says("at most 256 files may be open here (ulimit -Hn). With 100 nodes this launcher needs 308")
        job.wait_world(1)


@pytest.mark.slow
@pytest.mark.parametrize("most", [40, 100])
def test_too_few_to_begin_with_are_refused(tmp_path: Path, most: int) -> None:
    with Job(tmp_path, [], "etcd-embedded", nnodes="1") as job:
        job.prefix = limited(most, most)
        node = job.start("a")
        assert node.exit_code() == ExitCode.USAGE
        assert f"at most {most} files may be open here" in node.text and "needs 192" in node.text
        assert "Traceback" not in node.text and "goroutine" not in node.text


class Idlers:
    """Strangers that open connections and say nothing, as many as they get, until told to stop."""

    def __init__(self, port: int, count: int) -> None:
        self._port, self._count = port, count
        self._over = threading.Event()
        self.held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Idlers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for one in self.held:
            one.close()

    def _run(self) -> None:
        while not self._over.wait(0.1):
            self.held = [one for one in self.held if self._stands(one)]
            try:
                while len(self.held) < self._count:
                    self.held.append(socket.create_connection(("127.0.0.1", self._port), 1.0))
            except OSError:
                continue

    @staticmethod
    def _stands(one: socket.socket) -> bool:
        try:
            stands = one.recv(1, socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            stands = False
        if not stands:
            one.close()
        return stands


@pytest.mark.slow
def test_400_idle_connections_leave_room_to_replace_a_worker(tmp_path: Path) -> None:
    """One restart is charged, for the one worker that was killed."""
    with Job(tmp_path, [], "etcd-embedded", nnodes="1") as job:
        job.prefix = limited(256, 256)
        node = job.start("a", nproc=2)
        before = job.wait_world(2)
        launcher = psutil.Process(node.process.pid)
        ports = {(one.status, one.laddr.port) for one in launcher.net_connections()}
        (port,) = {port for _, port in ports if {(psutil.CONN_LISTEN, port), (psutil.CONN_ESTABLISHED, port)} <= ports}
        alone = launcher.num_fds()
        with Idlers(port, 400):
            until(lambda: launcher.num_fds() > alone + 60, "the strangers to be there")
            os.kill(before.pids[1], signal.SIGKILL)
            after = job.wait_world(2, after=before.round)
            assert launcher.num_fds() < 256 - 20
            assert job.status()["restarts_used"] == 1
        assert after.nodes == before.nodes
