"""Writes and reads files of a checkpoint with their checksums."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from edl.checkpoint.directory.manifest import BLOCK_BYTES, Sum
from edl.ports import Files
from edl.wire.snapshot import HEADER_BYTES, Meta, header_bytes, parse_header

CHUNK_BYTES = BLOCK_BYTES
"""If it were much larger, the checksum would read from memory what is still in the CPU cache now."""


class SummedFiles:
    """The files of one checkpoint directory. All calls block and raise ``OSError``."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def put(self, name: str, snapshot: memoryview, *, of_part: bool = False) -> tuple[Sum, str]:
        """Write a file and return its checksums, those of a part of a sharded state also by block, and its stamp. A
        file that is there stays: raises ``FileExistsError``."""
        crc, blocks = 0, [0] * -(-len(snapshot) // BLOCK_BYTES if of_part else 0)

        def pieces() -> Iterator[memoryview]:
            nonlocal crc
            start = 0
            while start < len(snapshot):
                piece = snapshot[start : min(start + CHUNK_BYTES, (start // BLOCK_BYTES + 1) * BLOCK_BYTES)]
                crc = zlib.crc32(piece, crc)
                if of_part:
                    blocks[start // BLOCK_BYTES] = zlib.crc32(piece, blocks[start // BLOCK_BYTES])
                start += len(piece)
                yield piece

        stamp = self._files.write(name, pieces(), new=True)
        return Sum(len(snapshot), crc, tuple(blocks)), stamp

    def sum(self, path: str, size: int, into: memoryview | None = None) -> Sum:
        """Read a file, into the buffer if there is one, and compute its size and checksum."""
        crc = done = 0
        chunk = memoryview(bytearray(min(CHUNK_BYTES, size))) if into is None else into
        while done < size:
            start = 0 if into is None else done
            piece = chunk[start : start + min(CHUNK_BYTES, size - done)]
            count = self._files.read_into(path, done, piece)
            crc = zlib.crc32(piece[:count], crc)
            done += count
            if count < len(piece):
                break
        return Sum(done, crc)

    def meta(self, path: str, size: int) -> Meta:
        """The metadata in a state file's header. Raises ``CheckpointError`` if it is not one of this size."""
        start = bytearray(min(size, HEADER_BYTES))
        self._files.read_into(path, 0, memoryview(start))
        length = header_bytes(memoryview(start))
        header = bytearray(min(length, size))
        self._files.read_into(path, 0, memoryview(header))
        return parse_header(bytes(header), size).meta
