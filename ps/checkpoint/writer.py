"""Writing one pserver's rows for a checkpoint, as standard safetensors files.

For each table ``T`` a file has ``T/keys`` (int64), ``T/weights`` and ``T/state`` (float32), ``T/frequency``,
``T/updates`` and ``T/seen`` (uint32), ordered by bucket; ``T/index`` holds pairs (bucket, number of rows). An
incremental checkpoint also has ``T/gone``, the keys of deleted rows, with ``T/gone_index``.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edl.ports import Files
from edl.wire.snapshot import Layout, Leaf, Meta
from ps.checkpoint.manifest import BLOCK_BYTES, CheckpointPart, Sums, file_name, flat, ranges
from ps.hashing import buckets_of
from ps.rows import Taken as Taken

FILE_BYTES = 128 << 20
"""A file is closed at this size; about this much is held in memory while a checkpoint is written."""
PIECE_BYTES = 4 << 20
SHARD_BUCKETS = 64
FORMAT_NAME = "ps"
"""Value of the files' framework field."""
DTYPES: Final[Mapping[str, tuple[str, str]]] = {
    "keys": ("<i8", "I64"),
    "weights": ("<f4", "F32"),
    "state": ("<f4", "F32"),
    "frequency": ("<u4", "U32"),
    "updates": ("<u4", "U32"),
    "seen": ("<u4", "U32"),
    "index": ("<u4", "U32"),
    "gone": ("<i8", "I64"),
    "gone_index": ("<u4", "U32"),
}
"""Data type of each array, for numpy and for safetensors."""
COLUMNS = ("keys", "weights", "state", "frequency", "updates", "seen")
"""The arrays that make up ``Rows``."""
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class WriteRate:
    """Write rate limit, so that training keeps its share of the disk."""

    bytes_per_s: float = 0.0
    """0: unlimited."""
    wait: Callable[[float], object] = field(default_factory=lambda: threading.Event().wait)
    now_s: Callable[[], float] = lambda: 0.0


class Throttle:
    """Applies a ``WriteRate`` to one sequence of writes."""

    def __init__(self, pace: WriteRate) -> None:
        self._pace = pace
        self._due_s = pace.now_s() if pace.bytes_per_s else 0.0

    def passed(self, size: int) -> None:
        """Count ``size`` bytes as written and wait until more may be."""
        if not self._pace.bytes_per_s:
            return
        now_s = self._pace.now_s()
        self._due_s = max(self._due_s, now_s - 1.0) + size / self._pace.bytes_per_s
        if self._due_s > now_s:
            self._pace.wait(self._due_s - now_s)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Selected rows of a shard, in a given order."""

    arrays: Mapping[str, Array]
    order: Array | None
    """Indices of the selected rows; None: all rows, in their present order."""
    count: int

    def pieces(self, name: str) -> Iterator[memoryview]:
        array = self.arrays[name]
        if not array.size:
            return
        kind = np.dtype(DTYPES[name][0])
        step = max(1, PIECE_BYTES * len(array) // array.nbytes)
        for start in range(0, self.count, step):
            end = min(self.count, start + step)
            piece = array[start:end] if self.order is None else array[self.order[start:end]]
            yield _bytes(np.ascontiguousarray(piece, kind))


@dataclass
class _Column:
    """The pending content of one table in a file."""

    chunks: list[_Chunk] = field(default_factory=list)
    index: list[Array] = field(default_factory=list)
    gone: list[_Chunk] = field(default_factory=list)
    gone_index: list[Array] = field(default_factory=list)

    def leaves(self, table: str) -> Iterator[Leaf]:
        rows = sum(chunk.count for chunk in self.chunks)
        widths = {name: array.shape[1:] for name, array in self.chunks[0].arrays.items()} if self.chunks else {}
        for name, width in widths.items():
            yield _leaf(table, name, (rows, *width))
        yield _leaf(table, "index", (sum(map(len, self.index)), 2))
        if self.gone:
            yield _leaf(table, "gone", (sum(chunk.count for chunk in self.gone),))
            yield _leaf(table, "gone_index", (sum(map(len, self.gone_index)), 2))

    def pieces(self, name: str) -> Iterator[memoryview]:
        if name in ("index", "gone_index"):
            for array in self.index if name == "index" else self.gone_index:
                if array.size:
                    yield _bytes(np.ascontiguousarray(array, "<u4"))
        else:
            for chunk in self.gone if name == "gone" else self.chunks:
                yield from chunk.pieces(name)


class RowsFile:
    """Rows that will be written as one file."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}
        self.bytes = 0
        self.rows: dict[str, int] = {}

    def add(self, taken: Taken, owned: Array) -> None:
        """Add the rows of the owned buckets. ``owned``: nonzero for those, indexed by bucket."""
        for table, rows in taken.rows.items():
            arrays = {name: getattr(rows, name) for name in COLUMNS}
            chunk, index = _sorted(arrays, owned)
            if chunk is not None:
                column = self._columns.setdefault(table, _Column())
                column.chunks.append(chunk)
                column.index.append(index)
                self.bytes += sum(array.nbytes for array in arrays.values())
                self.rows[table] = self.rows.get(table, 0) + chunk.count
        for table, keys in taken.gone.items():
            chunk, index = _sorted({"keys": keys, "gone": keys}, owned)
            if chunk is not None:
                column = self._columns.setdefault(table, _Column())
                column.gone.append(chunk)
                column.gone_index.append(index)
                self.bytes += keys.nbytes

    def write(self, files: Files, name: str, meta: Meta, tree: Any, throttle: Throttle) -> tuple[int, tuple[int, ...]]:
        """Write the file; return its size in bytes and the checksums of its blocks. Raises ``OSError``."""
        leaves = [leaf for table, column in self._columns.items() for leaf in column.leaves(table)]
        plan = Layout(leaves).plan(meta, tree)
        order = sorted((offset, size, leaf) for leaf, offset, size in plan.leaves)

        def pieces() -> Iterator[memoryview]:
            yield memoryview(plan.header)
            for _, _, leaf in order:
                table, _, array = leaf.rpartition("/")
                yield from self._columns[table].pieces(array)

        sums = _Sums(throttle)
        files.write(name, sums.of(pieces()))
        return plan.size, sums.end()


