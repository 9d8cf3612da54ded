"""Collectives among the workers of a round, on the CPU, over plain TCP. Unlike those of frameworks, they fail at once
when a peer is lost, and always by an exception.

Each rank sends to the next one and receives from the previous one in a pipeline: data is passed on while the rest is
still arriving. Arrays are NumPy's and are changed in place. Every call has a header, which detects ranks that call
different operations. All ranks get the same bits.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from edl.worker.framework import CollectiveWaits
from edl.worker.ring_links import LONGEST_CONNECT_S, Incoming, Links, OutOfStep, PeerLost
from edl.worker.waits import now

__all__ = ["OPERATIONS", "OutOfStep", "PeerLost", "Ring"]

OPERATIONS = ("sum", "mean", "max", "min", "prod")
_CALLS = (
    *("all_reduce", "broadcast", "all_gather", "barrier", "all_gather_bytes", "broadcast_bytes"),
    *("reduce_scatter", "gather_parts"),
)
_KINDS = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
_IN_FLOAT32 = ("float16", "bfloat16")
_HEADER = struct.Struct("!IBBBxIQ")
"""Call number, call, dtype, operation, root, elements."""
_SMALL_BYTES = 16 * 1024
"""Arrays up to this size are sent whole: half the hops, more bytes."""
_SCRATCH_BYTES = 512 * 1024
_NOTHING = memoryview(b"")


class Ring:
    """The group of one round. All ranks must call the same operations in the same order, one at a time.

    A failed operation leaves the group aborted: form the next one.
    """

    def __init__(self, rank: int, world_size: int, endpoints: Sequence[str], token: str, round: int = 0) -> None:
        if len(endpoints) != world_size or not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size} with {len(endpoints)} endpoints")
        self.rank = rank
        self.world_size = world_size
        self._links = Links(rank, endpoints, token, round)
        self._busy = threading.Lock()
        self._number = 0
        self._waits = CollectiveWaits()
        self._scratch = bytearray()
        self._owed = ""

    # --- lifecycle ---------------------------------------------------------------------------------------------------

    def connect(self, longest_s: float = LONGEST_CONNECT_S) -> None:
        """Block until both neighbours are connected. Raises ``PeerLost`` when aborted, ``OSError`` when the own
        endpoint cannot be listened on."""
        if self.world_size > 1:
            self._links.connect(longest_s)
        self._links.check()

    def abort(self, why: str = "the group was aborted") -> None:
        """Make every current or future call raise ``PeerLost``. From any thread, at any time. Returns at once."""
        self._links.abort(why)

    def disconnect(self) -> None:
        """Like ``abort``: no call ends with garbage."""
        self.abort()

    def failure(self) -> str:
        """Why it was aborted; empty if it was not. A failed call aborts the group."""
        return self._links.aborted

    def owe(self, error: BaseException) -> None:
        """What all ranks exchange after a backward pass will not come from this one, whose pass has failed. The script
        may repeat it, for example with a smaller batch, but must not commit without it."""
        self._owed = f"a backward pass failed and was not repeated: {error}"

    def pay(self) -> None:
        """That has been exchanged; see ``owe``."""
        self._owed = ""

    def settle(self) -> None:
        """From here on a failed backward pass must have been repeated: the other ranks wait for it. There is no call to
        wait for: each returns with its result."""
        if self._owed:
            self.abort(self._owed)

    def waits(self) -> CollectiveWaits:
        """The time in calls so far."""
        return self._waits

    def close(self) -> None:
        """Free all descriptors. No other thread may be in a call."""
        self.abort("the group is closed")
        self._links.close()
        self._scratch = bytearray()

    retire = close

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- arrays ------------------------------------------------------------------------------------------------------

    def all_reduce(self, array: Any, operation: str = "sum", bfloat16: bool = False) -> None:
        """Combine the arrays of all ranks in place. 16-bit floats are summed in 32 bits; bfloat16, which NumPy does not
        know, is passed as uint16 with ``bfloat16=True``."""
        import numpy as np

        kind = _kind(array, operation, bfloat16)
        if self.world_size == 1:
            self._links.check()
        elif kind in _IN_FLOAT32:
            wide = widen(array) if bfloat16 else array.astype(np.float32)
            self._reduce(wide, operation, kind)
            array[...] = narrow(wide) if bfloat16 else wide
        elif array.flags.c_contiguous:
            self._reduce(array, operation, kind)
        else:
            dense = np.ascontiguousarray(array)
            self._reduce(dense, operation, kind)
            array[...] = dense

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Copy the root's array to every rank."""
        self._check_root(root)
        if self.world_size == 1:
            self._links.check()
            return
        if array.flags.c_contiguous:
            self._spread("broadcast", str(array.dtype), root, _bytes(array), array.size)
        else:
            dense = array.copy(order="C")
            self._spread("broadcast", str(array.dtype), root, _bytes(dense), array.size)
            array[...] = dense

    def all_gather(self, array: Any) -> Any:
        """The arrays of all ranks, of equal shape, stacked along a new first axis in the order of the ranks."""
        import numpy as np

        gathered = np.empty((self.world_size, *array.shape), array.dtype)
        gathered[self.rank] = array
        if self.world_size == 1:
            self._links.check()
        else:
            views = [_bytes(part) for part in gathered.reshape(self.world_size, -1)]
            self._gather("all_gather", str(array.dtype), array.size, views)
        return gathered

    def reduce_scatter(self, array: Any, counts: Sequence[int], operation: str = "sum", bfloat16: bool = False) -> None:
        """Combine the arrays of all ranks, each rank its own part. ``array`` is one-dimensional and contiguous, and
        consists of a part for each rank, of ``counts[rank]`` elements. Afterwards this rank's part is right, and the
        others are undefined. Types as for ``all_reduce``."""
        import numpy as np

        kind = _kind(array, operation, bfloat16)
        parts = _parts_of(array, counts, self.world_size)
        if self.world_size == 1:
            self._links.check()
        elif kind in _IN_FLOAT32:
            wide = _parts_of(widen(array) if bfloat16 else array.astype(np.float32), counts, self.world_size)
            self._scatter(wide, operation, kind)
            parts[self.rank][...] = narrow(wide[self.rank]) if bfloat16 else wide[self.rank]
        else:
            self._scatter(parts, operation, kind)

    def gather_parts(self, array: Any, counts: Sequence[int]) -> None:
        """Fill in the parts of the other ranks; ``array`` and ``counts`` as for ``reduce_scatter``."""
        parts = _parts_of(array, counts, self.world_size)
        if self.world_size == 1:
            self._links.check()
        else:
            self._gather("gather_parts", str(array.dtype), array.size, [_bytes(part) for part in parts])

    def barrier(self) -> None:
        """Return once all ranks have called it."""
        self._whole("barrier", b"")

    # --- bytes and objects -------------------------------------------------------------------------------------------

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of each rank, of any length, in the order of the ranks."""
        sizes = [int.from_bytes(size, "big") for size in self._whole("all_gather_bytes", len(data).to_bytes(8, "big"))]
        if self.world_size == 1 or not any(sizes):
            return [data] if self.world_size == 1 else [b""] * self.world_size
        buffers = [bytearray(size) for size in sizes]
        buffers[self.rank][:] = data
        self._gather("all_gather_bytes", "uint8", sum(sizes), [memoryview(buffer) for buffer in buffers])
        return [bytes(buffer) for buffer in buffers]

    def broadcast_bytes(self, data: bytes, root: int = 0) -> bytes:
        """The root's bytes; the other ranks' data is ignored."""
        self._check_root(root)
        if self.world_size == 1:
            self._links.check()
            return data
        size = bytearray(len(data).to_bytes(8, "big"))
        self._spread("broadcast_bytes", "uint8", root, memoryview(size), 8)
        buffer = bytearray(data) if self.rank == root else bytearray(int.from_bytes(size, "big"))
        self._spread("broadcast_bytes", "uint8", root, memoryview(buffer), len(buffer))
        return bytes(buffer)

    # --- implementation ----------------------------------------------------------------------------------------------

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.world_size:
            raise ValueError(f"there is no rank {root} in a world of {self.world_size}")

    def _reduce(self, array: Any, operation: str, kind: str) -> None:
        import numpy as np

        if array.nbytes <= _SMALL_BYTES:
            others = self._whole("all_reduce", _bytes(array), kind, operation, array.size)
            arrays = [np.frombuffer(data, array.dtype).reshape(array.shape) for data in others]
            result, combine = arrays[0].copy(), _ufunc(operation)
            for other in arrays[1:]:  # in the order of the ranks, so that each of them gets the same bits
                combine(result, other, out=result)
            if operation == "mean":
                result /= self.world_size
            array[...] = result
            return
        size = self.world_size
        parts = _parts(array.reshape(-1), size)
        order = [parts[(self.rank - step) % size] for step in range(2 * size - 1)]
        incoming = self._reducing(order[1:size], operation)
        incoming += [_Copied(_bytes(part)) for part in order[size:]]
        outgoing = [_bytes(part) for part in order[:-1]]
        self._pass("all_reduce", kind, operation, 0, array.size, outgoing, 1, incoming)

    def _scatter(self, parts: Sequence[Any], operation: str, kind: str) -> None:
        """The first half of ``_reduce``, ending at this rank's own part."""
        size = self.world_size
        order = [parts[(self.rank - 1 - step) % size] for step in range(size)]
        incoming = self._reducing(order[1:], operation)
        outgoing = [_bytes(part) for part in order[:-1]]
        self._pass("reduce_scatter", kind, operation, 0, sum(part.size for part in parts), outgoing, 1, incoming)

    def _reducing(self, targets: Sequence[Any], operation: str) -> list[Incoming]:
        """Receivers that add incoming data to each part; the last part to come is then complete."""
        if not self._scratch:
            self._scratch = bytearray(_SCRATCH_BYTES)
        combine = _ufunc(operation)
        last = len(targets) - 1
        divisor = self.world_size if operation == "mean" else 1
        return [
            _Reduced(target, combine, memoryview(self._scratch), divisor if number == last else 1)
            for number, target in enumerate(targets)
        ]

    def _spread(self, call: str, kind: str, root: int, data: memoryview, count: int) -> None:
        outgoing = [data] if (self.rank + 1) % self.world_size != root else []
        incoming: list[Incoming] = [] if self.rank == root else [_Copied(data)]
        self._pass(call, kind, "", root, count, outgoing, len(outgoing) if self.rank == root else 0, incoming)

    def _gather(self, call: str, kind: str, count: int, views: Sequence[memoryview]) -> None:
        order = [views[(self.rank - step) % self.world_size] for step in range(self.world_size)]
        self._pass(call, kind, "", 0, count, order[:-1], 1, [_Copied(view) for view in order[1:]])

    def _pass(
        self,
        call: str,
        kind: str,
        operation: str,
        root: int,
        count: int,
        outgoing: Sequence[memoryview],
        ready: int,
        incoming: Sequence[Incoming],
    ) -> None:
        """Send one header, then the pieces; the first ``ready`` outgoing pieces are the rank's own."""
        header = self._header(call, kind, operation, root, count)
        heads: list[Incoming] = [_Copied(memoryview(bytearray(_HEADER.size)))]
        self._pump([memoryview(header), *outgoing], 1 + ready, [*heads, *incoming], 1, 1, header)

    def _whole(
        self, call: str, data: bytes | memoryview, kind: str = "uint8", operation: str = "", count: int = -1
    ) -> list[memoryview]:
        """The equally long data of all ranks: small enough to be sent whole, each with a header."""
        if self.world_size == 1:
            self._links.check()
            return [memoryview(data)]
        header = self._header(call, kind, operation, 0, len(data) if count < 0 else count)
        length = _HEADER.size + len(data)
        pieces = [memoryview(bytearray(length)) for _ in range(self.world_size - 1)]
        own = memoryview(b"".join((header, data)))
        incoming = [_Copied(piece) for piece in pieces]
        self._pump([own, *pieces[:-1]], 1, incoming, 0, len(incoming), header)
        by_distance = [own, *pieces]
        return [by_distance[(self.rank - rank) % self.world_size][_HEADER.size :] for rank in range(self.world_size)]

    def _header(self, call: str, kind: str, operation: str, root: int, count: int) -> bytes:
        kind_code = _KINDS.index(kind) if kind in _KINDS else len(_KINDS)
        operation_code = 1 + OPERATIONS.index(operation) if operation else 0
        return _HEADER.pack(self._number, _CALLS.index(call), kind_code, operation_code, root, count)

    def _pump(
        self,
        outgoing: Sequence[memoryview],
        ready: int,
        incoming: Sequence[Incoming],
        relayed_from: int,
        checked: int,
        header: bytes,
    ) -> None:
        def check(theirs: memoryview, piece: int) -> None:
            if theirs != header:
                rank = (self.rank - 1 - piece) % self.world_size
                ours, others = _describe(header), _describe(bytes(theirs))
                raise OutOfStep(f"rank {self.rank} called {ours}, rank {rank} called {others}")

        if not self._busy.acquire(blocking=False):
            raise OutOfStep(f"rank {self.rank}: two threads use the group at the same time")
        began = now()
        try:
            self._links.pump(outgoing, ready, incoming, relayed_from, checked, check, _HEADER.size)
            self._number = (self._number + 1) & 0xFFFFFFFF
        except BaseException as error:
            # The streams have stopped in the middle: nothing can follow, and peers must not wait for it.
            self._links.abort(f"a collective failed ({type(error).__name__}: {error})")
            raise
        finally:
            self._waits.add(began, now())
            self._busy.release()


