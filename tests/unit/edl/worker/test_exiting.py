"""Processes that run no more code are recognised, whatever keeps the kernel from reporting them."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from edl.worker import exiting

SYS_EXIT = 60 if os.uname().machine == "x86_64" else 93
"""Number of the system call that ends one thread only."""


@contextmanager
def child(run: Callable[[], None]) -> Iterator[int]:
    """A forked process that runs this and then waits to be killed; reaped afterwards."""
    pid = os.fork()
    if pid == 0:
        try:
            run()
            signal.pause()
        finally:
            os._exit(99)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def wait_unreaped(pid: int) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda: os._exit(3), 3),
        (lambda: os._exit(255), 255),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM),
        (lambda: os._exit(0), None),
    ],
    ids=("status 3", "status 255", "SIGKILL", "SIGTERM", "success"),
)
def test_the_code_is_that_of_waitpid_except_for_success(end: Callable[[], None], code: int | None) -> None:
    with child(end) as pid:
        wait_unreaped(pid)
        assert exiting.exit_code(pid) == code
        assert exiting.has_stopped_running(pid)


def test_a_process_that_runs_or_is_unknown_has_no_code() -> None:
    with child(lambda: None) as pid:
        assert exiting.exit_code(pid) is None
        assert not exiting.has_stopped_running(pid)
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        assert exiting.exit_code(pid) is None
    assert exiting.exit_code(pid) is None
    assert exiting.has_stopped_running(pid)


def test_a_process_whose_main_thread_alone_has_ended_still_runs() -> None:
    reading, writing = os.pipe()

    def leave_a_thread() -> None:
        threading.Thread(target=lambda: (os.write(writing, b"x"), threading.Event().wait())).start()
        ctypes.CDLL(None).syscall(SYS_EXIT, 5)

    with child(leave_a_thread) as pid:
        os.read(reading, 1)
        while exiting._fields(f"/proc/{pid}/stat")[0] != "Z":  # the thread reaches the system call on its own
            os.sched_yield()
        assert exiting.exit_code(pid) is None
        assert not exiting.has_stopped_running(pid)


def test_a_group_has_stopped_when_its_last_member_has() -> None:
    with child(lambda: None) as leader, child(lambda: None) as member:
        os.setpgid(leader, leader)
        os.setpgid(member, leader)
        assert not exiting.group_has_stopped(leader)
        for pid, left in ((leader, True), (member, False)):
            os.kill(pid, signal.SIGKILL)
            wait_unreaped(pid)
            assert exiting.group_has_stopped(leader) is not left


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self, on_sleep: Callable[[int], None] = lambda _: None) -> None:
        self.now_s = 0.0
        self.naps = 0
        self._on_sleep = on_sleep

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.naps += 1
        self._on_sleep(self.naps)


def test_waiting_ends_when_the_processes_are_gone() -> None:
    first, second = os.fork(), 0
    if first == 0:
        os._exit(1)
    second = os.fork()
    if second == 0:
        os._exit(1)
    wait_unreaped(first)
    wait_unreaped(second)

    def reap(naps: int) -> None:
        if naps in (3, 5):
            os.waitpid(first if naps == 3 else second, 0)

    clock = Clock(reap)
    assert exiting.wait_until_gone({first, second}, 10.0, clock, clock.sleep) == set()
    assert clock.naps == 5


def test_waiting_has_a_limit_and_names_what_is_left() -> None:
    with child(lambda: os._exit(1)) as pid:
        wait_unreaped(pid)
        clock = Clock()
        assert exiting.wait_until_gone([pid], 2.0, clock, clock.sleep) == {pid}
        assert clock.now_s == pytest.approx(2.0, abs=0.1)


def test_nobody_waits_for_a_process_that_runs() -> None:
    """A pid that is in use again belongs to somebody else."""
    clock = Clock()
    assert exiting.wait_until_gone([os.getpid()], 10.0, clock, clock.sleep) == set()
    assert clock.naps == 0
