"""The agent's end of the local socket to its workers, for scripts that use edl.

A datagram socket with an abstract address, so nothing is left in the file system. The kernel identifies the peer: every
worker leads a session, and a connection from that session belongs to that worker. A worker has one connection; a second
one, such as from a forked data loader, is refused.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from edl.agent.machine import events as ev
from edl.checkpoint.memory.buffer_table import BufferRefusal
from edl.checkpoint.memory.memory_checkpoints import BufferGrant
from edl.errors import EdlError, ProtocolError
from edl.tasks import BackgroundTasks
from edl.types import Round
from edl.wire import local, plain
from edl.wire.datagrams import receive
from edl.wire.memory_file import LARGEST_BYTES, read_memory, write_memory
from edl.wire.messages import ServiceFromWorker, ServiceToWorker
from edl.wire.parts import PartRange, decode_ranges

_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 256
ACCEPT_AGAIN_S = 1.0
"""Pause after a connection that could not be accepted. It stays in the queue, so without a pause the event loop would
do nothing but try, and log, for as long as descriptors are lacking."""
_STRANGER_RETRY_S = 0.01
_STRANGER_LIMIT = 500
"""Retries for an unknown peer: a worker may connect before the fork server has reported its pid."""


class WorkerCheckpoints(Protocol):
    """The worker server's interface to the checkpoint manager."""

    def want(
        self, slot: int, stream: str, size: int, saves: bool = False, waits: bool = False
    ) -> Coroutine[Any, Any, BufferGrant | BufferRefusal]:
        """Request a buffer for the next snapshot of a stream; ``saves`` and ``waits`` as in ``Want``."""
        ...

    def committed(self, slot: int, message: local.Committed) -> None:
        """Accept a complete snapshot, effective at once.

        Raises ``ProtocolError`` when the snapshot is not what the worker says.
        """
        ...

    async def piece(self, slot: int, asked: local.Fetch) -> tuple[int, int]:
        """A read-only descriptor (for the caller to close) and the size in bytes of a part of a commit.

        Raises ``CheckpointError``.
        """
        ...

    async def headers(self, asked: local.FetchHeaders) -> bytes:
        """The headers of all parts of a commit, see ``edl.wire.parts``. Raises ``CheckpointError``."""
        ...

    async def ranges(self, asked: local.FetchRanges, wanted: Sequence[PartRange]) -> tuple[int, int]:
        """A read-only descriptor (for the caller to close) and the size in bytes of these ranges, one after another.

        Raises ``CheckpointError``.
        """
        ...

    async def wrote_through(self, message: local.WroteThrough) -> None:
        """A worker without memory for its commit has written it to the checkpoint directory itself."""
        ...

    def restored(self, slot: int) -> None:
        """The worker has finished reading what ``piece`` returned."""
        ...

    def forget_worker(self, slot: int) -> None:
        """The worker in a slot is gone; the next one starts without buffers."""
        ...


Owner = Callable[[int], "tuple[Round, int] | None"]
"""Maps a session id to the round in which the worker was started, and its slot; None for an unknown session."""


@dataclass(eq=False, slots=True)
class _WorkerConnection:
    socket: socket.socket
    session: int
    born: Round = Round(0)
    slot: int = -1
    tries: int = 0
    outgoing: collections.deque[tuple[bytes, list[int]]] = field(default_factory=collections.deque)


