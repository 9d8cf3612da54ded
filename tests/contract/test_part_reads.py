"""Pieces of parts in another node's memory, on the fake transport and over TCP."""

from __future__ import annotations

import contextlib

import pytest

from edl.checkpoint.memory.buffer_table import SnapshotStream
from edl.checkpoint.memory.snapshot_pool import MemorySnapshotPool
from edl.errors import CheckpointError
from edl.ports import Label
from edl.testing.memory_copies import Trouble
from edl.testing.snapshots import make_snapshot
from edl.wire.parts import PartRange
from edl.wire.records import Holding, Version
from tests.support.copies_fixture import SIZE, A, B, Bench, snapshot_pool
from tests.support.spoiling_proxy import HOST


def sequence(into: MemorySnapshotPool, holding: Holding) -> bytes:
    """Put a snapshot with no two equal stretches into the pool; returns its bytes."""
    header = make_snapshot(holding, 0, SIZE)[:-SIZE]
    data = header + b"".join(number.to_bytes(4, "little") for number in range(SIZE // 4))
    arrival = into.incoming(SnapshotStream.of_worker(0, "state"), Label(A, holding, len(data)))
    arrival.view[:] = data
    arrival.accept()
    return data


PART = Holding(Version(1, 2), 3, 4)


def test_pieces_of_a_part_are_read(bench: Bench) -> None:
    there = snapshot_pool(B)
    data = sequence(there, PART)
    port, client = bench.node().start(there, HOST), bench.node()
    header, size = client.header(HOST, port, PART.version, 3)
    assert (header, size) == (data[:-SIZE], len(data))
    places = ((len(data) - 1, 1), (7, 0), (100, 300_000), (0, 8))
    memory = [bytearray(length) for _, length in places]
    pieces = [(PartRange(3, *place), memoryview(one)) for place, one in zip(places, memory, strict=True)]
    client.read(HOST, port, PART.version, 3, pieces)
    assert [bytes(one) for one in memory] == [data[start : start + length] for start, length in places]
    with contextlib.closing(there):
        assert there.usage().replicas == there.usage().loaded == 0, "nothing is kept of it"


def test_no_piece_of_what_is_not_there(bench: Bench) -> None:
    there = snapshot_pool(B)
    data = sequence(there, PART)
    port, client = bench.node().start(there, HOST), bench.node()
    memory = memoryview(bytearray(8))
    for version, shard in ((PART.version, 2), (Version(1, 1), 3)):
        with pytest.raises(CheckpointError, match=f"does not hold shard {shard}"):
            client.header(HOST, port, version, shard)
        with pytest.raises(CheckpointError, match=f"does not hold shard {shard}"):
            client.read(HOST, port, version, shard, [(PartRange(shard, 0, 8), memory)])
    with pytest.raises(CheckpointError, match=f"has {len(data)} bytes"):
        client.read(HOST, port, PART.version, 3, [(PartRange(3, len(data) - 7, 8), memory)])


@pytest.mark.parametrize("trouble", Trouble)
def test_a_piece_spoiled_on_the_way_does_not_count(bench: Bench, trouble: Trouble) -> None:
    there = snapshot_pool(B)
    data = sequence(there, PART)
    port, client = bench.node().start(there, HOST), bench.node()
    memory = bytearray(SIZE)
    pieces = [(PartRange(3, 10, SIZE), memoryview(memory))]
    with pytest.raises(CheckpointError):
        client.read(HOST, bench.spoiled(port, trouble, upwards=False), PART.version, 3, pieces)
    bench.mend()
    client.read(HOST, port, PART.version, 3, pieces)
    assert bytes(memory) == data[10 : 10 + SIZE]
