"""The other end of a worker's link, a framework made of numpy, and workers as threads."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from edl.checkpoint.memory.buffer_table import BufferTable, SnapshotStream, WritableBuffer
from edl.testing.commits.device import AsynchronousArrays, Device
from edl.wire import local
from edl.wire.local import Seat
from edl.wire.memory_file import LARGEST_BYTES
from edl.wire.records import Holding, Version
from edl.worker.framework import Accelerator, ArrayInfo, Arrays
from edl.worker.link import Link
from edl.worker.session import Session
from edl.worker.state import BaseState

TIMEOUT_S = 60.0
"""After that a test that waits has failed."""
JOB = "job-1"
Message = TypeVar("Message")

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "I16": np.int16,
    "I8": np.int8, "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
    "C64": np.complex64,
}  # fmt: skip
_NAMES = {np.dtype(kind): name for name, kind in _DTYPES.items()}


class Tensor:
    """The framework's own kind of array."""

    def __init__(self, data: Any) -> None:
        self.data = np.asarray(data)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tensor):
            return NotImplemented
        return self.data.dtype == other.data.dtype and bool((self.data == other.data).all())

    __hash__ = None  # type: ignore[assignment]


def _array(value: Any) -> Any:
    return value.data if isinstance(value, Tensor) else value


class NumpyArrays:
    """``edl.worker.framework.Arrays`` for numpy."""

    def is_array(self, value: object) -> bool:
        return isinstance(value, (Tensor, np.ndarray))

    def info(self, value: Any) -> ArrayInfo:
        array = _array(value)
        return ArrayInfo(_NAMES[array.dtype], tuple(array.shape), int(array.nbytes))

    def copy_out(self, values: Sequence[Any], buffers: Iterable[memoryview]) -> None:
        for value, buffer in zip(values, buffers, strict=True):
            array = _array(value)
            if array.nbytes:
                np.copyto(np.frombuffer(buffer, array.dtype).reshape(array.shape), array)

    def view(self, info: ArrayInfo, data: memoryview) -> Tensor:
        kind = _DTYPES[info.dtype]
        return Tensor((np.frombuffer(data, kind) if info.size else np.empty(0, kind)).reshape(info.shape))

    def copy(self, value: Any) -> Any:
        return Tensor(value.data.copy())

    def digest(self, values: Sequence[Any]) -> int:
        whole = hashlib.blake2b(digest_size=8)
        for value in values:
            whole.update(np.ascontiguousarray(_array(value)).tobytes())
        return int.from_bytes(whole.digest(), "big")

    def finite(self, values: Sequence[Any]) -> list[bool]:
        return [bool(np.isfinite(_array(value)).all()) for value in values]


class PeerGone(Exception):
    """Raised by a collective after the loss of a peer."""


class FakeGroup:
    """All members of a round in one process meet at a barrier."""

    def __init__(self, seat: Seat, barrier: threading.Barrier, given: dict[int, bytes] | None = None) -> None:
        self.seat = seat
        self.barrier = barrier
        self.given = {} if given is None else given
        self.device: Device | None = None
        self.aborts = 0
        self.failed = ""
        self.disconnected = threading.Event()
        self.aborted = threading.Event()
        self.retired = 0

    def waits(self) -> None:
        """Not measured."""

    def collective(self) -> None:
        """Wait for all members."""
        try:
            self.barrier.wait(TIMEOUT_S)
        except threading.BrokenBarrierError:
            self.failed = f"peer gone in round {self.seat.round}"
            raise PeerGone(self.failed) from None

    def step(self, apply: Callable[[bool], None]) -> None:
        """Meet all the others, and apply what has come of it: True for the result, False for garbage, which only an
        asynchronous device lets pass."""
        if self.device is None:
            self.collective()
            apply(True)
            return

        def work() -> None:
            try:
                self.barrier.wait(TIMEOUT_S)
            except threading.BrokenBarrierError:
                # A peer that has gone ends no collective of an asynchronous backend: only this worker's own abort does.
                assert self.aborted.wait(TIMEOUT_S)
                apply(False)  # in silence
            else:
                apply(True)

        self.device.do(work)

    def exchange(self, data: bytes) -> list[bytes]:
        """All-gather: the bytes of each member, by rank."""
        if self.device is not None:
            self.device.synchronize()
        self.given[self.seat.rank] = data
        self.collective()
        given = [self.given[rank] for rank in range(self.seat.world_size)]
        self.collective()
        return given

    def disconnect(self) -> None:
        self.barrier.abort()
        self.disconnected.set()

    def abort(self) -> None:
        self.disconnect()
        self.aborts += 1
        self.aborted.set()

    def failure(self) -> str:
        return self.failed or ("the group was disconnected" if self.disconnected.is_set() else "")

    def settle(self) -> None:
        pass

    def retire(self) -> None:
        assert self.aborts
        self.retired += 1


