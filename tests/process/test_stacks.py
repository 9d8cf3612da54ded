"""Stacks of workers that hang, and signs of life, of real processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from edl.adapters import stacks
from edl.adapters.activity import activity
from edl.config import Standby
from edl.ports import CommandKind, WorkerCommand
from tests.process.fork_server_fixture import Bench, kill_now, run, script_bench, until

EVERY = pytest.mark.parametrize("standby", list(Standby), ids=lambda standby: standby.value)

STUCK = """
    import subprocess, sys, threading
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    lock = threading.Lock()
    def holds_on():
        lock.acquire()
        lock.acquire()
    thread = threading.Thread(target=holds_on)
    thread.start()
    def waits():
        print("child", child.pid)
        thread.join()
    waits()
"""
WITH_THE_GIL = """
    import ctypes
    libc = ctypes.PyDLL(None)
    def in_c():
        while True:
            libc.sleep(1000)
    print("child 0")
    in_c()
"""
IN_TORCH = """
    import datetime
    import torch.distributed as dist
    def alone():
        dist.TCPStore("127.0.0.1", 0, 2, True, timeout=datetime.timedelta(seconds=500))
    print("child 0")
    alone()
"""


def error_text(bench: Bench) -> str:
    return (bench.folder / "worker.err").read_text()


async def dumped(bench: Bench, wanted: str) -> tuple[int, int]:
    """Start the script and have it write its stacks; returns its pid and that of its child."""
    pid = await bench.spawn()
    text = await bench.text_in("worker", "\n")  # print writes a line in several parts
    await bench.processes.dump(pid)
    await until(lambda: wanted in error_text(bench), f"{wanted} in {error_text(bench)}")
    return pid, int(text.split()[1])


@EVERY
def test_a_worker_shows_all_its_threads_and_lives_on_and_so_does_its_child(tmp_path: Path, standby: Standby) -> None:
    bench = script_bench(tmp_path, standby, STUCK)

    async def main() -> None:
        async with bench.open():
            pid, child = await dumped(bench, "in waits")
            assert "in holds_on" in error_text(bench)
            await bench.processes.dump(pid)
            await until(lambda: error_text(bench).count("in waits") == 2, "stacks a second time")
            assert psutil.STATUS_ZOMBIE not in {psutil.Process(one).status() for one in (pid, child)}
            assert bench.logged == []
            await bench.processes.signal(pid, signal.SIGKILL)
            assert await bench.codes([pid]) == [-signal.SIGKILL]
            await bench.processes.dump(pid)  # it has ended: nothing to do

    run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "wanted"),
    [(WITH_THE_GIL, "in in_c"), pytest.param(IN_TORCH, "in alone", marks=pytest.mark.torch)],
    ids=["with the GIL", "in C++"],
)
def test_python_need_not_run_for_it(tmp_path: Path, text: str, wanted: str) -> None:
    bench = script_bench(tmp_path, Standby.FORK, text)

    async def main() -> None:
        async with bench.open():
            pid, _ = await dumped(bench, wanted)
            os.kill(pid, 0)

    run(main())


@EVERY
def test_a_worker_that_has_not_come_to_its_script_survives(tmp_path: Path, standby: Standby) -> None:
    bench = script_bench(tmp_path, standby, "import time\nprint('here')\ntime.sleep(1000)\n")

    async def main() -> None:
        async with bench.open():
            pid = await bench.spawn()
            for _ in range(20):
                await bench.processes.dump(pid)
                await asyncio.sleep(0)
            await bench.text_in("worker", "here")
            os.kill(pid, 0)
            assert all("has not reached its script yet" in line for line in bench.logged)

    run(main())


def test_one_that_has_become_another_program_survives(tmp_path: Path) -> None:
    text = "import os\nprint('here')\nos.execvp('sleep', ['sleep', '1000'])\n"
    bench = script_bench(tmp_path, Standby.FORK, text)

    async def main() -> None:
        async with bench.open():
            pid = await bench.spawn()
            await until(lambda: "sleep" in Path(f"/proc/{pid}/comm").read_text(), "the other program")
            await bench.processes.dump(pid)
            await until(lambda: bench.logged != [], "why there are no stacks")
            assert "runs another program" in bench.logged[0]
            os.kill(pid, 0)

    run(main())


def program_says(folder: Path) -> str:
    """Log of a program that dumps its stacks and survives."""
    program = WorkerCommand(
        CommandKind.PROGRAM, "sh", ("-c", f"{sys.executable} -c 'import time; time.sleep(1000)'; :")
    )
    bench = Bench(folder, program, Standby.NONE)

    async def main() -> None:
        async with bench.open():
            pid = await bench.spawn()
            await bench.processes.dump(pid)
            os.kill(pid, 0)

    run(main())
    return bench.logged[0]


def test_without_py_spy_a_programs_stacks_are_not_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "py-spy is not installed" in program_says(tmp_path)


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("echo 'Thread 1 (idle): in train'", "Thread 1 (idle): in train"),
        ("echo 'Error: Permission Denied' >&2; exit 1", "py-spy: Error: Permission Denied"),
        ("exec sleep 100", "timed out"),
    ],
    ids=["shown", "refused", "stuck"],
)
def test_py_spy_looks_at_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, wanted: str) -> None:
    monkeypatch.setattr(stacks, "_LIMIT_S", 0.5)
    tool = tmp_path / "py-spy"
    tool.write_text(f"#!/bin/sh\n{answer}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(tool))
    assert wanted in program_says(tmp_path)


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed")
def test_the_real_py_spy_does(tmp_path: Path) -> None:
    assert "sleep" in program_says(tmp_path)


BUSY = """
    import subprocess, sys, time
    mode = sys.argv[1]
    if mode == "child":
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
    print("here")
    while mode == "compute":
        pass
    while mode == "read":
        with open("/dev/zero", "rb") as file:
            file.read(1000000)
        time.sleep(0.05)
    time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sleep", "compute", "child", "read"])
def test_signs_of_life(tmp_path: Path, mode: str) -> None:
    bench = script_bench(tmp_path, Standby.FORK, BUSY, mode)

    async def main() -> None:
        async with bench.open():
            pid = await bench.spawn()
            await bench.text_in("worker", "here")
            await asyncio.sleep(0.5)
            before, began_s = activity([pid])[pid], time.monotonic()

            def since() -> tuple[float, int]:
                after = activity([pid])[pid]
                return after.cpu_s - before.cpu_s, after.io_bytes - before.io_bytes

            if mode == "sleep":
                await asyncio.sleep(1.0)
                (cpu_s, io_bytes), took_s = since(), time.monotonic() - began_s
                assert (cpu_s <= 0.01 * took_s, io_bytes < 100_000 * took_s) == (True, True), (cpu_s, io_bytes, took_s)
            elif mode == "read":
                await until(lambda: since()[1] > 1_000_000, "what it reads")
            else:
                await until(lambda: since()[0] > 0.05, "the time that it computes")
            kill_now(pid)
            await bench.codes([pid])
            await until(lambda: activity([pid]) == {}, "the kernel's end of the worker")

    run(main())


def test_nobody_to_look_at_costs_nothing() -> None:
    assert activity([]) == {}
