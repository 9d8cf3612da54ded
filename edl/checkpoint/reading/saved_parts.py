"""The parts that the workers of one world saved of one commit, read by a worker of another world.

A worker reads only the pieces that it needs. It first reads the header of every part, which says where the arrays are;
``fetch`` then fills the memory of all requests at once. Where the bytes come from is the subclass's business.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edl.checkpoint.reading.assembly import Box, Spread, StoredArray, merged, runs, width
from edl.errors import CheckpointError
from edl.wire.snapshot import Meta, SnapshotHeader
from edl.worker import tree


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Memory to be filled with a part of a tensor, or with an array of a part."""

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
class ByteRange:
    """Bytes of one part, and the function that stores them."""

    start: int
    size: int
    take: Callable[[memoryview], None]


@dataclass(frozen=True, slots=True)
class SavedPart:
    """The structure of one part, with ``StoredArray`` in place of arrays."""

    meta: Meta
    objects: dict[str, Any]
    values: dict[str, Any]


class SavedParts(abc.ABC):
    """All parts of one commit."""

    def __init__(self, what: str, shards: int) -> None:
        """``what`` names the commit in messages."""
        self.what = what
        self.shards = shards
        self._parts: dict[int, SavedPart] = {}

    @abc.abstractmethod
    def _header(self, shard: int) -> SnapshotHeader:
        """The header of a part. Raises ``CheckpointError``."""

    @abc.abstractmethod
    def _read(self, reads: Mapping[int, Sequence[ByteRange]]) -> None:
        """Read these ranges, by shard and in order of their starts. Raises ``CheckpointError``."""

    def _name(self, shard: int) -> str:
        """Names a part in messages."""
        return f"shard {shard} of {self.what}"

    def _distance(self, shard: int) -> int:
        """How far away a part is. Of parts with the same piece of a tensor the nearest is read."""
        return 0

    def parts(self, shards: Iterable[int]) -> list[SavedPart]:
        """The saved states of these workers."""
        return [self._part(shard) for shard in shards]

    def object(self, name: str, shards: Iterable[int], *, union: bool) -> Any:
        """An object, merged from the parts of these workers; see ``assembly.merged``. Raises ``CheckpointError``."""
        found = [part.objects[name] for part in self.parts(shards) if name in part.objects]
        if not found:
            raise CheckpointError(f"{self.what} does not contain {name}")
        return merged(found, union=union, where=f".{name}")

    def fetch(self, wants: Iterable[ReadRequest]) -> None:
        """Fill the memory of all requests. Raises ``CheckpointError``, and ``assembly.Missing`` when a piece is in none
        of the merged parts."""
        reads: dict[int, list[ByteRange]] = {}
        for want in wants:
            for stored, one in byte_ranges(want, self._distance):
                reads.setdefault(stored.shard, []).append(one)
        if reads:
            self._read({shard: sorted(reads[shard], key=lambda one: (one.start, one.size)) for shard in sorted(reads)})

    def _part(self, shard: int) -> SavedPart:
        if shard not in self._parts:
            parsed = self._header(shard)
            try:
                objects, values = parsed.tree["objects"], parsed.tree["values"]
            except (KeyError, TypeError) as error:
                raise CheckpointError(f"{self._name(shard)} cannot be used: {error}") from error

            def array(name: str, is_numpy: bool) -> StoredArray:
                if name not in parsed.entries:
                    raise CheckpointError(f"{self._name(shard)} is damaged: array {name!r} is missing")
                return StoredArray(shard, name, parsed.entries[name], is_numpy)

            self._parts[shard] = SavedPart(parsed.meta, tree.unflatten(objects, array), tree.unflatten(values, array))
        return self._parts[shard]


def byte_ranges(want: ReadRequest, distance: Callable[[int], int]) -> list[tuple[StoredArray, ByteRange]]:
    """The bytes to read for a request. ``distance``: how far away a shard is."""
    if not want.box.volume:
        return []
    one = want.source
    pieces = [(_box(one), one)] if isinstance(one, StoredArray) else one.covering(want.box, distance)
    return [(stored, _byte_range(want, box, stored)) for box, stored in pieces]


def _box(stored: StoredArray) -> Box:
    return Box((0,) * len(stored.entry.shape), stored.entry.shape)


def _byte_range(want: ReadRequest, box: Box, stored: StoredArray) -> ByteRange:
    inner = box.meet(want.box) if box.shape else box
    assert inner is not None, "it was chosen because they meet"  # noqa: S101
    size = width(stored.entry.dtype)
    # Rows of the first dimension are consecutive in the part.
    skipped, rows = (inner.offset[0] - box.offset[0], inner.shape[0]) if box.shape else (0, 1)
    row = math.prod(box.shape[1:]) * size
    slab = Box((inner.offset[0], *box.offset[1:]), (rows, *box.shape[1:])) if box.shape else box

    def take(data: memoryview) -> None:
        whole = Box((0,) * len(box.shape), tuple(max(a, b) for a, b in zip(slab.shape, want.box.shape, strict=True)))
        for (source, length), (target, _) in zip(runs(slab, inner, whole), runs(want.box, inner, whole), strict=True):
            want.data[target * size : (target + length) * size] = data[source * size : (source + length) * size]

    return ByteRange(stored.entry.offset + skipped * row, rows * row, take)
