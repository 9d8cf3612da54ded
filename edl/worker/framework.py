"""What the framework-neutral part of a worker needs from a framework. ``edl.torch`` and ``edl.paddle`` implement it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edl.wire.local import Seat


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """What a snapshot says about one array."""

    dtype: str
    """In the words of the safetensors format: ``F32``, ``BF16``, ``I64``, ``BOOL`` …"""
    shape: tuple[int, ...]
    size: int
    """Bytes when laid out densely in row-major order."""


class Arrays(Protocol):
    """How a framework's tensors become bytes and return."""

    def is_array(self, value: object) -> bool:
        """Whether this is a tensor of the framework, or a numpy array."""
        ...

    def info(self, value: Any) -> ArrayInfo:
        """Raises ``StateError`` for a kind that cannot be written (its dtype has no name, or it has no data)."""
        ...

    def copy_out(self, values: Sequence[Any], buffers: Iterable[memoryview]) -> None:
        """Copy each array, densely, into the buffer of its size. Returns when all bytes are there.

        The one thing that training waits for: as fast as memory allows, on several threads if that helps, and from an
        accelerator over a stream of its own.
        """
        ...

    def view(self, info: ArrayInfo, data: memoryview) -> Any:
        """The framework's tensor (on the CPU) over these bytes, without a copy where it can be. Read only: whoever
        keeps it must copy it."""
        ...

    def copy(self, value: Any) -> Any:
        """An array of its own with the same values: for what is kept."""
        ...

    def digest(self, values: Sequence[Any]) -> int:
        """A 64-bit hash of the bytes of all these arrays in this order, computed on their device where possible. Any
        change of a single element changes it."""
        ...

    def finite(self, values: Sequence[Any]) -> list[bool]:
        """For each array whether it holds neither NaN nor an infinity."""
        ...


class Group(Protocol):
    """The communicator of one round."""

    def failure(self) -> str:
        """Why no value that came out of its collectives may be kept: one of them failed, whatever the script made of
        the exception, or the group was aborted. Empty while it is whole. From any thread, and cheap.

        An aborted collective of an asynchronous backend ends without an exception and leaves garbage. So ``abort`` sets
        this before it touches any collective, and whoever looks after the device has synchronised misses nothing.
        """
        ...

    def settle(self) -> None:
        """Wait for the collectives of this worker that nobody has waited for yet. Those that fail show in
        ``failure``."""
        ...

    def abort(self) -> None:
        """From any thread, at any moment, also while the group is still being formed: let every collective in flight
        or to come fail at once. Returns at once; doing it twice does nothing."""
        ...

    def retire(self) -> None:
        """Free what is left of an aborted group, on the main thread, while the next one is already at work. The
        number of descriptors and threads must not grow from round to round."""
        ...


class Framework(Protocol):
    """One framework."""

    name: str
    arrays: Arrays

    def why_not_in_process(self) -> str:
        """Why a worker of this build or on this device cannot rejoin in process; empty when it can."""
        ...

    def prepare(self, seat: Seat) -> Group:
        """A group for this place, not connected yet: from here on ``abort`` works."""
        ...

    def connect(self, group: Any, seat: Seat) -> None:
        """Connect it to all its peers and make it the framework's default group. Blocks; raises when a peer is lost
        or ``abort`` is called."""
        ...

    def lost_peers(self, error: BaseException) -> bool:
        """Whether this exception is what a collective raises when a peer is gone or the group was aborted."""
        ...

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether this exception says that the host or the device has no memory left."""
        ...

    def exchange(self, data: bytes) -> list[bytes]:
        """What each rank of the current group hands over, in the order of the ranks; for short messages. Alone: only
        the own. All ranks call it; raises like any collective."""
        ...

    def broadcast(self, data: bytes, root: int) -> bytes:
        """The bytes of rank ``root`` of the current group, of any length; the other ranks' are not looked at. All ranks
        call it; raises like any collective."""
        ...