class _Copied:
    """Receives a piece into its final place."""

    def __init__(self, target: memoryview) -> None:
        self.size = len(target)
        self._target = target
        self._at = 0

    def room(self) -> memoryview:
        return self._target[self._at :]

    def came(self, count: int) -> int:
        self._at += count
        return self._at


class _Reduced:
    """Combines an incoming piece with the own values as it arrives."""

    def __init__(self, target: Any, combine: Callable[..., Any], scratch: memoryview, divisor: int) -> None:
        import numpy as np

        self.size = int(target.nbytes)
        self._target, self._combine, self._divisor = target, combine, divisor
        self._scratch = scratch
        self._values = np.frombuffer(scratch, target.dtype)
        self._each = int(target.itemsize)
        self._waiting = self._done = 0

    def room(self) -> memoryview:
        left = self.size - self._done * self._each
        return self._scratch[self._waiting : min(left, len(self._scratch))]

    def came(self, count: int) -> int:
        self._waiting += count
        whole, rest = divmod(self._waiting, self._each)
        if whole:
            part = self._target[self._done : self._done + whole]
            self._combine(part, self._values[:whole], out=part)
            if self._divisor != 1:
                part /= self._divisor
            if rest:
                self._scratch[:rest] = self._scratch[whole * self._each : self._waiting]
            self._done += whole
            self._waiting = rest
        return self._done * self._each


