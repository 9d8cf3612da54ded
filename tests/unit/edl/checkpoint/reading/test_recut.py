"""A tensor cut by one mesh, read by the workers of another: every element comes once, from a part that is there.

Which worker has what is computed here by splitting ranges of indices, mesh dimension by mesh dimension, as DTensors are
documented to be split; the values come from slices of one NumPy array.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from edl.checkpoint.reading.assembly import Box, Missing, Spread, StoredArray
from edl.checkpoint.reading.saved_parts import ByteRange, ReadRequest, SavedParts
from edl.wire.snapshot import Entry, SnapshotHeader

PAIRS = 10_000
OFFSET = 24
"""Bytes before the array in each part."""


@dataclass(frozen=True)
class Mesh:
    """Sizes of its dimensions, and for each the tensor's dimension that it divides; None: it has copies."""

    sizes: tuple[int, ...]
    divides: tuple[int | None, ...]

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    def box(self, rank: int, shape: tuple[int, ...]) -> Box:
        ranges = [(0, length) for length in shape]
        place = np.unravel_index(rank, self.sizes)
        for coordinate, size, dim in zip(place, self.sizes, self.divides, strict=True):
            if dim is not None:
                begin, end = ranges[dim]
                each = -(-(end - begin) // size)
                first = min(begin + int(coordinate) * each, end)
                ranges[dim] = first, min(first + each, end)
        return Box(tuple(begin for begin, _ in ranges), tuple(end - begin for begin, end in ranges))

    @classmethod
    def draw(cls, rng: random.Random, dims: int) -> Mesh:
        sizes = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        return cls(sizes, tuple(rng.choice([None, *range(dims)]) for _ in sizes))


class Parts(SavedParts):
    """The living parts of one tensor."""

    def __init__(self, data: Mapping[int, bytes], far: set[int]) -> None:
        super().__init__("the tensor", len(data))
        self.data = data
        self.far = far
        self.read_from: set[int] = set()
        self.read_bytes = 0

    def _header(self, shard: int) -> SnapshotHeader:
        raise NotImplementedError

    def _distance(self, shard: int) -> int:
        return int(shard in self.far)

    def _read(self, reads: Mapping[int, Sequence[ByteRange]]) -> None:
        for shard, ranges in reads.items():
            for one in ranges:
                assert one.start >= OFFSET and one.start + one.size <= len(self.data[shard])
                self.read_from.add(shard)
                self.read_bytes += one.size
                one.take(memoryview(self.data[shard])[one.start : one.start + one.size])


def cells(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(box.offset, box.shape, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_any_mesh_reads_what_any_mesh_has_written(batch: int) -> None:
    for seed in range(batch * PAIRS // 10, (batch + 1) * PAIRS // 10):
        rng = random.Random(seed)
        shape = tuple(rng.randint(0, 9) for _ in range(rng.randint(1, 3)))
        old, new = (Mesh.draw(rng, len(shape)) for _ in range(2))
        tensor = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
        boxes = [old.box(rank, shape) for rank in range(old.ranks)]
        # Any of several equal parts may be gone, as long as one of them is there.
        dead = {rank for rank in range(old.ranks) if boxes[rank] in boxes[:rank] and rng.random() < 0.5}
        alive = sorted(set(range(old.ranks)) - dead)
        far = {rank for rank in alive if rng.random() < 0.7}
        data = {rank: bytes(OFFSET) + tensor[cells(boxes[rank])].tobytes() for rank in alive}
        pieces = []
        for rank in alive:
            entry = Entry("U32", boxes[rank].shape, OFFSET, len(data[rank]) - OFFSET)
            pieces.append((boxes[rank], StoredArray(rank, "x", entry)))
        spread = Spread("x", "U32", shape, tuple(pieces))
        for rank in rng.sample(range(new.ranks), min(2, new.ranks)):
            wanted = new.box(rank, shape)
            times = np.zeros(shape, dtype=int)
            for box, stored in spread.covering(wanted, lambda shard: int(shard in far)):  # noqa: B023 - used at once
                met = box.meet(wanted)
                assert met is not None and box == boxes[stored.shard], seed
                times[cells(met)] += 1
                equal = [other for other in alive if boxes[other] == box]
                assert stored.shard not in far or set(equal) <= far, f"{seed}: a nearer copy was not used"
            assert (times[cells(wanted)] == 1).all() and times.sum() == wanted.volume, seed
            parts = Parts(data, far)
            request, memory = ReadRequest.part_of(spread, wanted)
            parts.fetch([request])
            assert bytes(memory) == tensor[cells(wanted)].tobytes(), seed
            assert parts.read_from <= set(alive), seed
            if all(dim in (None, 0) for dim in (*old.divides, *new.divides)):
                assert parts.read_bytes == len(memory), f"{seed}: rows come once"


def test_a_piece_without_a_living_holder_is_missing() -> None:
    mesh = Mesh((2, 2), (0, None))
    boxes = [mesh.box(rank, (4,)) for rank in range(4)]
    assert boxes == [Box((0,), (2,))] * 2 + [Box((2,), (2,))] * 2
    alive = [(boxes[rank], StoredArray(rank, "x", Entry("U8", (2,), 0, 2))) for rank in (0, 1)]
    with pytest.raises(Missing, match=r"no worker has saved all of x"):
        Spread("x", "U8", (4,), tuple(alive)).covering(Box((1,), (2,)))


def test_all_cells_of_a_world_are_its_tensor() -> None:
    """The model of a mesh that these tests use: its boxes cover the tensor, and equal ones only where it has copies."""
    for seed in range(300):
        rng = random.Random(seed)
        shape = tuple(rng.randint(0, 9) for _ in range(rng.randint(1, 3)))
        mesh = Mesh.draw(rng, len(shape))
        times = np.zeros(shape, dtype=int)
        for rank in range(mesh.ranks):
            times[cells(mesh.box(rank, shape))] += 1
        copies = math.prod(size for size, dim in zip(mesh.sizes, mesh.divides, strict=True) if dim is None)
        assert (times == copies).all(), seed