class Barriers:
    """The barrier of each round, the same for all workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._barriers: dict[int, tuple[threading.Barrier, dict[int, bytes]]] = {}

    def of(self, seat: Seat) -> tuple[threading.Barrier, dict[int, bytes]]:
        """And what its members give each other."""
        with self._lock:
            return self._barriers.setdefault(seat.round, (threading.Barrier(seat.world_size), {}))


class FakeFramework:
    """``edl.worker.framework.Framework`` of one worker, for numpy."""

    name = "numpy"
    accelerator: Accelerator | None = None
    asynchronous = False
    """Those made now have an asynchronous device."""

    def __init__(self, barriers: Barriers | None = None, why_not: str = "") -> None:
        self.arrays: Arrays = NumpyArrays()
        self.device: Device | None = None
        if self.asynchronous:
            self.device = device = Device(lambda: None, most=4)
            self.arrays = AsynchronousArrays(self.arrays, lambda: device)
        self.barriers = barriers or Barriers()
        self.why_not = why_not
        self.groups: list[FakeGroup] = []

    def why_not_in_process(self) -> str:
        return self.why_not

    def synchronize(self) -> None:
        if self.device is not None:
            self.device.synchronize()

    def warm_up(self, local_rank: int, enough: Callable[[], bool]) -> str:
        return ""

    def prepare(self, seat: Seat) -> FakeGroup:
        self.groups.append(FakeGroup(seat, *self.barriers.of(seat)))
        self.groups[-1].device = self.device
        return self.groups[-1]

    def connect(self, group: FakeGroup, seat: Seat) -> None:
        group.collective()

    def lost_peers(self, error: BaseException) -> bool:
        return isinstance(error, PeerGone)

    def out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def exchange(self, data: bytes) -> list[bytes]:
        return self.groups[-1].exchange(data) if self.groups else [data]

    def broadcast(self, data: bytes, root: int) -> bytes:
        return self.exchange(data)[root]


class Model:
    """Something with parameters. It takes them by copying, and keeps what else it gets."""

    def __init__(self, *shape: int) -> None:
        self.weight = Tensor(np.zeros(shape or (4, 3), np.float32))
        self.extra: Any = {}

    def state_dict(self) -> dict[str, Any]:
        return {"layer.weight": self.weight, "extra": self.extra}

    def load_state_dict(self, plain: dict[str, Any]) -> None:
        np.copyto(self.weight.data, plain["layer.weight"].data)
        self.extra = plain["extra"]


class Generator:
    """Separate random numbers for each rank."""

    edl_per_rank = True

    def __init__(self, seed: int = 0) -> None:
        self.at = seed
        self.derived: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "words": np.arange(self.at % 7)}

    def load_state_dict(self, plain: dict[str, Any]) -> None:
        self.at = plain["at"]

    def derive(self, rank: int) -> None:
        self.derived.append(rank)


def a_seat(number: int = 1, **changes: Any) -> Seat:
    """A place in a world of one, in era = round."""
    fields: dict[str, Any] = {
        "round": number, "rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1, "node": "a", "nodes": 1,
        "position": 0, "endpoints": ("127.0.0.1:1",), "master": "127.0.0.1:2", "era": number, "restore_era": 0,
        "restore_commit": 0, "shards": 1, "stored": False, "checkpoint_dir": "", "token": "t",
        "environment": {"EDL_JOB_ID": JOB, "RANK": str(changes.get("rank", 0))},
    }  # fmt: skip
    return Seat(**{**fields, **changes})


class Buffers:
    """Memory files, with the books of the real agent."""

    def __init__(self) -> None:
        self._buffer_table = BufferTable(1 << 40)
        self.files: dict[int, tuple[int, int]] = {}
        """Descriptor and size."""
        self.told: set[int] = set()
        self.made = 0

    def room(self, stream: str, size: int) -> int:
        """The number of the buffer to write next."""
        room = self._buffer_table.room(SnapshotStream.of_worker(0, stream), size)
        assert isinstance(room, WritableBuffer), room
        if room.new:
            descriptor = os.memfd_create("fake")
            os.ftruncate(descriptor, room.capacity)
            self.files[room.buffer] = (descriptor, room.capacity)
            self.made += 1
        for number in self._buffer_table.collect():
            os.close(self.files.pop(number)[0])
        return room.buffer

    def fill(self, message: local.Committed) -> bytes:
        """Bytes of the committed state."""
        stream = SnapshotStream.of_worker(0, message.stream)
        problem = self._buffer_table.may_fill(stream, message.buffer, message.size)
        assert not problem, problem
        holding = Holding(Version(message.era, message.commit), message.shard, message.shards)
        self._buffer_table.fill(stream, message.size, holding)
        return os.pread(self.files[message.buffer][0], message.size, 0)


class FakeAgent:
    """Answers what concerns state by itself, as long as it is ``serving``; everything else waits in ``heard``."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.heard: queue.Queue[Any] = queue.Queue()
        self.said: list[Any] = []
        self.kept: dict[tuple[str, int, int, int], bytes] = {}
        """By stream, era, commit and shard."""
        self.buffers = Buffers()
        self.refusal = ""
        self.serving = True
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.channel.shutdown(socket.SHUT_RDWR)
        self._thread.join(TIMEOUT_S)
        self.channel.close()
        for descriptor, _ in self.buffers.files.values():
            os.close(descriptor)

    def expect(self, kind: type[Message]) -> Message:
        """The next message, which must be of this kind."""
        message = self.heard.get(timeout=TIMEOUT_S)
        assert isinstance(message, kind), message
        return message

    def send(self, message: local.ToWorker, *descriptors: int) -> None:
        socket.send_fds(self.channel, [local.encode_to_worker(message)], list(descriptors))

    def place(self, seat: Seat) -> None:
        """Send a place in the world to the worker."""
        self.send_memory(local.Place(seat.round), json.dumps(dataclasses.asdict(seat)).encode())

    def send_memory(self, message: local.ToWorker, data: bytes) -> None:
        descriptor = os.memfd_create("fake")
        os.write(descriptor, data)
        readable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        self.send(message, readable)
        os.close(readable)
        os.close(descriptor)

    def versions(self, stream: str = local.STATE) -> list[tuple[int, int]]:
        """Era and commit of what is kept, in the order in which it came. The agent's thread may add to it meanwhile."""
        return [(era, commit) for name, era, commit, _ in list(self.kept) if name == stream]

    def offer(self, stream: str, size: int) -> None:
        """Offer the next buffer to the worker."""
        number = self.buffers.room(stream, size)
        descriptor, capacity = self.buffers.files[number]
        known = number in self.buffers.told
        self.buffers.told.add(number)
        self.send(local.Buffer(stream, number, capacity), *(() if known else (descriptor,)))

    def _read(self) -> None:
        while True:
            try:
                data = self.channel.recv(LARGEST_BYTES)
            except OSError:
                return
            if not data:
                return
            message = local.decode_to_agent(data)
            self.said.append(message)
            try:
                if not (self.serving and self._served(message)):
                    self.heard.put(message)
            except BrokenPipeError:
                return  # the worker has hung up at the end of a test

    def _served(self, message: local.ToAgent) -> bool:
        match message:
            case local.Want(stream, size):
                if self.refusal:
                    self.send(local.NoBuffer(stream, self.refusal))
                else:
                    self.offer(stream, size)
            case local.Committed():
                key = (message.stream, message.era, message.commit, message.shard)
                self.kept[key] = self.buffers.fill(message)
                if local.offered(message):
                    self.offer(message.stream, message.size)
            case local.Fetch(stream, era, commit, shard, number):
                piece = self.kept.get((stream, era, commit, shard))
                if piece is None:
                    self.send(local.NoPiece(stream, "nobody has it", number))
                else:
                    self.send_memory(local.Piece(stream, len(piece), number), piece)
            case _:
                return False
        return True


