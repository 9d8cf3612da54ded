"""In-memory connections of parameter servers: frames arrive in order, delayed, or are lost with the connection.

Replaces the sockets of ``ps.net.connection`` and, for the Master, asyncio's streams. The frames, the handshake and
everything above them are the shipped code.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from edl.testing.sim.network import End, Network, Stream
from edl.testing.sim.process import BareProcess
from edl.testing.sim.threads import SimThreads
from ps.errors import HungUp, TimedOut, Unreachable
from ps.net.connection import Listening, Wire

PACES = 0.1, 1.0, 1.0, 10.0
"""Factors on a connection's delays: messages sent over different connections may arrive out of order."""


class _Owner:
    """A process as the owner of an end. It never counts as paused: the kernel answers keep-alives for a stopped
    process."""

    paused = False

    def __init__(self, process: BareProcess[Any]) -> None:
        self.host, self.run = process.host, process.run
        self._process = process

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.alive


class OpenConnections:
    """The open connections of a process; they are closed when it ends."""

    def __init__(self) -> None:
        self._open: list[tuple[Stream, End]] = []

    def add(self, stream: Stream, end: End) -> None:
        """Add an open connection."""
        self._open = [(one, its) for one, its in self._open if its.open]
        self._open.append((stream, end))

    def streams(self) -> list[Stream]:
        """Streams of the connections that are open."""
        return [stream for stream, end in self._open if end.open]

    def close(self) -> None:
        """Close all connections, as the kernel does when a process ends."""
        for stream, end in self._open:
            stream.close(end)
        self._open.clear()


class SimWire:
    """``ps.net.connection.Wire`` in memory. Writes never block."""

    checked = True

    def __init__(self, threads: SimThreads, owner: _Owner) -> None:
        self._threads = threads
        self._data = bytearray()
        self._ended = self._shut = False
        self._waiting = threads.waiting()
        self.end = End(owner, self._hear, self._broke)
        self.stream: Stream | None = None

    def _hear(self, data: bytes) -> None:
        self._data += data
        self._waiting.wake_all()

    def _broke(self) -> None:
        self._ended = True
        self._waiting.wake_all()

    def read_into(self, view: memoryview, least: int, until_s: float) -> int:
        """Read at least ``least`` bytes into ``view``; returns the number. Raises ``HungUp`` or ``TimedOut``."""
        while len(self._data) < least:
            if self._shut or self._ended:
                raise HungUp("the peer closed the connection")
            left_s = until_s - self._threads.now_s()
            if left_s <= 0:
                raise TimedOut(f"no answer in time: nothing was received, {least} bytes missing")
            self._waiting.wait(left_s if left_s < 1e9 else None)
        count = min(len(view), len(self._data))
        view[:count] = self._data[:count]
        del self._data[:count]
        return count

    def write(self, parts: Sequence[memoryview], until_s: float, file: int = -1) -> None:
        """Send a frame. Raises ``Unreachable`` if the connection is broken."""
        if self._shut or self._ended or self.stream is None:
            raise Unreachable("the connection broke: Broken pipe")
        self.stream.send(self.end, b"".join(parts))

    def pending(self) -> bool:
        """Whether a read would return at once."""
        return bool(self._data) or self._ended

    def hung_up(self) -> bool:
        """Whether either side has closed the connection."""
        return self._ended or self._shut

    def shut(self) -> None:
        """Close the connection and wake its reader."""
        if not self._shut and not self._threads.dead:
            self._shut = True
            if self.stream is not None:
                self.stream.close(self.end)
            self._waiting.wake_all()

    def close(self) -> None:
        """The same as ``shut``: a simulated connection has no descriptor to release."""
        self.shut()


class SimListener:
    """``ps.net.connection.Listener`` of a simulated process."""

    closed = False

    def __init__(self, threads: SimThreads, owner: _Owner, opened: OpenConnections) -> None:
        self._threads, self._owner, self._opened = threads, owner, opened
        self._come = threads.queue()

    def take(self, network: Network, caller: End) -> Stream:
        """Accept a connection, as the kernel does even for a stopped process."""
        wire = SimWire(self._threads, self._owner)
        wire.stream = stream = Stream(network, caller, wire.end)
        stream.slowness = network.rng.choice(PACES)
        self._opened.add(stream, wire.end)
        self._owner.run(self._come.put, wire)
        return stream

    def accept(self) -> Wire:
        """Wait for the next connection. Raises ``OSError`` once closed."""
        wire = self._come.get()
        if wire is None:
            raise OSError("closed")
        found: Wire = wire
        return found

    def close(self) -> None:
        """Refuse further connections and end a waiting ``accept``."""
        self.closed = True
        self._come.put(None)


