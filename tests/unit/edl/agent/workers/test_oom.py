"""The kernel's log lines about processes killed for lack of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.agent.workers.oom import ControlGroup, OutOfMemory, own_group, was_killed

SECOND = "12:pids:/\n4:memory:/jobs/a\n0::/\n"


@pytest.fixture
def files(tmp_path: Path) -> tuple[ControlGroup, Path]:
    group, host = ControlGroup(tmp_path / "memory.events", tmp_path / "memory.max"), tmp_path / "vmstat"
    group.events.write_text("low 0\nhigh 3\nmax 9\noom 1\noom_kill 1\n")
    group.limit.write_text(f"{2 << 30}\n")
    host.write_text("nr_free_pages 7\noom_kill 4\n")
    return group, host


@pytest.mark.parametrize(
    ("code", "exception", "killed"),
    [
        (-9, "", True),
        (137, "", True),
        (1, "RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed. ", True),
        (1, "SystemError: Fatal: DataLoader process 4 run failed, pid 7 exited by SIGKILL", True),
        (1, "ValueError: bad", False),
        (-15, "", False),
        (0, "", False),
    ],
)
def test_who_may_have_been_killed_for_lack_of_memory(code: int, exception: str, killed: bool) -> None:
    assert was_killed(code, exception) is killed


def test_what_was_before_counts_for_nothing(files: tuple[ControlGroup, Path]) -> None:
    assert OutOfMemory(*files).look() == ""


def test_a_container_at_its_limit_is_told_from_a_full_host(files: tuple[ControlGroup, Path]) -> None:
    group, host = files
    memory = OutOfMemory(group, host)
    group.events.write_text("oom 2\noom_kill 2\n")
    host.write_text("oom_kill 5\n")
    assert memory.look().startswith(
        "out of memory: the kernel killed a process in this container, whose limit of 2.0 GiB was reached"
    )
    assert memory.look() == "", "once"
    host.write_text("oom_kill 7\n")
    assert memory.look().startswith("maybe out of memory: the kernel killed 2 processes on this host")


def test_a_kernel_that_does_not_count_is_silent(tmp_path: Path) -> None:
    memory = OutOfMemory(ControlGroup(tmp_path / "none", tmp_path / "none"), tmp_path / "none")
    assert memory.look() == ""


@pytest.mark.parametrize(
    ("listed", "events", "limit"),
    [
        ("0::/jobs/a\n", "jobs/a/memory.events", "jobs/a/memory.max"),
        ("0::/\n", "memory.events", "memory.max"),
        (SECOND, "memory/jobs/a/memory.oom_control", "memory/jobs/a/memory.limit_in_bytes"),
        ("3:cpu,memory:/x\n", "memory/x/memory.oom_control", "memory/x/memory.limit_in_bytes"),
    ],
)
def test_the_group_of_this_process_is_found_in_either_version(listed: str, events: str, limit: str) -> None:
    root = Path("/cg")
    assert own_group(listed, root) == ControlGroup(root / events, root / limit)


def test_a_real_one_is_there_or_says_nothing() -> None:
    assert OutOfMemory().look() == ""
