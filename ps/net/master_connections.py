"""The Master's connections to pservers: one for each leased key below ``ps/servers/``.

A message is a CONTROL frame without an answer; its body is a text of ``ps/protocol/messages.py``. Both sides prove that
they know the pserver's secret, and the pserver learns the Master's fencing token. A pserver answers PING on the thread
of this connection; if it is silent for the length of a lease, it is frozen or unreachable, and the connection counts as
down. A refused connection proves that the process is dead, as with agents. Reconnects continue as long as the key
exists.
"""

from __future__ import annotations

import asyncio
import enum
import json
import ssl
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from edl.adapters.transport import refuses
from edl.errors import ProtocolError
from edl.ports import HelperListener
from edl.types import FencingToken
from edl.wire.address import address
from ps.errors import Denied
from ps.protocol.frames import HEADER_BYTES, UNASKED, Frame, FrameOp, hash_of, pack, unpack, unpack_head
from ps.protocol.handshake import ANSWER_BYTES, HELLO_NUMBER, MASTER, CallerHello, Calling

PREFIX = "ps/servers/"
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
"""First and longest pause between two attempts, in seconds; doubled each time."""
PINGS = 4
"""Pings within the time after which a silent pserver counts as frozen."""
MOST_WORD = 64 << 20
_PING_NUMBER = 2


class RefusalCheck(Protocol):
    """Checks whether a host refuses connections to a port."""

    def __call__(self, host: str, port: int, timeout_s: float = 1.0) -> Awaitable[bool]:
        """True if the connection is refused. A timeout counts as False."""
        ...


class ConnectionTransport(Protocol):
    """``asyncio.WriteTransport``, as far as it is used."""

    def abort(self) -> None:
        """Close the connection at once."""
        ...


class ConnectionWriter(Protocol):
    """``asyncio.StreamWriter``, as far as it is used."""

    @property
    def transport(self) -> ConnectionTransport:
        """The transport of the connection, which can be aborted."""
        ...

    def write(self, data: bytes) -> None:
        """Queue these bytes for sending; does not block."""
        ...

    def writelines(self, data: Iterable[bytes]) -> None:
        """Send all of these."""
        ...

    def close(self) -> None:
        """Close the connection once everything is sent."""
        ...


class Connect(Protocol):
    """Opens a connection, as ``asyncio.open_connection`` does. Raises ``OSError``."""

    def __call__(
        self, host: str, port: int, *, ssl: ssl.SSLContext | None
    ) -> Awaitable[tuple[asyncio.StreamReader, ConnectionWriter]]:
        """Connect to a pserver."""
        ...


@dataclass(frozen=True, slots=True)
class MasterConnectionsDeps:
    """Dependencies of the connections."""

    lease_ttl_s: float
    log: Callable[[str], None]
    name: str = ""
    """Name of the Master's node, for the pserver's log."""
    tls: ssl.SSLContext | None = None
    refuses: RefusalCheck = refuses
    connect: Connect = asyncio.open_connection


@dataclass(frozen=True, slots=True)
class _Helper:
    """A pserver's address and secret, from its key."""

    host: str
    port: int
    secret: str = field(repr=False)


class _Reported(enum.Enum):
    """The last state reported to the listener."""

    NOTHING = "nothing"
    UP = "up"
    DOWN = "down"
    REFUSED = "refused"


class PserverConnections:
    """Implements ``edl.ports.HelperConnections``: the Master's connections to all pservers."""

    def __init__(self, deps: MasterConnectionsDeps, token: FencingToken, listener: HelperListener) -> None:
        self._deps = deps
        self._hello = CallerHello(MASTER, name=deps.name, token=int(token))
        self._listener = listener
        self._connections: dict[str, _PserverConnection] = {}

    def put(self, name: str, value: bytes) -> None:
        """A pserver's key was written: connect to it."""
        if not name.startswith(PREFIX):
            return
        try:
            helper = _helper(value)
        except ProtocolError as error:
            self._deps.log(f"cannot connect to {name}: {error}")
            return
        known = self._connections.get(name)
        if known is not None and known.helper == helper:
            return
        self.gone(name)
        self._connections[name] = _PserverConnection(self._deps, self._hello, self._listener, name, helper)

    def gone(self, name: str) -> None:
        """A pserver's key was deleted: disconnect."""
        connection = self._connections.pop(name, None)
        if connection is not None:
            connection.close()

    def send(self, name: str, body: str) -> None:
        """Send a message if the connection is up; otherwise it is dropped."""
        connection = self._connections.get(name)
        if connection is not None:
            connection.send(body)

    def close(self) -> None:
        """Close the connections to all pservers."""
        for name in list(self._connections):
            self.gone(name)


def _helper(value: bytes) -> _Helper:
    try:
        plain = json.loads(value)
        host, port, secret = plain["host"], plain["port"], plain["secret"]
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"its key has no valid address ({error!r})") from None
    if not (isinstance(host, str) and isinstance(secret, str) and type(port) is int and 0 < port < 1 << 16):
        raise ProtocolError("its key has no valid address")
    return _Helper(host, port, secret)


