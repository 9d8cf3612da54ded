"""Fixtures for the fork server's tests: runs scripts through ``ForkServerProcesses`` and waits with deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from edl.adapters.processes import ForkServerProcesses
from edl.config import Standby
from edl.ports import CommandKind, WorkerCommand
from edl.wire.process_events import ProcessEvent, WorkerExited

ROOT = str(Path(__file__).resolve().parents[2])
DEADLINE_S = 120.0
Result = TypeVar("Result")


def base_environment(**more: str) -> dict[str, str]:
    """A small environment in which this checkout of edl is importable."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return {**kept, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", **more}


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a worker."""

    code: int
    out: str
    err: str


@dataclass
class Bench:
    """One command, run as often as a test wants."""

    folder: Path
    command: WorkerCommand
    standby: Standby
    slots: int = 1
    preload: tuple[str, ...] = ()
    answer_s: float = DEADLINE_S
    learn_bytes: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    """More variables of the fork server and of all workers."""
    logged: list[str] = field(default_factory=list)
    warmed: str = ""
    seen: list[ProcessEvent] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Bench]:
        """Warm on entry, closed on exit."""
        self.processes = ForkServerProcesses(
            *(self.command, self.standby, self.slots, base_environment(**self.environment), self.preload),
            self.logged.append,
            answer_s=self.answer_s,
            learn_bytes=self.learn_bytes,
        )
        self._events = self.processes.events()
        try:
            self.warmed = await asyncio.wait_for(self.processes.warm(), DEADLINE_S)
            yield self
        finally:
            await self.processes.close()

    async def spawn(self, name: str = "worker", local_rank: int = 0, cores: tuple[int, ...] = (), **more: str) -> int:
        """Start a worker whose output goes to files called ``name``."""
        out_path, err_path = self.folder / f"{name}.out", self.folder / f"{name}.err"
        with out_path.open("wb") as out, err_path.open("wb") as err:
            return await asyncio.wait_for(
                self.processes.spawn(
                    base_environment(**self.environment, **more), out.fileno(), err.fileno(), local_rank, cores
                ),
                DEADLINE_S,
            )

    async def event(self) -> ProcessEvent:
        """The next event, whatever it is."""
        event = await asyncio.wait_for(anext(self._events), DEADLINE_S)
        self.seen.append(event)
        return event

    async def codes(self, pids: Sequence[int]) -> list[int]:
        """Exit codes of these workers once all have ended."""
        codes: dict[int, int] = {}
        while not codes.keys() >= set(pids):
            event = await self.event()
            if isinstance(event, WorkerExited):
                codes[event.pid] = event.code
        return [codes[pid] for pid in pids]

    def outcome(self, code: int, name: str = "worker") -> Outcome:
        """Exit code and what was written."""
        return Outcome(code, (self.folder / f"{name}.out").read_text(), (self.folder / f"{name}.err").read_text())

    async def run(self, name: str = "worker", **more: str) -> Outcome:
        """One worker from start to end."""
        (code,) = await self.codes([await self.spawn(name, 0, (), **more)])
        return self.outcome(code, name)

    async def text_in(self, name: str, wanted: str) -> str:
        """Output file of a worker, once it holds the wanted text."""
        path = self.folder / f"{name}.out"
        await until(lambda: wanted in path.read_text(), f"{wanted!r} in {path.name}")
        return path.read_text()


def script(folder: Path, text: str, name: str = "train.py") -> str:
    """Write a script; returns its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return str(path)


def script_bench(folder: Path, standby: Standby, text: str, *arguments: str, slots: int = 1) -> Bench:
    """A bench for a Python script with this text."""
    command = WorkerCommand(CommandKind.SCRIPT, script(folder, text), arguments)
    return Bench(folder, command, standby, slots)


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine of a test."""
    return asyncio.run(main)


def python(folder: Path, *arguments: str, **more: str) -> Outcome:
    """The same through the plain interpreter, to compare with."""
    done = subprocess.run(
        [sys.executable, "-u", *arguments],
        env=base_environment(**more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that no descriptor announces."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        await asyncio.sleep(0.005)


def pin(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; it cannot be mistaken for a later process."""
    return os.pidfd_open(pid)


def wait_gone(pins: Sequence[int]) -> None:
    """Wait until all pinned processes have ended."""
    deadline = time.monotonic() + DEADLINE_S
    for descriptor in pins:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, "a process that should be gone still runs"
        os.close(descriptor)


def kill_now(pid: int) -> None:
    """SIGKILL one process that this test started."""
    os.kill(pid, signal.SIGKILL)
