"""Reads complete checkpoints; every byte is verified before it is used.

A reader of a sharded state reads only the pieces that it needs. The manifest holds a checksum for each 8 MiB of each
file, so a piece is verified without reading the rest. Files are read, not mapped: a disk error then raises an exception
instead of killing the process.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from edl.checkpoint.directory import manifest as text
from edl.checkpoint.directory.manifest import BLOCK_BYTES, MANIFEST_FILE, StateManifest, Sum
from edl.checkpoint.reading.assembly import Box, Spread, StoredArray, merged, runs, width
from edl.errors import CheckpointError
from edl.wire.snapshot import HEADER_BYTES, Meta, header_bytes, parse_header
from edl.worker import tree

READERS = 4
"""Threads that read other workers' files."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Memory to be filled with a part of a tensor, or with an array of a file."""

    source: Spread | StoredArray
    box: Box
    data: memoryview

    @classmethod
    def all_of(cls, source: Spread | StoredArray) -> tuple[ReadRequest, bytearray]:
        """A request for the whole array or tensor, and the memory for it."""
        whole = source.box if isinstance(source, Spread) else _box(source)
        return cls.part_of(source, whole)

    @classmethod
    def part_of(cls, source: Spread | StoredArray, box: Box) -> tuple[ReadRequest, bytearray]:
        """A request for one box of it, and the memory for that."""
        dtype = source.dtype if isinstance(source, Spread) else source.entry.dtype
        memory = bytearray(box.volume * width(dtype))
        return cls(source, box, memoryview(memory)), memory


@dataclass(frozen=True, slots=True)
class _Part:
    meta: Meta
    objects: dict[str, Any]
    values: dict[str, Any]


class Folder:
    """One checkpoint in a folder of a file system."""

    def __init__(self, path: str) -> None:
        """Raises ``CheckpointError`` when it is incomplete, or its files do not match its manifest."""
        self.path = path
        try:
            with open(os.path.join(path, MANIFEST_FILE), "rb") as file:
                self.manifest: StateManifest = text.parse_manifest(file.read())
            sizes = {entry.name: entry.stat().st_size for entry in os.scandir(path) if entry.is_file()}
        except FileNotFoundError:
            raise CheckpointError(f"{path} holds no complete checkpoint: it has no {MANIFEST_FILE}") from None
        except (OSError, CheckpointError) as error:
            raise CheckpointError(f"the checkpoint {path} cannot be read: {error}") from error
        problem = text.why_old_parts(self.manifest) or text.why_sizes_differ(self.manifest, sizes)
        if problem:
            raise CheckpointError(f"the checkpoint {path} cannot be used: {problem}")
        self.shards = self.manifest.shards
        self._parts: dict[int, _Part] = {}
        self._checked: set[str] = set()

    def parts(self, shards: Iterable[int]) -> list[_Part]:
        """The saved states of these workers, with ``StoredArray`` in place of arrays."""
        return [self._part(shard) for shard in shards]

    def object(self, name: str, shards: Iterable[int], *, union: bool) -> Any:
        """An object, merged from the files of these workers; see ``assembly.merged``. Raises ``CheckpointError``."""
        found = [part.objects[name] for part in self.parts(shards) if name in part.objects]
        if not found:
            raise CheckpointError(f"the checkpoint {self.path} does not contain {name}")
        return merged(found, union=union, where=f".{name}")

    def fetch(self, wants: Iterable[ReadRequest]) -> None:
        """Fill the memory of all requests. Raises ``CheckpointError``, and ``assembly.Missing`` when a part is in none
        of the merged files."""
        reads: dict[int, list[tuple[int, int, Callable[[memoryview], None]]]] = {}
        for want in wants:
            for stored, start, size, take in _reads(want):
                reads.setdefault(stored.shard, []).append((start, size, take))

        def read(shard: int) -> None:
            blocks = self._blocks(shard)
            for start, size, take in sorted(reads[shard], key=lambda one: one[:2]):
                take(blocks.read(start, size))

        if len(reads) == 1:
            read(next(iter(reads)))
        elif reads:
            with ThreadPoolExecutor(READERS, "edl-read") as pool:
                list(pool.map(read, sorted(reads)))

    def _part(self, shard: int) -> _Part:
        if shard not in self._parts:
            blocks = self._blocks(shard)
            length = header_bytes(blocks.read(0, HEADER_BYTES))
            try:
                parsed = parse_header(bytes(blocks.read(0, length)), blocks.size)
                text.check_header(parsed.meta, self.manifest, shard)
                objects, values = parsed.tree["objects"], parsed.tree["values"]
            except (CheckpointError, KeyError, TypeError) as error:
                raise CheckpointError(f"{blocks.path} cannot be used: {error}") from error

            def array(name: str, is_numpy: bool) -> StoredArray:
                if name not in parsed.entries:
                    raise CheckpointError(f"{blocks.path} is damaged: array {name!r} is missing")
                return StoredArray(shard, name, parsed.entries[name], is_numpy)

            self._parts[shard] = _Part(parsed.meta, tree.unflatten(objects, array), tree.unflatten(values, array))
        return self._parts[shard]

    def _blocks(self, shard: int) -> _Blocks:
        name = text.state_file(shard, self.shards)
        expected = self.manifest.files.get(name)
        if expected is None:
            raise CheckpointError(f"the manifest of {self.path} does not name {name}")
        blocks = _Blocks(os.path.join(self.path, name), expected)
        if not expected.blocks and name not in self._checked:
            blocks.check_all()
            self._checked.add(name)
        return blocks