class WorkerServer:
    """Serves the workers of one node. ``heard`` gets the events for the agent's machine."""

    def __init__(
        self,
        owner: Owner,
        checkpoints: WorkerCheckpoints,
        heard: Callable[[ev.Event], None],
        relay: Callable[[ServiceFromWorker], None],
        log: Callable[[str], None],
    ) -> None:
        """``relay`` takes messages from workers to the Master's services."""
        self._relay = relay
        self._owner = owner
        self._checkpoints = checkpoints
        self._heard = heard
        self._log = log
        self._lines: dict[int, _WorkerConnection] = {}
        self._strangers: set[_WorkerConnection] = set()
        self._background = BackgroundTasks()
        self._refused = ""
        """Why the last connection could not be accepted; empty: it was."""
        self._accept_again: asyncio.TimerHandle | None = None
        self.progress: dict[int, int] = {}
        """Newest commit that each slot has announced, for the detection of hangs. Some workers announce none."""
        self.newest: tuple[int, float] | None = None
        """The highest of these commits and its time on the event loop's clock; None before the first one."""
        self.waits: dict[int, tuple[float, float]] = {}
        self.times: dict[int, local.StepTimes] = {}
        """The last windows; see ``WorkerLink``."""
        self.address = f"edl-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(_BACKLOG)

    def open(self) -> None:
        """Accept connections of workers from now on. Requires a running event loop."""
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Close all connections. Workers end when that happens."""
        asyncio.get_running_loop().remove_reader(self._listener)
        if self._accept_again is not None:
            self._accept_again.cancel()
        self._listener.close()
        for line in [*self._lines.values(), *self._strangers]:
            self._hang_up(line)
        self._background.drop()

    def tell(self, message: local.ToWorker, slots: tuple[int, ...]) -> None:
        """Send a message to workers; those that are not connected miss it."""
        for slot in slots:
            line = self._lines.get(slot)
            if line is not None:
                self._send(line, message)

    def pass_on(self, message: ServiceToWorker) -> None:
        """Pass a service's message on to a worker."""
        line = self._lines.get(message.slot)
        if line is None:
            return
        if len(message.body) <= LARGEST_BYTES // 4:
            self._send(line, local.ServiceMessage(message.service, message.body))
        else:
            self._send(
                line, local.ServiceMessage(message.service, ""), write_memory("edl-service", message.body.encode())
            )

    def reattached(self, token: int) -> None:
        """Tell all workers that there is a Master again, so that they repeat unanswered messages to its services."""
        for line in list(self._lines.values()):
            self._send(line, local.Reattached(token))

    def give_place(self, slot: int, seat: local.Seat) -> None:
        """Give a waiting worker its place."""
        line = self._lines.get(slot)
        if line is None:
            return
        try:
            place = write_memory("edl-seat", plain.dumps(seat))
        except OSError as error:  # no descriptor, or no memory: the others would wait for this worker
            self._log(f"cannot give the worker in slot {slot} its place ({error.strerror}): it is restarted")
            self._hang_up(line)
            return
        self._send(line, local.Place(seat.round), place)

    # --- connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._put_off(error)
                return
            self._refused = ""
            connection.setblocking(False)
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, uid, _ = _CREDENTIALS.unpack(raw)
            try:
                session = os.getsid(pid)
            except ProcessLookupError:
                connection.close()
                continue
            if uid != os.getuid():
                connection.close()
                continue
            line = _WorkerConnection(connection, session)
            self._strangers.add(line)
            self._introduce(line)

    def _put_off(self, error: OSError) -> None:
        """Stop accepting connections for a while."""
        why = error.strerror or str(error)
        if why != self._refused:
            self._log(f"cannot accept a worker's connection: {why}. Trying again every {ACCEPT_AGAIN_S:g} s")
        self._refused = why
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        self._accept_again = loop.call_later(ACCEPT_AGAIN_S, self.open)

    def _introduce(self, line: _WorkerConnection) -> None:
        """Start reading from a connection once its worker is known."""
        if line not in self._strangers:
            return
        place = self._owner(line.session)
        line.tries += 1
        if place is None and line.tries < _STRANGER_LIMIT:
            asyncio.get_running_loop().call_later(_STRANGER_RETRY_S, self._introduce, line)
            return
        self._strangers.discard(line)
        if place is None or place[1] in self._lines:
            line.socket.close()
            return
        line.born, line.slot = place
        self._lines[line.slot] = line
        self.progress.pop(line.slot, None)
        asyncio.get_running_loop().add_reader(line.socket, self._readable, line)

    def _hang_up(self, line: _WorkerConnection) -> None:
        self._strangers.discard(line)
        if self._lines.get(line.slot) is line:
            del self._lines[line.slot]
            self._checkpoints.forget_worker(line.slot)
        loop = asyncio.get_running_loop()
        loop.remove_reader(line.socket)
        loop.remove_writer(line.socket)
        line.socket.close()
        for _, descriptors in line.outgoing:
            _close(descriptors)
        line.outgoing.clear()

    # --- messages from workers ---------------------------------------------------------------------------------------

    def _readable(self, line: _WorkerConnection) -> None:
        while line.socket.fileno() >= 0:
            try:
                data, descriptors = receive(line.socket, 1)
            except BlockingIOError:
                return
            if not data:
                self._hang_up(line)
                return
            try:
                message = local.decode_to_agent(data)
                if isinstance(message, local.Call):
                    body = read_memory(descriptors[0]).decode() if descriptors else message.body
                    self._relay(ServiceFromWorker(message.service, line.slot, Round(message.round), body))
                elif isinstance(message, local.FetchRanges):
                    self._fetch_ranges(line, message, descriptors)
                else:
                    self._take(line, message)
            except ProtocolError as error:
                self._log(f"ignored an invalid message from the worker in slot {line.slot}: {error}")
            finally:
                _close(descriptors)

    def _take(self, line: _WorkerConnection, message: local.ToAgent) -> None:
        born, slot = line.born, line.slot
        match message:
            case local.Enter(rejoins=rejoins, why_not=why_not):
                self._heard(ev.WorkerEntered(born, slot, rejoins, why_not))
            case local.Parked(round=left):
                self._heard(ev.WorkerParked(born, slot, Round(left)))
            case local.TrainingStarted(joined, connect_s, restore_s):
                self._checkpoints.restored(slot)
                self._heard(ev.WorkerUnderway(born, slot, Round(joined), connect_s, restore_s))
            case local.Here(hold=hold, commit=commit):
                self._heard(ev.WorkerHere(born, slot, hold, commit))
            case local.GiveUp(exit_code=code):
                self._heard(ev.WorkerGaveUp(born, slot, code))
            case local.Want(stream=stream, size=size, saves=saves, waits=waits):
                buffer = self._checkpoints.want(slot, stream, size, saves, waits)
                self._background.begin(self._grant(line, stream, buffer))
            case local.Committed():
                self.progress[slot] = message.commit
                self.waits[slot] = message.committing_s, message.waiting_s
                if self.newest is None or message.commit > self.newest[0]:
                    self.newest = (message.commit, asyncio.get_running_loop().time())
                self._committed(line, message)
            case local.StepTimes():
                self.times[slot] = message
            case local.Fetch(stream=stream, round=number):
                self._background.begin(self._fetch(line, stream, self._checkpoints.piece(slot, message), number))
            case local.FetchHeaders(stream=stream):
                self._background.begin(self._fetch(line, stream, self._headers(message)))
            case local.WroteThrough(commit=commit):
                self.progress[slot] = commit
                self._background.begin(self._checkpoints.wrote_through(message))

    def _committed(self, line: _WorkerConnection, message: local.Committed) -> None:
        try:
            self._checkpoints.committed(line.slot, message)
        except ProtocolError as error:
            self._log(f"worker in slot {line.slot}: {error}")
            self._send(line, local.NoBuffer(message.stream, str(error)[: LARGEST_BYTES // 4]))
            return
        if local.offered(message):
            buffer = self._checkpoints.want(line.slot, message.stream, message.size)
            self._background.begin(self._grant(line, message.stream, buffer))

    async def _grant(
        self, line: _WorkerConnection, stream: str, granting: Coroutine[Any, Any, BufferGrant | BufferRefusal]
    ) -> None:
        with self._answered(line, lambda why: local.NoBuffer(stream, why)):
            match await granting:
                case BufferGrant(buffer, size, descriptor):
                    self._send(line, local.Buffer(stream, buffer, size), *(() if descriptor is None else (descriptor,)))
                case BufferRefusal(why):
                    self._send(line, local.NoBuffer(stream, why[: LARGEST_BYTES // 4]))

    async def _fetch(
        self, line: _WorkerConnection, stream: str, fetching: Coroutine[Any, Any, tuple[int, int]], number: int = 0
    ) -> None:
        with self._answered(line, lambda why: local.NoPiece(stream, why, number)):
            descriptor, size = await fetching
            self._send(line, local.Piece(stream, size, number), descriptor)

    def _fetch_ranges(self, line: _WorkerConnection, message: local.FetchRanges, descriptors: list[int]) -> None:
        with self._answered(line, lambda why: local.NoPiece(message.stream, why)):
            if not descriptors:
                raise ProtocolError(
                    "the launcher received a request for ranges without the list of them; has it too few descriptors "
                    "(ulimit -n)?"
                )
            wanted = decode_ranges(read_memory(descriptors[0]))
            self._background.begin(self._fetch(line, message.stream, self._checkpoints.ranges(message, wanted)))

    @contextlib.contextmanager
    def _answered(self, line: _WorkerConnection, refusal: Callable[[str], local.ToWorker]) -> Iterator[None]:
        """Answer with a refusal whatever goes wrong, since the worker waits for an answer without a limit. Raises what
        is a bug."""
        try:
            yield
        except Exception as error:
            self._send(line, refusal((str(error) or type(error).__name__)[: LARGEST_BYTES // 4]))
            if not isinstance(error, (EdlError, MemoryError, OSError)):
                raise

    async def _headers(self, message: local.FetchHeaders) -> tuple[int, int]:
        data = await self._checkpoints.headers(message)
        return write_memory("edl-headers", data), len(data)

    # --- messages to workers -----------------------------------------------------------------------------------------

    def _send(self, line: _WorkerConnection, message: local.ToWorker, *descriptors: int) -> None:
        """Send, or queue until the worker reads again. Closes the descriptors."""
        if line.socket.fileno() < 0:
            _close(list(descriptors))
            return
        line.outgoing.append((local.encode_to_worker(message), list(descriptors)))
        if len(line.outgoing) == 1:
            self._flush(line)

    def _flush(self, line: _WorkerConnection) -> None:
        while line.outgoing:
            data, descriptors = line.outgoing[0]
            try:
                socket.send_fds(line.socket, [data], descriptors)
            except (BlockingIOError, InterruptedError):
                asyncio.get_running_loop().add_writer(line.socket, self._flush, line)
                return
            except OSError:
                self._hang_up(line)
                return
            _close(descriptors)
            line.outgoing.popleft()
        asyncio.get_running_loop().remove_writer(line.socket)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