class Worker:
    """A training process, as a thread of the test's."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.agent = FakeAgent(ours)
        self.gone = threading.Event()
        self.misplaced = threading.Event()
        self.link = Link(theirs, self.gone.set, self.misplaced.set)
        self.link.start()
        self.environment: dict[str, str] = {}
        self.session = Session(self.link, self.environment)
        self.result: Any = None
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], Any]) -> None:
        """Run the work on a thread."""

        def run() -> None:
            try:
                self.result = work()
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                self.error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def join(self) -> Any:
        """The result of the work. Raises what the work raised."""
        assert self._thread is not None
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the worker hangs"
        if self.error is not None:
            raise self.error
        return self.result

    def settle(self) -> None:
        """The agent has dealt with everything said so far; to be called when nothing else is on its way to it."""
        self.link.send(local.TrainingStarted(0))
        self.agent.expect(local.TrainingStarted)

    def close(self) -> None:
        self.link.close()
        self.agent.close()


def begin(worker: Worker, state: BaseState, **changes: Any) -> None:
    """Give it a place, and restore."""
    number = changes.pop("number", worker.session.seat.round + 1 if worker.session.seat else 1)
    worker.agent.place(a_seat(number, **changes))
    worker.session.framework = state._framework
    worker.session.leave()
    seat = worker.session.place()
    worker.agent.expect(local.Parked)
    state._ask(worker.session, seat)
    state._begin(worker.session, seat)
    worker.session.training = True


def connected() -> tuple[str, socket.socket]:
    """An abstract address and a listener on it."""
    address = f"edl-test-{os.getpid()}-{secrets.token_hex(4)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + address)
    listener.listen()
    return address, listener
