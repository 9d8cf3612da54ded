"""Workers that the kernel takes long to bury: their end is reported when they run no more code, and their successors
wait until they are gone."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edl.config import Standby
from edl.ports import CommandKind, WorkerCommand
from edl.wire.process_events import WorkerExited
from edl.worker.child_processes import POLL_S
from tests.process.fork_server_fixture import Bench, run, script, script_bench, until

PTRACE_SEIZE, PTRACE_CONT, PTRACE_O_TRACEEXIT = 0x4206, 7, 0x40
WALL = 0x40000000
EVERY = pytest.mark.parametrize("standby", list(Standby), ids=lambda standby: standby.value)
SCRIPT = """
    import os, sys, time
    dead = os.environ.get("DEAD", "")
    print("there" if dead and os.path.exists(f"/proc/{dead}") else "gone", flush=True)
    while not dead:
        time.sleep(60)
"""


class Tracer:
    """Keeps dead processes from being reaped by their parents: a tracer has to see the end first."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._ptrace = ctypes.CDLL(None, use_errno=True).ptrace

    def hold(self, pid: int, stop_before_end: bool = False) -> None:
        """Trace a process; ``stop_before_end``: so that it does not even begin to end. Skips the test where that is
        forbidden."""
        if self._ptrace(PTRACE_SEIZE, pid, 0, PTRACE_O_TRACEEXIT if stop_before_end else 0):
            pytest.skip(f"ptrace is not permitted here: {os.strerror(ctypes.get_errno())}")
        self._held.append(pid)

    def release(self) -> None:
        """Let the parents of the dead have them."""
        while self._held:
            pid = self._held.pop()
            os.kill(pid, signal.SIGKILL)
            while os.WIFSTOPPED(os.waitpid(pid, WALL)[1]):
                self._ptrace(PTRACE_CONT, pid, 0, 0)


@contextmanager
def tracer() -> Iterator[Tracer]:
    tracer = Tracer()
    try:
        yield tracer
    finally:
        tracer.release()


async def nothing_comes(bench: Bench) -> None:
    """No event within several looks of the fork server."""
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(anext(bench.processes.events()), 10 * POLL_S)


def there(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").exists()


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@EVERY
def test_the_end_is_reported_at_once_and_the_successor_waits(tmp_path: Path, standby: Standby) -> None:
    async def main() -> None:
        async with script_bench(tmp_path, standby, SCRIPT, slots=2).open() as bench:
            with tracer() as held:
                dead = await bench.spawn("first")
                await bench.text_in("first", "gone")
                held.hold(dead)
                os.kill(dead, signal.SIGKILL)
                assert await bench.event() == WorkerExited(dead, -signal.SIGKILL)
                assert there(dead), "the tracer should have kept it"
                successor = await bench.spawn("second", DEAD=str(dead))
                if standby is not Standby.NONE:  # a cold one shows its script only when it starts
                    await until(lambda: "train.py" in command_line(successor), "the successor's title")
                assert not (tmp_path / "second.out").read_text()
            assert await bench.codes([successor]) == [0]
            assert bench.outcome(0, "second").out == "gone\n"

    run(main())


@EVERY
def test_a_program_that_cannot_be_executed_says_so_after_the_wait(tmp_path: Path, standby: Standby) -> None:
    program = Path(script(tmp_path, "#!/bin/sh\nexec sleep 1000\n", "program"))
    program.chmod(0o755)

    async def main() -> None:
        async with Bench(tmp_path, WorkerCommand(CommandKind.PROGRAM, str(program), ()), standby).open() as bench:
            with tracer() as held:
                dead = await bench.spawn("first")
                held.hold(dead)
                os.kill(dead, signal.SIGKILL)
                assert await bench.event() == WorkerExited(dead, -signal.SIGKILL)
                os.remove(program)
                successor = await bench.spawn("second")
            assert await bench.codes([successor]) == [127]
            assert "cannot execute" in bench.outcome(127, "second").err
            assert str(program) in bench.outcome(127, "second").err

    run(main())


def test_the_report_waits_while_a_member_of_the_group_runs(tmp_path: Path) -> None:
    """Data loaders of a dead worker may still write to its memory."""
    text = """
        import os, time
        os.fork()
        print(os.getpid(), flush=True)
        time.sleep(1000)
    """

    async def main() -> None:
        async with script_bench(tmp_path, Standby.FORK, text).open() as bench:
            with tracer() as held:
                dead = await bench.spawn("first")
                await until(lambda: len((tmp_path / "first.out").read_text().split()) == 2, "both processes")
                member = next(pid for pid in map(int, (tmp_path / "first.out").read_text().split()) if pid != dead)
                held.hold(dead)
                held.hold(member, stop_before_end=True)
                os.kill(dead, signal.SIGKILL)
                await nothing_comes(bench)
            assert await bench.event() == WorkerExited(dead, -signal.SIGKILL)

    run(main())


def test_a_success_is_reported_when_it_can_be_reaped(tmp_path: Path) -> None:
    text = "import sys, time; time.sleep(0.2)"

    async def main() -> None:
        async with script_bench(tmp_path, Standby.FORK, text).open() as bench:
            with tracer() as held:
                done = await bench.spawn("first")
                held.hold(done)
                await until(lambda: " Z " in Path(f"/proc/{done}/stat").read_text(), "the end")
                await nothing_comes(bench)
            assert await bench.codes([done]) == [0]

    run(main())


def test_the_end_of_a_large_worker_does_not_wait_for_its_memory(tmp_path: Path) -> None:
    """The real thing: pages are freed while the report is out already. Sizes are tried until one is slow enough to be
    seen."""
    text = """
        import mmap, os
        memory = mmap.mmap(-1, int(os.environ["BYTES"]))
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for offset in range(0, len(memory), 4096):
            memory[offset] = 1
        print("gone", flush=True)
        __import__("time").sleep(1000)
    """

    async def main() -> bool:
        async with script_bench(tmp_path, Standby.FORK, text).open() as bench:
            for size in (256 << 20, 512 << 20, 1 << 30, 2 << 30):
                dead = await bench.spawn("first", BYTES=str(size))
                await bench.text_in("first", "gone")
                os.kill(dead, signal.SIGKILL)
                assert await bench.event() == WorkerExited(dead, -signal.SIGKILL)
                if there(dead):
                    return True
        return False

    begun_s = time.monotonic()
    assert run(main()), f"2 GB are freed within a look (all took {time.monotonic() - begun_s:.1f} s)"
