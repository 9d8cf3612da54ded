"""A worker's connection to its agent: a side thread reads, the training thread sends requests and waits."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from edl.errors import CheckpointError, StateError
from edl.wire import json_messages, local
from edl.wire.datagrams import receive
from edl.wire.local import Seat
from edl.wire.memory_file import LARGEST_BYTES, read_memory, write_memory
from edl.wire.parts import PartRange, encode_ranges
from edl.wire.purpose import Purpose
from edl.wire.records import Settings
from edl.worker.boundary import BoundaryAction, RoundOver, StepBoundaries
from edl.worker.framework import Accelerator, Communicator
from edl.worker.interruption import interrupt
from edl.worker.mapped_memory import MappedMemory
from edl.worker.stream_buffers import MOST_BUFFERS, StreamBuffers

_LONGEST_WAIT_S = 1.0
"""A waiting thread checks at least this often (seconds), even if it is not woken."""
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_MOST_DESCRIPTORS = 4
_TOO_FEW = "it came without its memory; has this process too few descriptors (ulimit -n)?"
_Answer = TypeVar("_Answer")


def _end_process() -> None:
    sys.stderr.write("edl: the launcher is gone, so this worker exits\n")
    sys.stderr.flush()
    os._exit(1)


def _end_without_place() -> None:
    sys.stderr.write("edl: this worker cannot take its place in the next world, so it exits\n")
    sys.stderr.flush()
    os._exit(1)


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _forked() -> None:
    for link in _links:
        link.let_go()


os.register_at_fork(after_in_child=_forked)


class Link:
    """A worker's connection to its agent (``edl.agent.worker_server``)."""

    def __init__(
        self,
        channel: socket.socket,
        gone: Callable[[], None] = _end_process,
        misplaced: Callable[[], None] = _end_without_place,
    ) -> None:
        """Both are called on the side thread: ``gone`` when the agent has closed the connection, ``misplaced`` when a
        place could not be read, for which everybody would wait in vain."""
        self._channel = channel
        self._gone = gone
        self._misplaced = misplaced
        self.accelerator: Accelerator | None = None
        """Page-locks the buffers that are mapped from now on."""
        self._unprepared: list[MappedMemory] | None = None
        """Buffers that were mapped while nothing may disturb this worker; None if it may."""
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._boundary = StepBoundaries()
        self._place: Seat | None = None
        self._round = 0
        self._broken = 0
        self._why = ""
        self._stop: str | None = None
        self._group: tuple[int, Communicator] | None = None
        self._streams = {name: StreamBuffers({}) for name in (local.STATE, local.OWN)}
        self._pieces: dict[str, MappedMemory | str] = {}
        self._listeners: dict[str, Callable[[str | None], None]] = {}
        self._follower: Callable[[Seat], None] | None = None
        self._interrupt: Callable[[Communicator], None] = interrupt
        self._thread = threading.Thread(target=self._read, name="edl-link", daemon=True)
        _links.add(self)

    @classmethod
    def connect(cls, address: str, gone: Callable[[], None] = _end_process) -> Link:
        """Connect to the agent at an abstract address and start the side thread. Raises ``OSError``."""
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            channel.connect("\0" + address)
        except OSError:
            channel.close()
            raise
        link = cls(channel, gone)
        link.start()
        return link

    def start(self) -> None:
        """Start the side thread."""
        # Signals are for the training thread, whose waits they must interrupt.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - set(_FAULTS))
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """Close the connection without ending the process."""
        self._gone = lambda: None
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._channel.close()
        with self._changed:
            for stream in self._streams.values():
                for memory in stream.maps.values():
                    memory.close()
                stream.maps.clear()
            self._drop_pieces()

    def let_go(self) -> None:
        """Call in a forked child: if a copy of the connection stayed open there, the agent would not see it end."""
        self._changed = threading.Condition()
        self._channel.close()

    def send(self, message: local.ToAgent) -> None:
        """Send a message to the agent."""
        self._send(local.encode_to_agent(message))

    def _send(self, datagram: bytes, *descriptors: int) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                "a forked process can neither commit nor join a world: do both in the worker's own process"
            )
        try:
            socket.send_fds(self._channel, [datagram], descriptors)
        except OSError:
            # The side thread sees the end as well; the first of the two ends the process.
            self._gone()

    # --- places ------------------------------------------------------------------------------------------------------

    def wait_for_place(self) -> Seat:
        """Wait for the next place in a world. Raises ``SystemExit(0)`` when the agent says to stop instead."""

        def placed() -> Seat | None:
            if self._stop is not None:
                raise SystemExit(0)
            place, self._place = self._place, None
            return place

        return self._wait(placed)

    @property
    def summoned(self) -> bool:
        """Whether a place, or the order to stop, has come that nobody has asked for yet."""
        with self._changed:
            return self._place is not None or self._stop is not None

    def follow(self, heard: Callable[[Seat], None]) -> None:
        """Call ``heard``, on the side thread, with each further place; at once with one that is waiting. A place may be
        reported twice. A later call replaces the callback."""
        with self._changed:
            self._follower = heard
            place, self._place = self._place, None
        if place is not None:
            heard(place)

    def broken(self, number: int) -> bool:
        """Whether the round is over, or this worker has been ordered to stop."""
        with self._changed:
            return self._broken >= number

    def wait_until_broken(self, number: int, longest_s: float) -> bool:
        """Wait until the round is over; False after ``longest_s``."""
        return self._wait(lambda: self._broken >= number or self._stop is not None, longest_s) is True

    @property
    def why_over(self) -> str:
        """Why the last round was interrupted."""
        return self._why

    @property
    def leaving(self) -> str:
        """Why this worker is to park or stop, once that is settled; else empty."""
        with self._changed:
            return self._boundary.leaving

    @property
    def left(self) -> bool:
        """Whether this worker was ordered at a boundary to park."""
        with self._changed:
            return self._boundary.left

    @property
    def held(self) -> bool:
        """Whether a boundary is being agreed on; see ``StepBoundaries.held``."""
        with self._changed:
            return self._boundary.held

    @property
    def missed(self) -> int:
        """Boundaries that this worker has missed; see ``StepBoundaries.missed``."""
        with self._changed:
            return self._boundary.missed

    def register(self, number: int, group: Communicator) -> None:
        """Interrupt this group when the round is interrupted, at once if it already is."""
        with self._changed:
            self._group = (number, group)
            broken = self._broken >= number
        if broken:
            self._interrupt(group)

    # --- boundaries --------------------------------------------------------------------------------------------------

    def arrive(self, commit: int) -> BoundaryAction:
        """Wait at a boundary until it may be passed. Raises ``RoundOver``."""

        def turn() -> BoundaryAction | None:
            answer = self._boundary.arrive(commit)
            return None if answer is BoundaryAction.WAIT else answer

        answer = self._wait(turn)
        if answer is BoundaryAction.OVER:
            raise RoundOver(self._why)
        return answer

    @property
    def settings(self) -> Settings:
        """Settings of the step after the last boundary passed; see ``StepBoundaries.settings``."""
        with self._changed:
            return self._boundary.settings

    # --- state -------------------------------------------------------------------------------------------------------

    def buffer(self, stream: str, size: int) -> tuple[int, memoryview]:
        """Number and memory of the buffer for a stream's next snapshot. Raises ``RoundOver``, and ``CheckpointError``
        with the reason when there is no memory for it."""
        mine = self._streams[stream]
        mine.needed = size

        def ready() -> tuple[int, memoryview] | bool | None:
            if not mine.due:
                if mine.ready is not None and mine.ready[1] >= size:
                    return mine.ready[0], mine.maps[mine.ready[0]].view
                if mine.refused and time.monotonic() < mine.ask_again_s:
                    return True
            if self._broken >= self._round:
                raise RoundOver(self._why)
            if not mine.due:
                self._want(stream, size)
            return None

        found = self._wait(ready)
        if not isinstance(found, tuple):
            raise CheckpointError(mine.refused)
        mine.maps[found[0]].wait()
        return found

    def prepare(self, stream: str, size: int, saves: bool = False) -> None:
        """Request a buffer for a snapshot of about this size, so that the next commit need not wait for it. ``saves``:
        see ``Want``."""
        with self._changed:
            mine = self._streams[stream]
            if not mine.due and (mine.ready is None or mine.ready[1] < size):
                mine.needed, mine.ahead = size, True
                self._want(stream, size, saves)

    def prepare_to_join(self, stream: str, size: int) -> None:
        """Have the agent make the memory for the first commits and for the one that this worker will restore. Returns
        when it is there, when there is none, or when this worker is called."""
        with self._changed:
            mine = self._streams[stream]
            mine.needed, mine.ahead = size, True
            self._want(stream, size, waits=True)
        self._wait(lambda: not mine.due or self._place is not None or self._stop is not None)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Prepare the pages of new buffers after the block: a restore, for which others wait, would take longer
        meanwhile."""
        with self._changed:
            self._unprepared = []
        try:
            yield
        finally:
            with self._changed:
                mapped, self._unprepared = self._unprepared, None
                for memory in mapped:
                    memory.prepare(self.accelerator)

    def announce(self, number: int, messages: Sequence[local.Committed | local.WroteThrough]) -> None:
        """Announce what was kept of one commit in this round: all of it or nothing. The copies must be complete.

        Raises ``RoundOver`` when the round was interrupted while they were made, or a collective has failed, since the
        copies may then contain the garbage of an aborted collective. Check and messages are atomic.
        """
        with self._changed:
            if why := self._spoilt(number):
                raise RoundOver(why)
            for message in messages:
                if isinstance(message, local.Committed):
                    stream = self._streams[message.stream]
                    stream.ready = None
                    stream.due += local.offered(message)
                self.send(message)

    def spoilt(self, number: int) -> str:
        """Why nothing that this worker holds may be kept in this round; empty if it may."""
        with self._changed:
            return self._spoilt(number)

    def _spoilt(self, number: int) -> str:
        if self._broken >= number:
            return self._why or f"round {number} is over"
        group = self._group
        return group[1].failure() if group is not None and group[0] == number else ""

    def _want(self, stream: str, size: int, saves: bool = False, waits: bool = False) -> None:
        self._streams[stream].ready = None
        self._streams[stream].due += 1
        self.send(local.Want(stream, size, saves, waits))

    def piece(self, stream: str, fits: Callable[[memoryview], _Answer | None]) -> tuple[MappedMemory, _Answer] | str:
        """The requested piece of state, and what ``fits`` returns for it; or the reason why there is none.

        ``fits`` returns None for a piece that answers an earlier request. The caller closes the memory. Raises
        ``RoundOver``.
        """
        while True:
            found: MappedMemory | str = self._wait(lambda: self._take_piece(stream))
            if isinstance(found, str):
                return found
            try:
                answer = fits(found.view)
            except BaseException:
                found.close()
                raise
            if answer is not None:
                return found, answer
            found.close()

    @contextlib.contextmanager
    def locked_twin(self, piece: MappedMemory) -> Iterator[memoryview | None]:
        """This worker's own page-locked mapping of the file that a piece shows: it wrote that commit itself. It stays
        until the context ends. None if there is none."""
        with self._changed:
            mapped = [one for stream in self._streams.values() for one in stream.maps.values()]
        twin = next((one for one in mapped if one.file == piece.file and one.size >= piece.size), None)
        with contextlib.nullcontext() if twin is None else twin.used() as view:
            yield view

    def ask_ranges(self, stream: str, era: int, commit: int, ranges: Sequence[PartRange]) -> None:
        """Request ranges of the parts of a commit; ``piece(stream, ...)`` returns them."""
        descriptor = write_memory("edl-ranges", encode_ranges(ranges))
        try:
            self._send(local.encode_to_agent(local.FetchRanges(stream, era, commit)), descriptor)
        finally:
            os.close(descriptor)

    def _take_piece(self, stream: str) -> MappedMemory | str | None:
        if self._broken >= self._round:
            raise RoundOver(self._why)
        return self._pieces.pop(stream, None)

    # --- services of the Master --------------------------------------------------------------------------------------

    def call(self, service: str, body: str, number: int) -> None:
        """Send a message to a service of the Master, from any thread, as a worker of this round.

        It is lost while no Master is reachable: listeners are notified of the next one, and send again.
        """
        message = local.Call(service, number, body)
        datagram = local.encode_to_agent(message)
        if len(datagram) <= LARGEST_BYTES // 2:
            self._send(datagram)
            return
        descriptor = write_memory("edl-call", body.encode())
        try:
            self._send(local.encode_to_agent(local.Call(service, number, "")), descriptor)
        finally:
            os.close(descriptor)

    def listen(self, service: str, heard: Callable[[str | None], None]) -> None:
        """Call ``heard``, on the side thread, with each message of a service, and with None when earlier messages to it
        may be lost. A later call replaces the callback."""
        self._listeners[service] = heard

    def remind(self) -> None:
        """Make all listeners repeat messages that may be lost."""
        for heard in list(self._listeners.values()):
            _tell(heard, None)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _wait(self, ask: Callable[[], _Answer | None], longest_s: float | None = None) -> _Answer | Any:
        """The result of ``ask``, called under the lock, once it is neither None nor False; None after ``longest_s``."""
        if os.getpid() != self._pid:
            raise StateError(
                "a forked process can neither commit nor join a world: do both in the worker's own process"
            )
        deadline = None if longest_s is None else time.monotonic() + longest_s
        with self._changed:
            while True:
                answer = ask()
                if answer is not None and answer is not False:
                    return answer
                left_s = _LONGEST_WAIT_S if deadline is None else min(deadline - time.monotonic(), _LONGEST_WAIT_S)
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)

    # --- the side thread ---------------------------------------------------------------------------------------------

    def _read(self) -> None:
        while True:
            data, descriptors = receive(self._channel, _MOST_DESCRIPTORS)
            if not data:
                break
            message = None
            try:
                message = local.decode_to_worker(data)
                if isinstance(message, (local.ServiceMessage, local.Reattached)):
                    self._pass_on(message, descriptors)
                else:
                    self._take(message, descriptors)
            except Exception as error:  # noqa: BLE001 - this thread must survive to receive the next world
                sys.stderr.write(f"edl: ignored an invalid message from the agent: {type(error).__name__}: {error}\n")
                if isinstance(message, local.Place):
                    self._misplaced()
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        self._gone()

    def _take(self, message: local.ToWorker, descriptors: list[int]) -> None:
        group = seat = None
        with self._awakening():
            match message:
                case local.Place():
                    seat = self._sit(_read_seat(_first_of(descriptors)))
                case local.Break():
                    group = self._break(message)
                case local.Stop(reason):
                    self._stop = reason
                    self._boundary.stop(reason)
                case local.HoldAtBoundary(number, hold):
                    if number == self._round:
                        # Under the lock, so that no boundary is passed between checking and answering.
                        self.send(local.Here(hold, self._boundary.hold(hold)))
                case local.Target(hold, commit, Purpose.SET.value, settings=settings):
                    self._boundary.set_settings(hold, commit, settings)
                case local.Target(hold, commit, purpose, reason):
                    self._boundary.set_target(hold, commit, Purpose(purpose), reason)
                case local.Release(hold):
                    self._boundary.release(hold)
                case local.Buffer():
                    self._take_buffer(message, descriptors)
                case local.NoBuffer(name, why):
                    mine = self._streams[name]
                    mine.due = max(0, mine.due - 1)
                    mine.ready = None
                    mine.refuse("" if mine.ahead else why or "no reason given", time.monotonic())
                    mine.ahead = False
                case local.Piece() | local.NoPiece():
                    self._take_answer(message, descriptors)
        if group is not None:
            self._interrupt(group)
        if seat is not None and self._follower is not None:
            _tell(self._follower, seat)

    def _pass_on(self, message: local.ServiceMessage | local.Reattached, descriptors: list[int]) -> None:
        if isinstance(message, local.Reattached):
            self.remind()
            return
        listener = self._listeners.get(message.service)
        if listener is not None:
            _tell(listener, read_memory(descriptors[0]).decode() if descriptors else message.body)

    @contextlib.contextmanager
    def _awakening(self) -> Iterator[None]:
        with self._changed:
            try:
                yield
            finally:
                self._changed.notify_all()

    def _sit(self, seat: Seat) -> Seat | None:
        if seat.round <= self._round:
            return None  # received twice
        self._place, self._round = seat, seat.round
        if self._broken < seat.round:
            self._boundary.begin(seat.restore_commit, seat.settings)
        for stream in self._streams.values():
            stream.refused = ""  # there may be memory now
        self._drop_pieces()
        return seat

    def _break(self, message: local.Break) -> Communicator | None:
        """Mark the round as interrupted; returns the group to interrupt."""
        if message.round <= self._broken:
            return None
        self._broken, self._why = message.round, message.reason
        if message.round >= self._round:
            self._boundary.end()
        if self._group is None or self._group[0] > message.round:
            return None
        return self._group[1]

    def _take_buffer(self, message: local.Buffer, descriptors: list[int]) -> None:
        stream, number, size = self._streams[message.stream], message.buffer, message.size
        memory = _mapped(descriptors[0], size, private=False) if descriptors else None
        if isinstance(memory, MappedMemory):
            stream.map(number, memory)
            if self._unprepared is None:
                memory.prepare(self.accelerator)
            else:
                self._unprepared.append(memory)
        stream.due = max(0, stream.due - 1)
        if stream.due:
            return
        stream.ready, stream.refused, stream.ahead = None, "", False
        if isinstance(memory, str):
            stream.refuse(memory, time.monotonic())
        elif number in stream.maps:
            stream.ready, stream.unknown = (number, size), 0
        elif stream.unknown < MOST_BUFFERS:
            # Unmapped too early, because it did not fit in between. The agent allocates a new one for a size that this
            # one cannot hold.
            stream.unknown += 1
            self._want(message.stream, size + 1)
        else:
            stream.refuse(f"buffer {number} of {size} bytes came without its descriptor", time.monotonic())

    def _take_answer(self, message: local.Piece | local.NoPiece, descriptors: list[int]) -> None:
        if message.round not in (0, self._round):
            return  # of an earlier round: it may come after this round's answer, and would take its place
        if isinstance(message, local.NoPiece):
            self._keep_piece(message.stream, message.why or "no reason given")
            return
        mapped = _mapped(descriptors[0], message.size, private=True) if descriptors else _TOO_FEW
        self._keep_piece(message.stream, mapped)

    def _keep_piece(self, stream: str, piece: MappedMemory | str) -> None:
        old = self._pieces.pop(stream, None)
        if isinstance(old, MappedMemory):
            old.close()
        self._pieces[stream] = piece

    def _drop_pieces(self) -> None:
        for piece in self._pieces.values():
            if isinstance(piece, MappedMemory):
                piece.close()
        self._pieces.clear()


def _tell(heard: Callable[[_Answer], None], word: _Answer) -> None:
    try:
        heard(word)
    except Exception as error:  # noqa: BLE001 - as above
        sys.stderr.write(f"edl: handling a message from the agent failed: {type(error).__name__}: {error}\n")


def _mapped(descriptor: int, size: int, *, private: bool) -> MappedMemory | str:
    """The mapped memory, or the reason why it failed, since a caller waits for the answer."""
    try:
        return MappedMemory(descriptor, size, private=private)
    except (OSError, ValueError) as error:
        return f"{size} bytes of shared memory could not be mapped: {error}"


def _first_of(descriptors: Sequence[int]) -> int:
    if not descriptors:
        raise OSError(_TOO_FEW)
    return descriptors[0]


def _read_seat(descriptor: int) -> Seat:
    return json_messages.decode(Seat, read_memory(descriptor))