class PartWriter:
    """Writes one pserver's part of a checkpoint, shard by shard."""

    def __init__(
        self,
        files: Files,
        folder: str,
        part: CheckpointPart,
        *,
        job: str,
        tag: str,
        pace: WriteRate,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        """``part``: has buckets and base set, and no files yet. ``folder``: the checkpoint's."""
        self._files = files
        self._folder = folder
        self._part = part
        self._job = job
        self._tag = tag
        self._throttle = Throttle(pace)
        self._file_bytes = file_bytes
        self._owned = np.zeros(1 << 12, np.uint8)
        self._owned[flat(part.buckets)] = 1
        self._file = RowsFile()
        self._first = 0
        self._end = 0
        self._sums: dict[str, Sums] = {}
        self._rows: dict[str, int] = {}
        self._whole: list[int] = []

    def add(self, taken: Taken) -> None:
        """Add the next shard, in ascending order; write a file once there is enough for one. Raises ``ValueError`` for
        a shard out of order, ``OSError`` when writing fails."""
        first = taken.shard * SHARD_BUCKETS
        if first < self._end:
            raise ValueError(f"shard {taken.shard} is out of order, after bucket {self._end - 1}")
        if not self._part.base:
            self._whole += [one for one in range(first, first + SHARD_BUCKETS) if self._owned[one]]
        else:
            self._whole += [one for one in sorted(taken.whole) if self._owned[one]]
        self._end = first + SHARD_BUCKETS
        self._file.add(taken, self._owned)
        if self._file.bytes >= self._file_bytes:
            self._write()

    def finish(self) -> CheckpointPart:
        """Write the remaining rows; return the part."""
        self._write()
        part = self._part
        return CheckpointPart(
            server=part.server,
            checkpoint=part.checkpoint,
            history=part.history,
            buckets=part.buckets,
            whole=ranges(self._whole),
            base=part.base,
            files=self._sums,
            rows=self._rows,
        )

    def _write(self) -> None:
        file, self._file = self._file, RowsFile()
        first, self._first = self._first, self._end
        if not file.bytes:
            return
        part = self._part
        name = file_name(part.server, self._tag, len(self._sums))
        meta = Meta(self._job, part.history, part.checkpoint, 0, 0, 1, FORMAT_NAME)
        tree = {"server": part.server, "buckets": [first, self._end], "rows": file.rows, "base": part.base}
        size, blocks = file.write(self._files, f"{self._folder}/{name}", meta, tree, self._throttle)
        self._sums[name] = Sums(size, blocks, (first, self._end))
        for table, rows in file.rows.items():
            self._rows[table] = self._rows.get(table, 0) + rows


class _Sums:
    """Computes block checksums of a byte stream while it is written."""

    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        self._blocks: list[int] = []
        self._crc = 0
        self._filled = 0

    def of(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            start = 0
            while start < len(piece):
                end = min(len(piece), start + BLOCK_BYTES - self._filled)
                self._crc = zlib.crc32(piece[start:end], self._crc)
                self._filled += end - start
                start = end
                if self._filled == BLOCK_BYTES:
                    self._blocks.append(self._crc)
                    self._crc = self._filled = 0
            yield piece
            self._throttle.passed(len(piece))

    def end(self) -> tuple[int, ...]:
        if self._filled:
            self._blocks.append(self._crc)
            self._crc = self._filled = 0
        return tuple(self._blocks)


def _sorted(arrays: Mapping[str, Array], owned: Array) -> tuple[_Chunk | None, Array]:
    """Select the rows of owned buckets, ordered by bucket, and count the rows of each bucket."""
    buckets = np.asarray(buckets_of(arrays["keys"]), np.int64)
    keep = owned[buckets] != 0
    order: Array | None = None
    if not keep.all() or (len(buckets) > 1 and (buckets[1:] < buckets[:-1]).any()):
        chosen = np.flatnonzero(keep)
        order = chosen[np.argsort(buckets[chosen].astype(np.uint16), kind="stable")]
        buckets = buckets[order]
    if not len(buckets):
        return None, np.empty((0, 2), np.uint32)
    counts = np.bincount(buckets)
    present = np.flatnonzero(counts)
    return _Chunk(arrays, order, len(buckets)), np.stack([present, counts[present]], 1).astype(np.uint32)


def _leaf(table: str, name: str, shape: Sequence[int]) -> Leaf:
    kind, code = DTYPES[name]
    size = np.dtype(kind).itemsize
    for length in shape:
        size *= length
    return Leaf(f"{table}/{name}", code, tuple(shape), size)


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