def _kind(array: Any, operation: str, bfloat16: bool) -> str:
    """Name of the array's dtype; raises ``TypeError`` if the operation is not defined for it."""
    if operation not in OPERATIONS:
        raise ValueError(f"{operation!r}: one of {', '.join(OPERATIONS)}")
    kind = str(array.dtype)
    if bfloat16:
        if kind != "uint16":
            raise TypeError(f"bfloat16 is passed as uint16, not {kind}")
        return "bfloat16"
    if kind not in _KINDS:
        raise TypeError(f"arrays of {kind} cannot be reduced")
    if kind == "bool" and operation not in ("max", "min"):
        raise TypeError(f"{operation} of bool: take max for 'any', min for 'all'")
    if operation == "mean" and array.dtype.kind in "iu":
        raise TypeError(f"the mean of {kind} is not defined: take the sum, or convert to floats")
    if array.dtype.kind == "c" and operation in ("max", "min"):
        raise TypeError(f"{operation} of {kind}: complex numbers have no order")
    return kind


def _ufunc(operation: str) -> Any:
    import numpy as np

    return {"max": np.maximum, "min": np.minimum, "prod": np.multiply}.get(operation, np.add)


def _bytes(array: Any) -> memoryview:
    """A dense array's memory."""
    if not array.size:
        return _NOTHING
    import numpy as np

    return memoryview(array.reshape(-1).view(np.uint8))


