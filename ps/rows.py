"""Rows of one table as arrays, and what is made of them: parts of pushes, pieces of the stream to a copy, images.

``encode`` lays rows out as one small header and the arrays as they are; ``decode`` gives views of what arrived.
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
    """Rows with all that belongs to them. All arrays have the same length."""

    keys: NDArray[np.int64]
    weights: NDArray[np.float32]
    """``(n, dim)``."""
    state: NDArray[np.float32]
    """``(n, slots)``: the optimizer's numbers, array after array."""
    frequency: NDArray[np.uint32]
    """How often the key was pulled; duplicates in one pull count each."""
    updates: NDArray[np.uint32]
    """Gradients that the row has had."""
    seen: NDArray[np.uint32]
    """The last step in which it was pulled or pushed."""

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, which: NDArray[np.intp] | NDArray[np.bool_] | slice) -> Rows:
        """Some of them; a slice gives views."""
        weights, state, frequency = self.weights[which], self.state[which], self.frequency[which]
        return Rows(self.keys[which], weights, state, frequency, self.updates[which], self.seen[which])


def no_rows(dim: int, slots: int) -> Rows:
    """None, of a table of this shape."""
    none = np.zeros(0, np.uint32)
    return Rows(
        np.zeros(0, np.int64), np.zeros((0, dim), np.float32), np.zeros((0, slots), np.float32), none, none, none
    )


def concat(several: Sequence[Rows]) -> Rows:
    """One after another; at least one, all of the same table."""
    if len(several) == 1:
        return several[0]
    names = ("keys", "weights", "state", "frequency", "updates", "seen")
    return Rows(*(np.concatenate([getattr(one, name) for one in several]) for name in names))


def encode(rows: Rows) -> list[Buffer]:
    """A header and the arrays, none of them copied (if they are contiguous)."""
    head = HEADER.pack(MAGIC, len(rows), rows.weights.shape[1], rows.state.shape[1])
    arrays = (rows.keys, rows.weights, rows.state, rows.frequency, rows.updates, rows.seen)
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
    return [head, *(part for part in flat if part.nbytes)]


def encoded_bytes(rows: Rows) -> int:
    """The length of what ``encode`` gives."""
    numbers = int(rows.weights.shape[1] + rows.state.shape[1])
    return HEADER.size + len(rows) * (8 + 4 * numbers + 12)


def decode(buffer: Buffer) -> Rows:
    """Views of what ``encode`` gave, which must be the whole of the buffer. Raises ``ProtocolError``."""
    rows, used = decode_first(buffer)
    if used != memoryview(buffer).nbytes:
        raise ProtocolError(f"rows take {used} bytes, {memoryview(buffer).nbytes} came")
    return rows


def decode_first(buffer: Buffer) -> tuple[Rows, int]:
    """The rows at the beginning of a buffer, and how many bytes they take. Raises ``ProtocolError``."""
    size = memoryview(buffer).nbytes
    if size < HEADER.size:
        raise ProtocolError(f"rows need {HEADER.size} bytes at least, {size} came")
    magic, count, dim, slots = HEADER.unpack_from(buffer)
    needed = HEADER.size + count * (8 + 4 * (dim + slots) + 12)
    if magic != MAGIC or needed > size:
        raise ProtocolError(f"not rows: {magic!r}, {count} rows of {dim}+{slots} numbers in {size} bytes")
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


class Op:
    """What a part of a push does to its rows."""

    GRAD = "grad"
    """The table's optimizer takes the values as gradients."""
    ADD = "add"
    """``weights += scale * values``; the optimizer's state stays."""
    ASSIGN = "assign"
    """``weights = values``; of several for one key, the last."""
    FIRST = "first"
    """As ``assign``, only for keys that have no row yet."""


OPS = (Op.GRAD, Op.ADD, Op.ASSIGN, Op.FIRST)


@dataclass(frozen=True, slots=True)
class Part:
    """One table's share of a push. Keys may repeat: their values are summed."""

    table: str
    keys: NDArray[np.int64]
    grads: NDArray[np.float32]
    """``(n, dim)``."""
    op: str = Op.GRAD


class Push(NamedTuple):
    """What one trainer pushes in one step. ``seq`` counts its pushes; one that has been applied is not applied again.

    ``trainer`` 0: nobody's, without protection against repetition.
    """

    trainer: int
    seq: int
    parts: Sequence[Part]


@dataclass(slots=True)
class Piece:
    """What an applied push, or a sweep, left in one shard: rows as they are now, and keys that have none any more."""

    shard: int
    pushes: tuple[tuple[int, int, NDArray[np.uint16]], ...]
    """``(trainer, seq, buckets)`` of each push in it: the number holds for the buckets in which that push had keys."""
    buckets: NDArray[np.uint16]
    """All that were touched."""
    rows: dict[str, Rows] = field(default_factory=dict)
    removed: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    intents: dict[int, Intent] = field(default_factory=dict)
    """By trainer, those of buckets in it that have changed."""


@dataclass(slots=True)
class Image:
    """All that a store knows of one bucket."""

    bucket: int
    seqs: dict[int, int] = field(default_factory=dict)
    """By trainer: its last push applied to this bucket."""
    rows: dict[str, Rows] = field(default_factory=dict)
    intents: dict[int, Intent] = field(default_factory=dict)
    """By trainer, of those whose home this bucket is."""


@dataclass(slots=True)
class Pushed:
    """What became of a push."""

    applied: int = 0
    """Rows that were changed."""
    fresh: int = 0
    """Keys taken (duplicates each, also those that were dropped or damaged)."""
    skipped: int = 0
    """Keys left out because this push had been applied to their buckets before."""
    refused: int = 0
    """Buckets touched that are not served here; their keys were left out."""
    dropped: int = 0
    """Keys without a row that got none (admission, row cap); their gradients were dropped."""
    damaged: int = 0
    """Rows left as they were (``skip``), or values replaced (``clip``), because of NaN or infinity."""


@dataclass(slots=True)
class Taken:
    """What a checkpoint needs of one shard, as it was at a mark. First ``gone`` goes, then ``rows`` come."""

    shard: int
    rows: dict[str, Rows] = field(default_factory=dict)
    gone: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Keys evicted since the mark that the rows are counted from; one may have a row again."""
    whole: frozenset[int] = frozenset()
    """Buckets that must be written as a whole, whatever was kept of them before: all their rows are in ``rows``."""


def sizes(rows: Mapping[str, Rows] | Iterable[Rows]) -> int:
    """Bytes of rows of several tables, encoded."""
    several = rows.values() if isinstance(rows, Mapping) else rows
    return sum(encoded_bytes(one) for one in several)