class _Blocks:
    """Reads pieces of one file and verifies the blocks that contain them. For one thread; fastest in order of
    offsets."""

    def __init__(self, path: str, expected: Sum) -> None:
        self.path = path
        self.size = expected.bytes
        self._expected = expected
        self._number = -1
        self._block = memoryview(b"")

    def read(self, start: int, size: int) -> memoryview:
        """``size`` bytes from ``start`` on. Raises ``CheckpointError``."""
        if size < 0 or start + size > self.size:
            raise CheckpointError(f"{self.path} is truncated: {self.size} bytes, {start} to {start + size} requested")
        first, last = start // BLOCK_BYTES, (start + max(size, 1) - 1) // BLOCK_BYTES
        if first == last:
            at = start - first * BLOCK_BYTES
            return self._checked(first)[at : at + size]
        found = memoryview(bytearray(size))
        for number in range(first, last + 1):
            block, begin = self._checked(number), number * BLOCK_BYTES
            low, high = max(start, begin), min(start + size, begin + len(block))
            found[low - start : high - start] = block[low - begin : high - begin]
        return found

    def check_all(self) -> None:
        """Verify a whole file that has only one checksum."""
        crc32 = 0
        for start in range(0, self.size, BLOCK_BYTES):
            crc32 = zlib.crc32(self._raw(start, min(BLOCK_BYTES, self.size - start)), crc32)
        self._compare(crc32, self._expected.crc32, "")

    def _checked(self, number: int) -> memoryview:
        if number != self._number:
            start = number * BLOCK_BYTES
            block = self._raw(start, min(BLOCK_BYTES, self.size - start))
            if self._expected.blocks:
                self._compare(zlib.crc32(block), self._expected.blocks[number], f" from byte {start} on")
            self._number, self._block = number, block
        return self._block

    def _raw(self, start: int, size: int) -> memoryview:
        data = memoryview(bytearray(size))
        done = 0
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while done < size and (count := os.preadv(descriptor, [data[done:]], start + done)):
                    done += count
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}") from error
        if done < size:
            raise CheckpointError(f"{self.path} is truncated: {start + done} of {self.size} bytes")
        return data

    def _compare(self, actual: int, expected: int, where: str) -> None:
        if actual != expected:
            raise CheckpointError(
                f"the checksum of {self.path}{where} differs: {actual:08x}, its manifest says {expected:08x}"
            )


def _box(stored: StoredArray) -> Box:
    return Box((0,) * len(stored.entry.shape), stored.entry.shape)


def _reads(want: ReadRequest) -> list[tuple[StoredArray, int, int, Callable[[memoryview], None]]]:
    """The byte ranges to read for a request, and functions that store them."""
    if not want.box.volume:
        return []
    one = want.source
    pieces = [(_box(one), one)] if isinstance(one, StoredArray) else one.covering(want.box)
    return [_read(want, box, stored) for box, stored in pieces]


def _read(
    want: ReadRequest, box: Box, stored: StoredArray
) -> tuple[StoredArray, int, int, Callable[[memoryview], None]]:
    inner = box.meet(want.box) if box.shape else box
    assert inner is not None, "it was chosen because they meet"  # noqa: S101
    size = width(stored.entry.dtype)
    # Rows of the first dimension are consecutive in the file.
    skipped, rows = (inner.offset[0] - box.offset[0], inner.shape[0]) if box.shape else (0, 1)
    row = math.prod(box.shape[1:]) * size
    slab = Box((inner.offset[0], *box.offset[1:]), (rows, *box.shape[1:])) if box.shape else box

    def take(data: memoryview) -> None:
        whole = Box((0,) * len(box.shape), tuple(max(a, b) for a, b in zip(slab.shape, want.box.shape, strict=True)))
        for (source, length), (target, _) in zip(runs(slab, inner, whole), runs(want.box, inner, whole), strict=True):
            want.data[target * size : (target + length) * size] = data[source * size : (source + length) * size]

    return stored, stored.entry.offset + skipped * row, rows * row, take
