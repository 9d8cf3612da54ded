"""Reads complete checkpoints; every byte is verified before it is used.

The manifest holds a checksum for each 8 MiB of each file, so a piece is verified without reading the rest. Files are
read, not mapped: a disk error then raises an exception instead of killing the process.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from edl.checkpoint.directory import manifest as text
from edl.checkpoint.directory.manifest import BLOCK_BYTES, MANIFEST_FILE, StateManifest, Sum
from edl.checkpoint.reading.saved_parts import ByteRange, SavedParts
from edl.errors import CheckpointError
from edl.wire.snapshot import HEADER_BYTES, SnapshotHeader, header_bytes, parse_header

READERS = 4
"""Threads that read other workers' files."""


class Folder(SavedParts):
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
        super().__init__(f"the checkpoint {path}", self.manifest.shards)
        self._checked: set[str] = set()

    def _name(self, shard: int) -> str:
        return os.path.join(self.path, text.state_file(shard, self.shards))

    def _header(self, shard: int) -> SnapshotHeader:
        blocks = self._blocks(shard)
        length = header_bytes(blocks.read(0, HEADER_BYTES))
        try:
            parsed = parse_header(bytes(blocks.read(0, length)), blocks.size)
            text.check_header(parsed.meta, self.manifest, shard)
        except CheckpointError as error:
            raise CheckpointError(f"{blocks.path} cannot be used: {error}") from error
        return parsed

    def _read(self, reads: Mapping[int, Sequence[ByteRange]]) -> None:
        def read(shard: int) -> None:
            blocks = self._blocks(shard)
            for one in reads[shard]:
                one.take(blocks.read(one.start, one.size))

        if len(reads) == 1:
            read(next(iter(reads)))
            return
        with ThreadPoolExecutor(READERS, "edl-read") as pool:
            list(pool.map(read, reads))

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