class SimSockets:
    """``ps.net.connection.Sockets`` of one simulated process."""

    def __init__(
        self, process: BareProcess[Any], threads: SimThreads, listening: dict[tuple[str, int], SimListener]
    ) -> None:
        """``listening``: all listeners of the world, by address."""
        self._process, self._threads, self._listening = process, threads, listening
        self._owner = _Owner(process)
        self.opened = OpenConnections()

    def connect(self, host: str, port: int, until_s: float) -> Wire:
        """Connect to a simulated listener. Raises ``Unreachable`` or ``TimedOut``."""
        threads, network = self._threads, self._process.deps.network
        self._process.asks()
        threads.sleep(network.delay_s())
        if not network.both(self._process.host, host):
            threads.sleep(until_s - threads.now_s())
            raise TimedOut("no answer")
        listener = self._listening.get((host, port))
        if listener is None:
            raise Unreachable("Connection refused")
        wire = SimWire(threads, self._owner)
        wire.stream = listener.take(network, wire.end)
        self.opened.add(wire.stream, wire.end)
        return wire

    def connect_local(self, path: str, until_s: float) -> Wire:
        """Raises ``Unreachable``: there are no unix sockets."""
        raise Unreachable(f"no unix socket {path}")

    def listen(self, host: str, port: int) -> Listening:
        """Listen on an address of this process."""
        listener = SimListener(self._threads, self._owner, self.opened)
        self._listening[host, port] = listener
        return Listening([listener], port)


class SimWriter:
    """``asyncio.StreamWriter`` of a simulated connection, and its transport."""

    def __init__(self, stream: Stream, end: End) -> None:
        self._stream, self._end = stream, end

    @property
    def transport(self) -> SimWriter:
        """This object, which also is the transport."""
        return self

    def write(self, data: bytes) -> None:
        """Send bytes as one message."""
        self._stream.send(self._end, data)

    def writelines(self, data: Iterable[bytes]) -> None:
        """Send these pieces as one message."""
        self.write(b"".join(data))

    def close(self) -> None:
        """Close the connection and tell its reader at this end. ``abort`` does the same."""
        self._stream.close(self._end)
        self._end.broke()

    abort = close


class SimStreams:
    """``asyncio.open_connection`` for one simulated process."""

    def __init__(self, process: BareProcess[Any], listening: dict[tuple[str, int], SimListener]) -> None:
        self._process, self._listening = process, listening
        self._owner = _Owner(process)
        self.opened = OpenConnections()

    async def connect(
        self, host: str, port: int, *, ssl: ssl.SSLContext | None
    ) -> tuple[asyncio.StreamReader, SimWriter]:
        """Connect to a simulated listener. Raises ``OSError``; never returns if there is no path."""
        network = self._process.deps.network
        self._process.asks()
        await asyncio.sleep(network.delay_s())
        if not network.both(self._process.host, host):
            await asyncio.Event().wait()  # the caller has a limit
        listener = self._listening.get((host, port))
        if listener is None:
            raise ConnectionRefusedError("Connection refused")
        reader = asyncio.StreamReader(loop=self._process.loop)
        hear: Callable[[Any], None] = reader.feed_data
        end = End(self._owner, hear, reader.feed_eof)
        stream = listener.take(network, end)
        self.opened.add(stream, end)
        return reader, SimWriter(stream, end)

    async def refuses(self, host: str, port: int, timeout_s: float = 1.0) -> bool:
        """Whether the host refuses connections to this port."""
        network = self._process.deps.network
        if not network.both(self._process.host, host):
            await asyncio.sleep(timeout_s)
            return False
        await asyncio.sleep(2 * network.delay_s())
        return (host, port) not in self._listening and network.both(self._process.host, host)
