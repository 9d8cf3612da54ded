"""The agent's side of a probe."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import sys
from typing import Any

import pytest

from edl.agent.health_probe import HealthProbe, ProbeSettings, found_in
from edl.errors import WorkerStartError
from edl.tasks import end
from edl.types import NodeId
from edl.wire import json_messages
from edl.wire.health import CheckHealth, HealthChecked
from edl.wire.health_records import PROBE_VARIABLE, ProbeOrder

ORDER = CheckHealth(3, 1, 0, (), 64, 30.0, "test")


def line(**fields: Any) -> bytes:
    return json_messages.encode(HealthChecked(3, 1, **fields)) + b"\n"


def test_the_last_line_counts() -> None:
    found = found_in(ORDER, line() + line(kind="cpu"), b"", late=False)
    assert found is not None and found.kind == "cpu"


def test_half_a_line_does_not() -> None:
    found = found_in(ORDER, line(kind="cpu") + line(kind="gpu")[:20], b"", late=True)
    assert found is not None and found.kind == "cpu"


@pytest.mark.parametrize(
    ("stderr", "late", "error"),
    [
        (b"", True, "its own part did not end within 30 s (--health-check-timeout=30)"),
        (
            b"warning\nFatal Python error: Segmentation fault\n\nThread\n",
            False,
            "Fatal Python error: Segmentation fault",
        ),
        (b"Traceback\nImportError: libcuda.so\n", False, "the probe ended without a result: ImportError: libcuda.so"),
    ],
)
def test_a_probe_without_a_result_is_a_fault(stderr: bytes, late: bool, error: str) -> None:
    found = found_in(ORDER, b"", stderr, late=late)
    assert found is not None and error in found.error


@pytest.mark.parametrize("stderr", [b"", b"UserWarning: old driver\n  warnings.warn()\n"])
def test_a_probe_that_was_killed_is_no_finding(stderr: bytes) -> None:
    assert found_in(ORDER, b"", stderr, late=False) is None


class Starter:
    """Starts a shell command in place of the probe."""

    def __init__(self, code: str, fails: bool = False) -> None:
        self._code = code
        self._fails = fails
        self.environment: dict[str, str] = {}
        self.signals: list[int] = []
        self._process: asyncio.subprocess.Process | None = None

    async def spawn_probe(self, environment: dict[str, str], stdout: int, stderr: int) -> int:
        if self._fails:
            raise WorkerStartError("no fork server")
        self.environment = environment
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", self._code, stdout=stdout, stderr=stderr
        )
        return self._process.pid

    async def signal(self, pid: int, number: int) -> None:
        self.signals.append(number)
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


SETTINGS = ProbeSettings(NodeId("a"), 2, {"X": "1"}, lambda number: f"secret {number}", ("m:f",))


def probe(starter: Starter, timeout_s: float = 60.0) -> HealthChecked | None:
    order = dataclasses.replace(ORDER, timeout_s=timeout_s)
    before = set(os.listdir("/proc/self/fd"))
    found = asyncio.run(HealthProbe(starter, SETTINGS).probe(order))
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1, "descriptors are left open"
    return found


def test_a_probe_gets_its_order_and_its_answer_is_read() -> None:
    starter = Starter(f"print({line(kind='cpu').decode().strip()!r})")
    assert probe(starter) == HealthChecked(3, 1, "cpu")
    ordered = json_messages.decode(ProbeOrder, starter.environment[PROBE_VARIABLE])
    assert (ordered.node, ordered.slots, ordered.secret, ordered.probes) == ("a", 2, "secret 3", ("m:f",))
    assert starter.environment["X"] == "1"
    assert starter.signals == [9], "what it has started ends with it"


def test_a_probe_that_takes_too_long_is_killed() -> None:
    found = probe(Starter("import time; time.sleep(1000)"), timeout_s=0.5)
    assert found is not None and "did not end within 0.5 s" in found.error


def test_a_process_that_cannot_be_started_is_no_finding() -> None:
    assert probe(Starter("", fails=True)) is None


class Delayed(Starter):
    """A fork server that does not answer for now."""

    def __init__(self) -> None:
        super().__init__("")
        self.asked = asyncio.Event()

    async def spawn_probe(self, environment: dict[str, str], stdout: int, stderr: int) -> int:
        self.asked.set()
        await asyncio.Event().wait()
        return 0


def test_a_probe_that_is_stopped_while_its_process_starts_leaves_nothing_open() -> None:
    """As each is that has not ended when its node gets a world."""

    async def stopped() -> None:
        starter = Delayed()
        running = asyncio.ensure_future(HealthProbe(starter, SETTINGS).probe(ORDER))
        await starter.asked.wait()
        await end(running)

    before = set(os.listdir("/proc/self/fd"))
    asyncio.run(stopped())
    assert set(os.listdir("/proc/self/fd")) <= before


def test_without_descriptors_there_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the agent would wait for the result, and answer no order any more."""
    pipes, real = [1], os.pipe2

    def scarce(flags: int) -> tuple[int, int]:
        if not pipes:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        pipes.pop()
        return real(flags)

    monkeypatch.setattr(os, "pipe2", scarce)
    before = set(os.listdir("/proc/self/fd"))
    assert asyncio.run(HealthProbe(Starter(""), SETTINGS).probe(ORDER)) is None
    assert set(os.listdir("/proc/self/fd")) <= before
