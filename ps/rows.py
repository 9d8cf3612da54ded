"""Rows of one table as arrays, and the structures built of them: parts of pushes, pieces for replicas, images of
buckets.

``encode`` yields a small header and the arrays without copying; ``decode`` returns views.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edl.errors import ProtocolError
from ps.intents import Intent

Buffer = bytes | bytearray | memoryview
HEADER = struct.Struct("<4s4xQII8x")
MAGIC = b"PSR1"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows with weights, optimizer state and counters. All arrays have the same length."""

    keys: NDArray[np.int64]
    weights: NDArray[np.float32]
    """``(n, dim)``."""
    state: NDArray[np.float32]
    """Optimizer state, shape ``(n, slots)``: the rule's arrays one after another."""
    frequency: NDArray[np.uint32]
    """Number of pulls of the key; duplicates in one pull each count."""
    updates: NDArray[np.uint32]
    """Number of gradients applied to the row."""
    seen: NDArray[np.uint32]
    """The newest step of any trainer here when the row was last pulled or pushed. In tables with ``unseen_s``: the
    second, by the job's clock."""

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, which: NDArray[np.intp] | NDArray[np.bool_] | slice) -> Rows:
        """Select rows by index, mask or slice; a slice gives views."""
        weights, state, frequency = self.weights[which], self.state[which], self.frequency[which]
        return Rows(self.keys[which], weights, state, frequency, self.updates[which], self.seen[which])


def no_rows(dim: int, slots: int) -> Rows:
    """Empty ``Rows`` of this shape."""
    none = np.zeros(0, np.uint32)
    return Rows(
        np.zeros(0, np.int64), np.zeros((0, dim), np.float32), np.zeros((0, slots), np.float32), none, none, none
    )


def concat(several: Sequence[Rows]) -> Rows:
    """Concatenate rows of the same table; at least one element."""
    if len(several) == 1:
        return several[0]
    names = ("keys", "weights", "state", "frequency", "updates", "seen")
    return Rows(*(np.concatenate([getattr(one, name) for one in several]) for name in names))


def encode(rows: Rows) -> list[Buffer]:
    """Encode as a header and the arrays; contiguous arrays are not copied."""
    head = HEADER.pack(MAGIC, len(rows), rows.weights.shape[1], rows.state.shape[1])
    arrays = (rows.keys, rows.weights, rows.state, rows.frequency, rows.updates, rows.seen)
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
    return [head, *(part for part in flat if part.nbytes)]


def encoded_bytes(rows: Rows) -> int:
    """Length of the output of ``encode``, in bytes."""
    numbers = int(rows.weights.shape[1] + rows.state.shape[1])
    return HEADER.size + len(rows) * (8 + 4 * numbers + 12)


def decode(buffer: Buffer) -> Rows:
    """The inverse of ``encode``, with views; the encoding must fill the buffer. Raises ``ProtocolError``."""
    rows, used = decode_first(buffer)
    if used != memoryview(buffer).nbytes:
        raise ProtocolError(f"encoded rows have {used} bytes, the buffer has {memoryview(buffer).nbytes}")
    return rows


def decode_first(buffer: Buffer) -> tuple[Rows, int]:
    """Decode the rows at the start of a buffer; also return their size in bytes. Raises ``ProtocolError``."""
    size = memoryview(buffer).nbytes
    if size < HEADER.size:
        raise ProtocolError(f"encoded rows have at least {HEADER.size} bytes, the buffer has {size}")
    magic, count, dim, slots = HEADER.unpack_from(buffer)
    needed = HEADER.size + count * (8 + 4 * (dim + slots) + 12)
    if magic != MAGIC or needed > size:
        raise ProtocolError(f"not encoded rows: {magic!r}, {count} rows of {dim}+{slots} numbers in {size} bytes")
    place = HEADER.size

    def part(dtype: type[np.generic], columns: int) -> NDArray[np.generic]:
        nonlocal place
        found = np.frombuffer(buffer, dtype, count * columns, place) if count * columns else np.zeros(0, dtype)
        place += found.nbytes
        return found

    keys = part(np.int64, 1)
    weights = part(np.float32, dim).reshape(count, dim)
    state = part(np.float32, slots).reshape(count, slots)
    numbers = [part(np.uint32, 1) for _ in range(3)]
    return Rows(keys, weights, state, *numbers), place  # type: ignore[arg-type]


