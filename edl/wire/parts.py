"""The parts of a commit, as a worker of another world needs them to restore a sharded state.

An agent sends a worker the header of every part (``PartHeader``); the worker answers with the ranges of bytes that it
needs (``PartRange``). Both travel in memory files. All numbers are signed 64-bit integers, little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from edl.errors import CheckpointError, ProtocolError

_COUNT = struct.Struct("<q")
_HEADER = struct.Struct("<4q")
_RANGE = struct.Struct("<3q")


@dataclass(frozen=True, slots=True)
class PartHeader:
    """What a worker must know of a part before it can choose."""

    shard: int
    size: int
    """Bytes of the whole part."""
    distance: int
    """0: in the memory of this worker's launcher; 1: of another one."""
    header: bytes
    """See ``edl.wire.snapshot``."""


@dataclass(frozen=True, slots=True)
class PartRange:
    """Bytes of one part."""

    shard: int
    start: int
    size: int


def check_ranges(ranges: Sequence[PartRange], size: int, what: str) -> None:
    """Raise ``CheckpointError`` for a range beyond the end of a part of ``size`` bytes. ``what`` names the part."""
    for one in ranges:
        if one.start + one.size > size:
            raise CheckpointError(f"{what} has {size} bytes, {one.size} from {one.start} on requested")


def encode_headers(parts: Sequence[PartHeader]) -> bytes:
    """The content of the memory file."""
    table = [_HEADER.pack(one.shard, one.size, one.distance, len(one.header)) for one in parts]
    return b"".join([_COUNT.pack(len(parts)), *table, *(one.header for one in parts)])


def decode_headers(data: bytes | memoryview) -> tuple[PartHeader, ...]:
    """The inverse of ``encode_headers``. Raises ``ProtocolError``."""
    found = []
    try:
        (count,) = _COUNT.unpack_from(data)
        at = _COUNT.size + count * _HEADER.size
        for number in range(count):
            shard, size, distance, length = _HEADER.unpack_from(data, _COUNT.size + number * _HEADER.size)
            if length < 0 or at + length > len(data):
                raise ProtocolError(f"the header of shard {shard} ends beyond the {len(data)} bytes received")
            found.append(PartHeader(shard, size, distance, bytes(data[at : at + length])))
            at += length
    except struct.error as error:
        raise ProtocolError(f"not a table of headers: {error}") from error
    return tuple(found)


def encode_ranges(ranges: Sequence[PartRange]) -> bytes:
    """The content of the memory file."""
    return b"".join(_RANGE.pack(one.shard, one.start, one.size) for one in ranges)


def decode_ranges(data: bytes | memoryview) -> tuple[PartRange, ...]:
    """The inverse of ``encode_ranges``. Raises ``ProtocolError``."""
    if len(data) % _RANGE.size:
        raise ProtocolError(f"{len(data)} bytes are no whole number of ranges")
    found = tuple(PartRange(*numbers) for numbers in _RANGE.iter_unpack(data))
    wrong = next((one for one in found if min(one.shard, one.start, one.size) < 0), None)
    if wrong is not None:
        raise ProtocolError(f"not a range: {wrong}")
    return found
