"""Reading checkpoints, by any number of pservers: each reads the rows of its own buckets and verifies every block.

Invalid files raise ``CheckpointError`` with only the reason.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edl.checkpoint.directory.failures import why
from edl.errors import CheckpointError
from edl.ports import Files
from edl.wire.snapshot import SnapshotHeader, header_bytes, parse_header
from ps.checkpoint.manifest import BLOCK_BYTES, CheckpointManifest, CheckpointPart, Sums, flat
from ps.checkpoint.writer import COLUMNS, DTYPES, SHARD_BUCKETS
from ps.hashing import buckets_of
from ps.rows import Rows
from ps.spec import BUCKETS, TableSpec
from ps.store.rules import slots_of

CACHE_BYTES = 64 << 20
"""Cache of verified blocks: neighbouring reads often share one."""
AHEAD_BLOCKS = 16
"""Blocks fetched in one request from an object store, where the latency of a request dominates."""
SPAN_ROWS = 4096
"""Gaps of up to this many rows are read through instead of skipped."""
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The restored rows of some buckets of one shard."""

    shard: int
    buckets: tuple[int, ...]
    rows: Mapping[str, Rows]


@dataclass(frozen=True, slots=True)
class Complete:
    """A complete checkpoint: its manifest, and its parts by file name."""

    run: str
    manifest: CheckpointManifest
    parts: Mapping[str, CheckpointPart]


