"""The interface that the framework-neutral part of a worker needs; ``edl.torch`` and ``edl.paddle`` implement it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from edl.wire.local import Seat


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """A snapshot's description of one array."""

    dtype: str
    """Dtype name of the safetensors format: ``F32``, ``BF16``, ``I64``, ``BOOL`` …"""
    shape: tuple[int, ...]
    size: int
    """Bytes in a dense row-major layout."""


class Arrays(Protocol):
    """Conversion of a framework's tensors to bytes and back."""

    def is_array(self, value: object) -> bool:
        """Whether this is a tensor of the framework, or a NumPy array."""
        ...

    def info(self, value: Any) -> ArrayInfo:
        """Describe an array. Raises ``StateError`` for one that cannot be written (unsupported dtype, or no data)."""
        ...

    def copy_out(self, values: Sequence[Any], buffers: Iterable[memoryview]) -> None:
        """Copy each array densely into its buffer; returns when all bytes are there.

        This is the only part of a commit that training waits for: it must be as fast as memory allows, multi-threaded
        if that helps, and use its own stream on an accelerator.
        """
        ...

    def view(self, info: ArrayInfo, data: memoryview) -> Any:
        """A CPU tensor of the framework over these bytes, without a copy if possible. Read-only: copy it to keep it."""
        ...

    def copy(self, value: Any) -> Any:
        """An independent array with the same values."""
        ...

    def digest(self, values: Sequence[Any]) -> int:
        """A 64-bit hash of the bytes of all these arrays in this order, computed on their device if possible. It
        changes with any single element."""
        ...

    def finite(self, values: Sequence[Any]) -> list[bool]:
        """For each array, whether it is free of NaN and infinity."""
        ...


class Accelerator(Protocol):
    """Copies between a device and page-locked memory of the host, which go at the speed of the bus."""

    def lock(self, memory: memoryview) -> Callable[[], None] | None:
        """Page-lock memory that commits are copied to, on any thread; takes 50 ms per gigabyte. Returns what undoes
        it, to be called before the memory is unmapped; None if nothing is locked: copies then take another way."""
        ...

    def alias(self, view: memoryview, locked: memoryview) -> AbstractContextManager[None]:
        """Within the context ``view`` shows the same bytes as the page-locked memory, which does not change: copies to
        the device may read from there."""
        ...


Moment = tuple[float, float]
"""The time on a clock, and the CPU time of a thread; see ``edl.worker.waits.now``."""


@dataclass(slots=True)
class CollectiveWaits:
    """Time that a thread has waited."""

    waited_s: float = 0.0
    idle_s: float = 0.0
    """Part of it in which the thread used no CPU."""

    def add(self, began: Moment, ended: Moment) -> None:
        """Add a wait between two moments of the same thread."""
        waited_s = ended[0] - began[0]
        self.waited_s += waited_s
        self.idle_s += max(0.0, waited_s - (ended[1] - began[1]))


class Communicator(Protocol):
    """The communicator of one round."""

    def failure(self) -> str:
        """Why no result of its collectives may be kept: one of them failed, even if the script caught the exception, or
        the group was aborted. Empty while the group is intact. Callable from any thread, and cheap.

        An aborted collective of an asynchronous backend ends without an exception and leaves garbage, here and at the
        peers. So ``disconnect`` sets this without touching any collective, ``abort`` comes later, and a check after the
        device has synchronised misses nothing.
        """
        ...

    def settle(self) -> None:
        """Wait for this worker's collectives that have not been waited for yet. Failures show in ``failure``."""
        ...

    def waits(self) -> CollectiveWaits | None:
        """How long the training thread has waited in collectives of this group so far: for other ranks, and for the
        network. None: this cannot be measured. Called on that thread every few seconds."""
        ...

    def disconnect(self) -> None:
        """Set ``failure``, make every current collective fail at once that raises an exception then, and let no further
        one begin. From any thread, at any time, even while the group is being formed. Returns at once; idempotent.

        It leaves pending what an asynchronous backend is carrying out. The end of such a collective would let those of
        the peers end as well, with garbage and without an exception, which a peer without a mark would commit.
        """
        ...

    def abort(self) -> None:
        """Make every current or future collective fail at once, like ``disconnect``, including those of an asynchronous
        backend: when all workers know that the round is over, or have left it."""
        ...

    def retire(self) -> None:
        """Free the remains of an aborted group, on the main thread, while the next one is already in use. The number
        of descriptors and threads must not grow from round to round."""
        ...


class Framework(Protocol):
    """What edl needs from a training framework, such as PyTorch."""

    name: str
    arrays: Arrays
    accelerator: Accelerator | None
    """Known once a group has been connected; None for state in the host's memory."""

    def why_not_in_process(self) -> str:
        """Why a worker with this build or device cannot rejoin in process; empty when it can."""
        ...

    def warm_up(self, local_rank: int, enough: Callable[[], bool]) -> str:
        """Do on this worker's device what the first step would otherwise have to wait for, until ``enough()``. Nothing
        without a device. Returns what failed, which is no error; empty if nothing did."""
        ...

    def synchronize(self) -> None:
        """Block until this worker's accelerator has done what the training thread has given it; returns at once
        without one. ``abort`` ends the wait."""
        ...

    def prepare(self, seat: Seat) -> Communicator:
        """A group for this place, not connected yet; ``abort`` works from here on."""
        ...

    def connect(self, group: Any, seat: Seat) -> None:
        """Connect the group to all peers and make it the framework's default group. Blocks; raises when a peer is lost
        or ``abort`` is called."""
        ...

    def lost_peers(self, error: BaseException) -> bool:
        """Whether a collective raises this exception when a peer is gone or the group was aborted."""
        ...

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether this exception means that the host or the device is out of memory."""
        ...

    def exchange(self, data: bytes) -> list[bytes]:
        """The short messages of all ranks of the current group, in order; without a group only the own one. A
        collective, raises like any other."""
        ...

    def broadcast(self, data: bytes, root: int) -> bytes:
        """The bytes of rank ``root``, of any length; other ranks' data is ignored. A collective, raises like any
        other."""
        ...