class RowOp:
    """Operation that a part of a push applies to its rows."""

    GRAD = "grad"
    """Apply the values as gradients with the table's optimizer."""
    ADD = "add"
    """``weights += scale * values``; optimizer state is kept, except that of FTRL, which weights are computed from."""
    ASSIGN = "assign"
    """``weights = values``; of several values for one key the last wins."""
    FIRST = "first"
    """Like ``assign``, but only for keys without a row."""


OPS = (RowOp.GRAD, RowOp.ADD, RowOp.ASSIGN, RowOp.FIRST)


@dataclass(frozen=True, slots=True)
class TablePush:
    """One table's part of a push. Values of repeated keys are summed."""

    table: str
    keys: NDArray[np.int64]
    grads: NDArray[np.float32]
    """``(n, dim)``."""
    op: str = RowOp.GRAD


class TrainerPush(NamedTuple):
    """One push of a trainer. ``seq`` numbers its pushes; a push that has been applied is not applied again.

    ``trainer`` 0: no trainer, without protection against repetition.
    """

    trainer: int
    seq: int
    parts: Sequence[TablePush]


@dataclass(slots=True)
class ShardChange:
    """The effect of a push or an eviction on one shard: changed rows with their new content, and removed keys."""

    shard: int
    pushes: tuple[tuple[int, int, NDArray[np.uint16]], ...]
    """``(trainer, seq, buckets)`` of each push; ``seq`` is recorded for the buckets in which that push had keys."""
    buckets: NDArray[np.uint16]
    """All buckets that were touched."""
    rows: dict[str, Rows] = field(default_factory=dict)
    removed: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    intents: dict[int, Intent] = field(default_factory=dict)
    """Changed intents of buckets in the shard, by trainer."""


@dataclass(slots=True)
class BucketImage:
    """The complete content of one bucket."""

    bucket: int
    seqs: dict[int, int] = field(default_factory=dict)
    """Sequence number of each trainer's last push applied to this bucket."""
    rows: dict[str, Rows] = field(default_factory=dict)
    intents: dict[int, Intent] = field(default_factory=dict)
    """Intents by trainer, of trainers whose home is this bucket."""


@dataclass(slots=True)
class Pushed:
    """Result of a push."""

    applied: int = 0
    """Rows changed."""
    fresh: int = 0
    """Keys accepted, counting duplicates and keys that were dropped or damaged."""
    skipped: int = 0
    """Keys skipped because this push had already been applied to their buckets."""
    refused: int = 0
    """Touched buckets that are not served here; their keys were skipped."""
    dropped: int = 0
    """Keys that did not get a row (admission, row cap); their gradients were dropped."""
    damaged: int = 0
    """Rows left unchanged (``skip``) or values replaced (``clip``) because of NaN or infinity."""


@dataclass(slots=True)
class Taken:
    """A shard's rows for a checkpoint, as of a mark. When reading, ``gone`` is applied before ``rows``."""

    shard: int
    rows: dict[str, Rows] = field(default_factory=dict)
    gone: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Keys evicted since the base mark; a key may have a row again."""
    whole: frozenset[int] = frozenset()
    """Buckets that must be written in full, regardless of the base: all their rows are in ``rows``."""


def sizes(rows: Mapping[str, Rows] | Iterable[Rows]) -> int:
    """Encoded size of rows of several tables, in bytes."""
    several = rows.values() if isinstance(rows, Mapping) else rows
    return sum(encoded_bytes(one) for one in several)