class VerifiedBlocks:
    """Reads files in blocks, caches the blocks and verifies their checksums."""

    def __init__(self, files: Files, most_bytes: int = CACHE_BYTES) -> None:
        self._files = files
        self._most = max(1, most_bytes // BLOCK_BYTES)
        self._kept: collections.OrderedDict[tuple[str, int], Array] = collections.OrderedDict()
        self.bytes_read = 0

    def read(self, path: str, sums: Sums, offset: int, size: int) -> Array:
        """Read a range of bytes of a file. Raises ``CheckpointError`` if it is truncated, damaged or unreadable."""
        first, end = offset // BLOCK_BYTES, -(-(offset + size) // BLOCK_BYTES)
        if offset + size > sums.bytes:
            raise CheckpointError(f"{path} is too short: byte {offset + size} is needed, it has {sums.bytes}")
        if end - first <= 2:
            found = np.empty(size, np.uint8)
            for block in range(first, end):
                self._copy(self._block(path, sums, block), block, found, offset)
            return found
        # Long ranges are read directly into the result, without the cache.
        found = np.empty((end - first) * BLOCK_BYTES, np.uint8)
        count = min(end * BLOCK_BYTES, sums.bytes) - first * BLOCK_BYTES
        self._fill(path, sums, first, found[:count])
        return found[offset - first * BLOCK_BYTES :][:size]

    def _block(self, path: str, sums: Sums, block: int) -> Array:
        kept = self._kept.get((path, block))
        if kept is not None:
            self._kept.move_to_end((path, block))
            return kept
        ahead = AHEAD_BLOCKS if self._files.remote else 1
        end = min(len(sums.blocks), block + ahead)
        found = np.empty(min(end * BLOCK_BYTES, sums.bytes) - block * BLOCK_BYTES, np.uint8)
        self._fill(path, sums, block, found)
        for one in range(block, end):
            start = (one - block) * BLOCK_BYTES
            self._kept[path, one] = found[start : start + BLOCK_BYTES]
        while len(self._kept) > max(self._most, ahead):
            self._kept.popitem(last=False)
        return found[:BLOCK_BYTES]

    def _fill(self, path: str, sums: Sums, first: int, into: Array) -> None:
        try:
            count = self._files.read_into(path, first * BLOCK_BYTES, into.data)
        except OSError as error:
            raise CheckpointError(f"unreadable: {why(error)}") from error
        self.bytes_read += count
        if count < len(into):
            raise CheckpointError(f"{path} is truncated: {first * BLOCK_BYTES + count} of {sums.bytes} bytes")
        for number, start in enumerate(range(0, len(into), BLOCK_BYTES), first):
            crc = zlib.crc32(into[start : start + BLOCK_BYTES].data)
            if crc != sums.blocks[number]:
                where = f"bytes {number * BLOCK_BYTES} to {number * BLOCK_BYTES + len(into[start:][:BLOCK_BYTES])}"
                raise CheckpointError(
                    f"the checksum of {path}, {where}, differs: {crc:08x} instead of {sums.blocks[number]:08x}"
                )

    @staticmethod
    def _copy(data: Array, block: int, into: Array, offset: int) -> None:
        start = block * BLOCK_BYTES
        low, high = max(offset, start), min(offset + len(into), start + len(data))
        into[low - offset : high - offset] = data[low - start : high - start]


class RowsIn:
    """An open row file: its header and its index."""

    def __init__(self, blocks: VerifiedBlocks, path: str, sums: Sums, tables: Mapping[str, TableSpec] | None) -> None:
        """``tables``: expected tables, to validate against; None to accept any."""
        self._blocks = blocks
        self._path = path
        self._sums = sums
        length = header_bytes(bytes(blocks.read(path, sums, 0, min(8, sums.bytes))))
        if length > sums.bytes:
            raise CheckpointError(f"{path} is truncated: its header ends at byte {length} of {sums.bytes}")
        self.snapshot: SnapshotHeader = parse_header(bytes(blocks.read(path, sums, 0, length)), sums.bytes)
        self.tables = sorted({name.rpartition("/")[0] for name in self.snapshot.entries})
        self._index: dict[str, Array] = {}
        for table in self.tables:
            if tables is not None:
                self._check(table, tables)
            for name in ("index", "gone_index"):
                self._read_index(f"{table}/{name}")

    def rows(self, table: str, wanted: Array) -> Rows | None:
        """Rows of the wanted buckets (one flag per bucket), which must lie in one shard; None if there are none."""
        parts = [
            Rows(**{name: self._array(f"{table}/{name}", start, end) for name in COLUMNS})
            for start, end in self._spans(f"{table}/index", wanted)
        ]
        return _only(parts, wanted) if parts else None

    def gone(self, table: str, wanted: Array) -> Array | None:
        """Keys of deleted rows in the wanted buckets; None if there are none."""
        if f"{table}/gone" not in self.snapshot.entries:
            return None
        spans = self._spans(f"{table}/gone_index", wanted)
        keys = [self._array(f"{table}/gone", start, end) for start, end in spans]
        if not keys:
            return None
        found: Array = np.concatenate(keys)
        return found[wanted[buckets_of(found)]]

    def all(self, table: str, step: int) -> Iterator[Rows]:
        """Iterate over all rows of a table, ``step`` at a time."""
        entry = self.snapshot.entries.get(f"{table}/keys")
        count = entry.shape[0] if entry is not None else 0
        for start in range(0, count, step):
            end = min(count, start + step)
            yield Rows(**{name: self._array(f"{table}/{name}", start, end) for name in COLUMNS})

    def _spans(self, name: str, wanted: Array) -> list[tuple[int, int]]:
        """Ranges of entries that cover the wanted buckets; they may include a few unwanted ones."""
        index = self._index.get(name)
        if index is None or not len(index):
            return []
        ends = np.cumsum(index[:, 1], dtype=np.int64)
        found: list[tuple[int, int]] = []
        for place in np.flatnonzero(wanted[index[:, 0]]):
            start, end = int(ends[place] - index[place, 1]), int(ends[place])
            if found and start - found[-1][1] <= SPAN_ROWS:
                found[-1] = (found[-1][0], end)
            else:
                found.append((start, end))
        return found

    def _array(self, name: str, start: int, end: int) -> Array:
        entry = self.snapshot.entries[name]
        kind = np.dtype(DTYPES[name.rpartition("/")[2]][0])
        width = entry.size // entry.shape[0] if entry.shape[0] else 0
        data = self._blocks.read(self._path, self._sums, entry.offset + start * width, (end - start) * width)
        return data.view(kind).reshape(end - start, *entry.shape[1:])

    def _read_index(self, name: str) -> None:
        entry = self.snapshot.entries.get(name)
        if entry is None:
            return
        index = self._array(name, 0, entry.shape[0])
        rows = self.snapshot.entries.get(name.replace("index", "keys") if name.endswith("/index") else name[:-6])
        count = rows.shape[0] if rows is not None else 0
        rises = bool((np.diff(index[:, 0].astype(np.int64)) > 0).all()) and (not len(index) or index[-1, 0] < BUCKETS)
        if not rises or int(index[:, 1].sum(dtype=np.int64)) != count:
            raise CheckpointError(f"damaged: the index {name} of {self._path} does not match its {count} rows")
        self._index[name] = index

    def _check(self, table: str, tables: Mapping[str, TableSpec]) -> None:
        spec, entries = tables.get(table), self.snapshot.entries
        if spec is None:
            raise CheckpointError(f"{self._path} has rows of table {table}, which is not in the manifest")
        if f"{table}/keys" not in entries:
            return
        for name in COLUMNS:
            entry = entries.get(f"{table}/{name}")
            kind = DTYPES[name][1]
            if entry is None or entry.dtype != kind or entry.shape[:1] != entries[f"{table}/keys"].shape:
                raise CheckpointError(f"damaged: {self._path} has no valid {table}/{name}")
        if entries[f"{table}/weights"].shape[1:] != (spec.dim,):
            raise CheckpointError(f"damaged: {self._path} has rows of table {table} that are not of dim {spec.dim}")
        slots = slots_of(spec.optimizer.rule, spec.dim)
        if entries[f"{table}/state"].shape[1:] != (slots,):
            raise CheckpointError(f"damaged: {self._path} has rows of table {table} without {slots} numbers of state")


class CheckpointReader:
    """Reads the rows of any buckets of a checkpoint, from its own files and those of its base checkpoints."""

    def __init__(self, files: Files, chain: Sequence[Complete], mine: Array, tables: Collection[str] = ()) -> None:
        """``chain``: the checkpoint, then its base, and so on. ``mine``: nonzero for the wanted buckets. ``tables``:
        only these; empty means all. Raises ``CheckpointError`` if a bucket is nowhere written in full."""
        self._blocks = VerifiedBlocks(files)
        self._tables = frozenset(tables)
        self._specs = {spec.name: spec for spec in chain[0].manifest.tables}
        needed = mine != 0
        self._layers: list[tuple[Complete, str, CheckpointPart, Array]] = []
        for found in chain:
            before = needed.copy()
            for name, part in found.parts.items():
                wanted = np.zeros(BUCKETS, np.bool_)
                wanted[flat(part.buckets)] = True
                wanted &= before
                if wanted.any():
                    self._layers.append((found, name, part, wanted))
                needed[flat(part.whole)] = False
        if needed.any():
            raise CheckpointError(
                f"bucket {int(np.flatnonzero(needed)[0])} is not written in full in any of its checkpoints"
            )
        self._layers.reverse()
        self._mine = mine != 0
        self._open: collections.OrderedDict[str, RowsIn] = collections.OrderedDict()

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return self._blocks.bytes_read

    def pieces(self) -> Iterator[Loaded]:
        """Iterate over the shards. A shard that has wanted buckets but no rows is included."""
        for shard in range(BUCKETS // SHARD_BUCKETS):
            first = shard * SHARD_BUCKETS
            buckets = first + np.flatnonzero(self._mine[first : first + SHARD_BUCKETS])
            if len(buckets):
                yield Loaded(shard, tuple(map(int, buckets)), self._shard(first))

    def _shard(self, first: int) -> dict[str, Rows]:
        layers: dict[str, list[tuple[Array, Rows | None]]] = {}
        for found, name, part, every in self._layers:
            wanted = np.zeros(BUCKETS, np.bool_)
            wanted[first : first + SHARD_BUCKETS] = every[first : first + SHARD_BUCKETS]
            if wanted.any():
                self._take(found, name, part, wanted, layers)
        return {table: rows for table, one in layers.items() if (rows := merged(one)) is not None}

    def _take(
        self,
        found: Complete,
        name: str,
        part: CheckpointPart,
        wanted: Array,
        layers: dict[str, list[tuple[Array, Rows | None]]],
    ) -> None:
        low, high = int(np.flatnonzero(wanted)[0]), int(np.flatnonzero(wanted)[-1])
        for file, sums in part.files.items():
            if not (sums.buckets[0] <= high and low < sums.buckets[1]):
                continue
            path = f"{found.run}/{file}"
            opened = self._open.get(path)
            if opened is None:
                opened = self._open[path] = RowsIn(self._blocks, path, sums, self._specs)
                meta, manifest = opened.snapshot.meta, found.manifest
                if (meta.job, meta.commit, meta.era) != (manifest.job, manifest.checkpoint, part.history):
                    raise CheckpointError(
                        f"{path} is of job {meta.job}, checkpoint {meta.commit}; {name} contradicts that"
                    )
                while len(self._open) > 256:
                    self._open.popitem(last=False)
            for table in opened.tables if not self._tables else self._tables.intersection(opened.tables):
                rows, gone = opened.rows(table, wanted), opened.gone(table, wanted)
                if rows is not None or gone is not None:
                    keys = gone if gone is not None else np.empty(0, np.int64)
                    layers.setdefault(table, []).append((keys, rows))


def merged(layers: Sequence[tuple[Array, Rows | None]]) -> Rows | None:
    """Apply layers of changes, oldest first. Each layer is the keys of deleted rows, then new or changed rows."""
    if len(layers) == 1:
        return layers[0][1]
    rows = [one for _, one in layers if one is not None]
    if not rows:
        return None
    keys, place = [], []
    at = 0
    for gone, some in layers:
        keys.append(gone)
        place.append(np.full(len(gone), -1, np.int64))
        if some is not None:
            keys.append(some.keys)
            place.append(np.arange(at, at + len(some.keys), dtype=np.int64))
            at += len(some.keys)
    every, where = np.concatenate(keys), np.concatenate(place)
    _, last = np.unique(every[::-1], return_index=True)
    chosen = where[len(every) - 1 - last]
    chosen = np.sort(chosen[chosen >= 0])
    if not len(chosen):
        return None
    return Rows(**{name: np.concatenate([getattr(one, name) for one in rows])[chosen] for name in COLUMNS})


def _only(parts: Sequence[Rows], wanted: Array) -> Rows:
    """Concatenate rows and keep only those of the wanted buckets."""
    arrays = {name: _joined([getattr(part, name) for part in parts]) for name in COLUMNS}
    keep = wanted[buckets_of(arrays["keys"])]
    return Rows(**(arrays if keep.all() else {name: array[keep] for name, array in arrays.items()}))


def _joined(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