def _parts(flat: Any, count: int) -> list[Any]:
    """Split into ``count`` views of almost equal size."""
    each, more = divmod(flat.size, count)
    ends = [each * (number + 1) + min(number + 1, more) for number in range(count)]
    return [flat[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _parts_of(flat: Any, counts: Sequence[int], size: int) -> list[Any]:
    """The ranks' parts of a one-dimensional array as views. Raises ``ValueError`` if ``counts`` does not fit."""
    if len(counts) != size or sum(counts) != flat.size or flat.ndim != 1 or not flat.flags.c_contiguous:
        raise ValueError(f"parts of {list(counts)} elements for {size} ranks in an array of shape {flat.shape}")
    ends = list(itertools.accumulate(counts))
    return [flat[end - count : end] for end, count in zip(ends, counts, strict=True)]


def widen(bits: Any) -> Any:
    """bfloat16 to float32: its bits are the upper half."""
    import numpy as np

    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: Any) -> Any:
    """float32 to bfloat16, rounded to nearest, ties to even."""
    import numpy as np

    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _describe(header: bytes) -> str:
    number, call, kind, operation, root, count = _HEADER.unpack(header)
    name = _CALLS[call] if call < len(_CALLS) else f"call {call}"
    details = [OPERATIONS[operation - 1]] if 0 < operation <= len(OPERATIONS) else []
    if name != "barrier":
        details.append(f"{count} of {_KINDS[kind] if kind < len(_KINDS) else 'another kind'}")
    if name.startswith("broadcast"):
        details.append(f"from rank {root}")
    return f"{name}({', '.join(details)}) as call {number + 1}"
