"""Copies between a device and the agent's memory files.

A page-locked file is filled straight from the device's tensors, and read straight into them, at the speed of the bus.
Memory that is not locked takes two copies: one of the host's, and one of the device's through two small page-locked
stages, which alternate.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import resource
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from edl.worker.session import note

STAGE_BYTES = 32 << 20
"""Size of a stage."""
PACKED_BYTES = 1 << 20
"""Smaller tensors are joined on the device and copied together: each copy has a fixed cost worth many kilobytes."""
JOINED_BYTES = 32 << 20
"""Most memory of the device for tensors joined in this way."""
GAP_BYTES = 64 << 10
"""Tensors that are joined may lie this far apart in the file, as when a counter on the host lies between them."""

Move = tuple[int, int, int]
"""Target address, source address, and number of bytes."""
Place = tuple[int, torch.Tensor]
"""An address in the host's memory, and a tensor of the device's with the same bytes."""


class DeviceEvent(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Block until everything before it is complete."""
        ...


class DeviceStream(Protocol):
    """A stream for copies. All calls return at once, and take effect one after the other. All but ``dense`` and
    ``joined`` take bytes."""

    def dense(self, source: torch.Tensor) -> torch.Tensor:
        """The bytes of any tensor of the device; a view, unless it has to be made dense."""
        ...

    def joined(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The bytes of any tensors of the device, one after the other."""
        ...

    def upload(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Page-locked bytes of the host, in new memory of the device."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes between page-locked memory and the device."""
        ...

    def record(self) -> DeviceEvent:
        """An event that is complete when everything up to here is."""
        ...


class DeviceRuntime(Protocol):
    """What copies need of an accelerator's runtime."""

    def lock(self, device: torch.device, address: int, size: int) -> str:
        """Page-lock memory; returns why it cannot be locked, or an empty text."""
        ...

    def unlock(self, device: torch.device, address: int) -> None:
        """Make pages that ``lock`` has locked ordinary again, before they are unmapped."""
        ...

    def stage(self, size: int) -> torch.Tensor:
        """New page-locked memory of ``size`` bytes, for copies in two steps."""
        ...

    def stream(self, device: torch.device) -> contextlib.AbstractContextManager[DeviceStream]:
        """A stream that continues after everything that the device has been given so far."""
        ...


class DeviceCopies:
    """The port ``Accelerator`` for torch, and the copies themselves."""

    def __init__(self, runtime: DeviceRuntime, move: Callable[[Sequence[Move]], None]) -> None:
        """``move`` copies bytes in the host's memory."""
        self._runtime = runtime
        self._move = move
        self._stages: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._locked: list[tuple[int, torch.Tensor]] = []
        """Page-locked memory by address."""
        self._aliases: list[tuple[int, int, int]] = []
        """Address and size of memory, and the page-locked address of the same bytes."""
        self._noted = False
        self.device: torch.device | None = None
        """The device of this worker, which locks the agent's files."""

    # --- locked memory -----------------------------------------------------------------------------------------------

    def lock(self, memory: memoryview) -> Callable[[], None] | None:
        """Page-lock memory for this worker's device, on any thread; see ``Accelerator.lock``. A refusal is noted
        once."""
        device = self.device
        if device is None:
            return None
        size = memory.nbytes
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        why = self._runtime.lock(device, address, size)
        if why:
            self._note_refusal(size, why)
            return None
        entry = (address, _bytes_at(address, size))
        with self._lock:
            bisect.insort(self._locked, entry, key=_address)

        def unlock() -> None:
            with self._lock:
                self._locked[:] = [one for one in self._locked if one is not entry]
            self._runtime.unlock(device, address)

        return unlock

    def _note_refusal(self, size: int, why: str) -> None:
        if self._noted:
            return
        self._noted = True
        most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        limit = "unlimited" if most == resource.RLIM_INFINITY else f"{most:,} bytes"
        note(
            f"{size:,} bytes of memory for commits could not be page-locked ({why}; `ulimit -l` is {limit}). Commits "
            "are copied through a small buffer instead, several times slower. Raise the limit where the launcher is "
            "started (`ulimit -l unlimited`, LimitMEMLOCK= of systemd, --ulimit memlock=-1 of docker)"
        )

    @contextlib.contextmanager
    def alias(self, view: memoryview, locked: memoryview) -> Iterator[None]:
        """Let reads of ``view`` take place from ``locked``; see ``Accelerator.alias``."""
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (view, locked)]
        self._aliases.append((addresses[0], view.nbytes, addresses[1]))
        try:
            yield
        finally:
            self._aliases.pop()

    def _locked_bytes(self, address: int, size: int) -> torch.Tensor | None:
        """The page-locked bytes of this address; None if they are not locked as a whole."""
        for begin, length, twin in self._aliases:
            if begin <= address and address + size <= begin + length:
                address += twin - begin
                break
        with self._lock:
            place = bisect.bisect_right(self._locked, address, key=_address)
            if not place:
                return None
            begin, memory = self._locked[place - 1]
        start = address - begin
        return memory[start : start + size] if start + size <= memory.numel() else None

    # --- copies ------------------------------------------------------------------------------------------------------

    def is_there(self, tensor: torch.Tensor) -> bool:
        """Whether this is a tensor of a device."""
        return tensor.is_cuda

    def copy_out(self, device: torch.device, places: Sequence[Place]) -> None:
        """Copy the bytes of tensors on a device to these addresses; returns when they are there. What lies between
        them must be there already."""
        places = sorted(places, key=_address)
        begin, last = places[0][0], places[-1]
        with self._stream(device) as stream:
            if self._locked_bytes(begin, last[0] + last[1].nbytes - begin) is not None:
                self._straight_out(stream, device, places)
            else:
                self._staged_out(stream, places)

    def copy_in(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy the second tensor of each pair, on the host, into the first, on a device; returns when all bytes are
        there. Both are dense and of the same type and size."""
        there: dict[torch.device, list[Place]] = {}
        for place, part in pairs:
            if part.nbytes:
                there.setdefault(place.device, []).append((part.data_ptr(), as_bytes(place)))
        for device, places in there.items():
            with self._stream(device) as stream:
                self._in(stream, places)

    @contextlib.contextmanager
    def _stream(self, device: torch.device) -> Iterator[DeviceStream]:
        """A stream for copies. After a failure, as for lack of the device's memory, the copies under way are waited
        for: a script that goes on commits again into the same memory, whatever the exception was."""
        with self._runtime.stream(device) as stream:
            try:
                yield stream
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    stream.record().synchronize()
                raise

    def _straight_out(self, stream: DeviceStream, device: torch.device, places: Iterable[Place]) -> None:
        for address, source in self._gathered(stream, device, places):
            target = self._locked_bytes(address, source.numel())
            assert target is not None, "all of it is locked"  # noqa: S101
            stream.copy(target, source)
        stream.record().synchronize()

    def _gathered(self, stream: DeviceStream, device: torch.device, places: Iterable[Place]) -> Iterator[Place]:
        """The same bytes in fewer and larger pieces."""
        run: list[Place] = []
        end = 0
        for address, tensor in places:
            size = tensor.nbytes
            small = size < PACKED_BYTES
            if run and not (small and address - end <= GAP_BYTES and address + size - run[0][0] <= JOINED_BYTES):
                yield self._joined(stream, device, run, end)
                run = []
            if small:
                run.append((address, tensor))
                end = address + size
            else:
                yield address, stream.dense(tensor)
        if run:
            yield self._joined(stream, device, run, end)

    def _joined(self, stream: DeviceStream, device: torch.device, run: Sequence[Place], end: int) -> Place:
        """One piece from the first byte of a run to ``end``. What the file has in its gaps goes to the device and comes
        back with it."""
        begin, first = run[0]
        pieces: list[torch.Tensor] = []
        around: torch.Tensor | None = None
        at = begin
        for address, source in run:
            if address > at:
                if around is None:
                    now = self._locked_bytes(begin, end - begin)
                    assert now is not None, "all of it is locked"  # noqa: S101
                    around = stream.upload(now, device)
                gap = around[at - begin : address - begin]
                aligned = (at - begin) % first.itemsize == 0 and gap.numel() % first.itemsize == 0
                pieces.append(gap.view(first.dtype) if aligned else gap)  # pieces of one type are joined faster
            pieces.append(source)
            at = address + source.nbytes
        return begin, stream.joined(pieces)

    def _staged_out(self, stream: DeviceStream, places: Iterable[Place]) -> None:
        """Fill one stage from the device while the other one is copied out."""
        emptied: Callable[[], None] | None = None
        dense = ((address, stream.dense(tensor)) for address, tensor in places)
        for number, pieces in enumerate(_stagings(dense, STAGE_BYTES)):
            stage = self._stage(number)
            offset = 0
            for source in _packed(stream, [source for _, source in pieces]):
                stream.copy(stage[offset : offset + source.numel()], source)
                offset += source.numel()
            done = stream.record()
            if emptied is not None:
                emptied()  # the previous stage, while this one is being filled
            emptied = self._emptying(done, _moves(stage.data_ptr(), pieces))
        if emptied is not None:
            emptied()

    def _emptying(self, done: DeviceEvent, moves: list[Move]) -> Callable[[], None]:
        def empty() -> None:
            done.synchronize()
            self._move(moves)

        return empty

    def _in(self, stream: DeviceStream, places: Iterable[Place]) -> None:
        staged: list[Place] = []
        for address, target in places:
            source = self._locked_bytes(address, target.numel())
            if source is None:
                staged.append((address, target))
            else:
                stream.copy(target, source)
        read: list[DeviceEvent] = []
        for number, pieces in enumerate(_stagings(sorted(staged, key=_address), STAGE_BYTES)):
            stage = self._stage(number)
            if number > 1:
                read[number - 2].synchronize()  # the device has read what was in this stage
            self._move([(to, source, size) for source, to, size in _moves(stage.data_ptr(), pieces)])
            offset = 0
            for _, target in pieces:
                stream.copy(target, stage[offset : offset + target.numel()])
                offset += target.numel()
            read.append(stream.record())
        stream.record().synchronize()

    def _stage(self, number: int) -> torch.Tensor:
        if not self._stages:
            self._stages = [self._runtime.stage(STAGE_BYTES) for _ in range(2)]
        return self._stages[number % 2]


def _address(place: tuple[int, torch.Tensor]) -> int:
    return place[0]


def _bytes_at(address: int, size: int) -> torch.Tensor:
    """A tensor over memory that it does not keep alive."""
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor that is not empty; no copy."""
    flat = tensor.detach().view(-1)
    if flat.stride(0) != 1:  # a single element counts as dense whatever its stride, but not for a change of type
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def _stagings(places: Iterable[Place], room_bytes: int) -> Iterator[list[Place]]:
    """Split bytes, sorted by address, in groups that fit a stage; pieces that are adjacent in a stage are adjacent in
    the host's memory."""
    group: list[Place] = []
    room = room_bytes
    for address, flat in places:
        start = 0
        while start < flat.numel():
            length = min(room, flat.numel() - start)
            group.append((address + start, flat[start : start + length]))
            start += length
            room -= length
            if not room:
                yield group
                group, room = [], room_bytes
    if group:
        yield group


def _packed(stream: DeviceStream, sources: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The same bytes in fewer pieces."""
    run: list[torch.Tensor] = []
    for source in sources:
        if source.numel() < PACKED_BYTES:
            run.append(source)
            continue
        if run:
            yield stream.joined(run)
            run = []
        yield source
    if run:
        yield stream.joined(run)


def _moves(stage: int, pieces: Iterable[Place]) -> list[Move]:
    """The moves that empty a stage: one move for adjacent pieces."""
    moves: list[Move] = []
    begin = size = 0
    for target, source in pieces:
        if target != begin + size:
            if size:
                moves.append((begin, stage, size))
            stage, begin, size = stage + size, target, 0
        size += source.numel()
    if size:
        moves.append((begin, stage, size))
    return moves