class _PserverConnection:
    """The connection to one pserver, reopened as often as necessary."""

    def __init__(
        self, deps: MasterConnectionsDeps, hello: CallerHello, listener: HelperListener, name: str, helper: _Helper
    ) -> None:
        self.helper = helper
        self._deps, self._hello, self._listener, self._name = deps, hello, listener, name
        self._reported = _Reported.NOTHING
        self._said = ""
        self._writer: ConnectionWriter | None = None
        """Set while the connection is up."""
        self._unanswered = 0
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._task = asyncio.get_running_loop().create_task(self._keep())

    def send(self, body: str) -> None:
        """Send a message; dropped if the connection is down. The pserver sends HELLO on each new one."""
        if self._writer is not None:
            message = body.encode()
            self._writer.writelines((pack(FrameOp.CONTROL, UNASKED, b"", [memoryview(message)], check=True), message))

    def close(self) -> None:
        """Disconnect and stop reconnecting."""
        self._closed = True
        self._task.cancel()

    # --- periodic messages -----------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            stood = False
            try:
                reader, writer = await asyncio.wait_for(self._open(), self._deps.lease_ttl_s)
                if self._closed:  # before Python 3.12, wait_for loses a cancellation that comes with the result
                    writer.transport.abort()
                    return
                stood = True
                await self._talk(reader, writer)
            except (OSError, EOFError, asyncio.TimeoutError, ProtocolError, Denied) as error:
                await self._down(error)
            pause_s = FIRST_PAUSE_S if stood else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _down(self, error: Exception) -> None:
        """Report once that the connection is down; report a refusal in addition, since it proves more."""
        helper = self.helper
        refused = await self._deps.refuses(helper.host, helper.port, min(1.0, self._deps.lease_ttl_s))
        if isinstance(error, ProtocolError | Denied) and str(error) != self._said:
            self._said = str(error)
            self._deps.log(f"connection to {self._name} ({address(helper.host, helper.port)}): {error}")
        reported = _Reported.REFUSED if refused else _Reported.DOWN
        if reported is not self._reported and (refused or self._reported is not _Reported.REFUSED):
            self._reported = reported
            self._listener.down(self._name, refused)

    # --- one connection --------------------------------------------------------------------------------------------

    async def _open(self) -> tuple[asyncio.StreamReader, ConnectionWriter]:
        """Open an authenticated connection."""
        helper = self.helper
        reader, writer = await self._deps.connect(helper.host, helper.port, ssl=self._deps.tls)
        try:
            calling = Calling(helper.secret)
            writer.write(calling.opening)
            try:
                proof = calling.answer(await reader.readexactly(ANSWER_BYTES))
            except ProtocolError as error:
                raise Denied("token", f"{error}; another process may listen on its port") from None
            writer.writelines((proof, pack(FrameOp.HELLO, HELLO_NUMBER, self._hello.pack(), check=True)))
            answer = await _read(reader)
            if answer.op is not FrameOp.OK:
                content = unpack_head(answer.head)
                raise Denied(str(content.get("kind", "")), f"refused: {content.get('text', '')}")
        except BaseException:
            writer.close()
            raise
        return reader, writer

    async def _talk(self, reader: asyncio.StreamReader, writer: ConnectionWriter) -> None:
        """Receive messages until the connection breaks; raises the reason."""
        self._writer, self._reported, self._unanswered, self._said = writer, _Reported.UP, 0, ""
        self._listener.up(self._name)
        self._ping(writer)
        try:
            while True:
                frame = await _read(reader)
                self._unanswered = 0
                if frame.op is FrameOp.CONTROL:
                    try:
                        message = str(frame.body, "utf-8")
                    except UnicodeDecodeError as error:
                        raise ProtocolError(f"not a text message: {error}") from None
                    self._listener.heard(self._name, message)
        finally:
            self._writer = None
            if self._timer is not None:
                self._timer.cancel()
            writer.transport.abort()

    def _ping(self, writer: ConnectionWriter) -> None:
        """Ping now and repeatedly within a lease. Missing answers are counted, not timed: a Master that was frozen
        itself first reads what has arrived meanwhile."""
        if self._unanswered == PINGS:
            writer.transport.abort()
            return
        self._unanswered += 1
        writer.write(pack(FrameOp.PING, _PING_NUMBER, check=True))
        every_s = self._deps.lease_ttl_s / PINGS
        self._timer = asyncio.get_running_loop().call_later(every_s, self._ping, writer)


async def _read(reader: asyncio.StreamReader) -> Frame:
    """Read one frame. Raises ``EOFError``, ``OSError``, ``ProtocolError``."""
    header = unpack(await reader.readexactly(HEADER_BYTES))
    if header.body_bytes > MOST_WORD:
        raise ProtocolError(f"a message of {header.body_bytes} bytes is too long")
    head = await reader.readexactly(header.head_bytes)
    header.accept_head(head)
    body = await reader.readexactly(header.body_bytes)
    if body:
        header.accept_body(hash_of(body))
    return Frame(header.op, header.request, head, memoryview(body), header.wait_s)
