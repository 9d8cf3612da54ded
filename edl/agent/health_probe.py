"""Runs the probe of a health check as a process of this node, and reads its answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from edl.errors import ProtocolError, WorkerStartError
from edl.types import NodeId
from edl.wire import json_messages
from edl.wire.health import CheckHealth, HealthChecked
from edl.wire.health_records import PROBE_VARIABLE, ProbeOrder

KILL_S = 2.0
"""Seconds that a killed probe may take to close its output."""
MOST_BYTES = 1 << 20
"""Most bytes of a probe's output that are kept."""


class ProbeStarter(Protocol):
    """The process that starts probes: ``edl.adapters.processes.ForkServerProcesses``."""

    async def spawn_probe(self, environment: dict[str, str], stdout: int, stderr: int) -> int:
        """Start a probe; returns its pid. Raises ``WorkerStartError``."""
        ...

    async def signal(self, pid: int, number: int) -> None:
        """Signal the probe's process group. A probe that has already ended is not an error."""
        ...


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """What the probes of one node have in common."""

    node: NodeId
    slots: int
    """Number of slots, spare ones included."""
    environment: Mapping[str, str]
    """That of the workers."""
    secret: Callable[[int], str]
    """The secret by which the probes of a check recognise each other, by the check's number."""
    probes: tuple[str, ...] = ()
    """The user's own probes."""


class HealthProbe:
    """Probes this node; one probe at a time."""

    def __init__(self, processes: ProbeStarter, settings: ProbeSettings) -> None:
        self._processes = processes
        self._settings = settings

    async def probe(self, order: CheckHealth) -> HealthChecked | None:
        """Carry out an order; returns what was found, or None if no process could be started, or if it was killed. A
        probe that takes too long or fails is a finding. If the call is cancelled, the process is killed."""
        settings = self._settings
        ordered = ProbeOrder(order, settings.node, settings.slots, settings.secret(order.number), settings.probes)
        environment = {**settings.environment, PROBE_VARIABLE: json_messages.encode(ordered).decode()}
        with contextlib.ExitStack() as opened:
            try:
                stdout, stderr = opened.enter_context(_Pipe()), opened.enter_context(_Pipe())
                pid = await self._processes.spawn_probe(environment, stdout.write_fd, stderr.write_fd)
            except (OSError, WorkerStartError):
                return None
            late = await self._read(pid, stdout, stderr, order.timeout_s)
        return found_in(order, bytes(stdout.data), bytes(stderr.data), late=late)

    async def _read(self, pid: int, stdout: _Pipe, stderr: _Pipe, timeout_s: float) -> bool:
        """Read what a probe writes until it ends, or is killed; returns whether it was killed because it was late."""
        reading = asyncio.gather(stdout.read(), stderr.read())
        try:
            await asyncio.wait_for(asyncio.shield(reading), timeout_s)
        except asyncio.TimeoutError:
            return True
        else:
            return False
        finally:
            await self._processes.signal(pid, signal.SIGKILL)  # also what it has started
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reading, KILL_S)


def found_in(order: CheckHealth, stdout: bytes, stderr: bytes, *, late: bool) -> HealthChecked | None:
    """What a probe has found, according to its output: the last complete line of stdout. ``late``: it was killed
    because it did not end in time. None: it ended without a word, as one that was killed with its fork server."""
    for line in reversed(stdout.splitlines()):
        try:
            return json_messages.decode(HealthChecked, line)
        except ProtocolError:
            continue
    nothing = HealthChecked(order.number, order.stage)
    if late:
        limit = f"{order.timeout_s:g}"
        return replace(nothing, error=f"its own part did not end within {limit} s (--health-check-timeout={limit})")
    said = [line for line in stderr.decode(errors="replace").splitlines() if _FATAL.match(line)]
    return replace(nothing, error=f"the probe ended without a result: {said[0].strip()}") if said else None


_FATAL = re.compile(r"Fatal Python error|[A-Za-z_][\w.]*(?:Error|Exception|Exit)\b")
"""Begins the line in which a process says why it ends."""


class _Pipe:
    """A pipe that collects what a process writes."""

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        self.data = bytearray()
        self._transport: asyncio.ReadTransport | None = None

    def read(self) -> Coroutine[Any, Any, None]:
        """Close the writing end here, and read until all others are closed."""
        os.close(self.write_fd)
        self.write_fd = -1
        return self._read()

    async def _read(self) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        file = os.fdopen(self._read_fd, "rb", buffering=0)
        self._read_fd = -1
        self._transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
        while piece := await reader.read(1 << 16):
            if len(self.data) < MOST_BYTES:
                self.data += piece

    def __enter__(self) -> _Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        """Close both ends."""
        if self._transport is not None:
            self._transport.close()
        for descriptor in (self._read_fd, self.write_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._read_fd = self.write_fd = -1
