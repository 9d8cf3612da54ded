"""Pieces of a commit's parts, from this node's memory and from other nodes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from edl.checkpoint.memory.memory_checkpoints import MemoryCheckpoints
from edl.errors import CheckpointError
from edl.testing.memory_copies import MemoryCopies, Trouble
from edl.testing.snapshots import JOB, make_snapshot
from edl.types import NodeId
from edl.wire import snapshot
from edl.wire.local import STATE
from edl.wire.parts import PartRange, decode_headers
from edl.wire.records import Version
from tests.support.memory_checkpoints_fixture import LIMIT_S, SIZE, A, B, Bench, C, Worker, h, run, source

VERSION = Version(1, 7)


async def two_parts(bench: Bench) -> tuple[MemoryCheckpoints, MemoryCheckpoints]:
    """Node a has part 0 of commit 7, node b part 1 of it."""
    here, there = bench.node(A), bench.node(B)
    await Worker(here).commit(7, shard=0, shards=2)
    await Worker(there).commit(7, shard=1, shards=2)
    return here, there


def test_headers_of_all_parts_come_from_wherever_they_are() -> None:
    async def test(bench: Bench) -> None:
        here, _ = await two_parts(bench)
        found = decode_headers(await here.reading.headers(VERSION, 2, [source(A, 0), source(B, 1)]))
        whole = [make_snapshot(h(7, shard, 2), 7, SIZE) for shard in (0, 1)]
        assert [(one.shard, one.size, one.distance) for one in found] == [
            (0, len(whole[0]), 0),
            (1, len(whole[1]), 1),
        ]
        assert [one.header for one in found] == [data[:-SIZE] for data in whole]

    run(test)


def test_pieces_come_in_the_order_in_which_they_were_asked_for() -> None:
    async def test(bench: Bench) -> None:
        here, _ = await two_parts(bench)
        whole = [make_snapshot(h(7, shard, 2), 7, SIZE) for shard in (0, 1)]
        wanted = [PartRange(1, 0, 900), PartRange(0, 5, 100), PartRange(1, 3, 4), PartRange(0, len(whole[0]) - 1, 1)]
        memory = await here.reading.ranges(VERSION, wanted, [source(A, 0), source(B, 1)])
        assert bytes(memory.view) == b"".join(whole[one.shard][one.start : one.start + one.size] for one in wanted)
        memory.close()
        assert bench.network.served == [f"read {B}:1"], "what is here is not read from elsewhere"
        assert here.usage().loaded == 0

    run(test)


def test_another_holder_is_asked_when_one_does_not_deliver() -> None:
    async def test(bench: Bench) -> None:
        here, there = await two_parts(bench)
        await Worker(bench.node(C)).commit(7, shard=1, shards=2)
        await there.close()
        sources = [source(B, 1), source(C, 1)]
        assert len(decode_headers(await here.reading.headers(VERSION, 2, sources))) == 2
        memory = await here.reading.ranges(VERSION, [PartRange(1, 0, 8)], sources)
        assert bytes(memory.view) == make_snapshot(h(7, 1, 2), 7, SIZE)[:8]
        memory.close()

    run(test)


def kept(note: str) -> bytes:
    """Part 1, with another value beside its array."""
    meta = snapshot.Meta(JOB, 1, 7, 1, 1, 2, "none")
    plan = snapshot.plan([("values", "U8", (256,), 256)], meta, {"note": note})
    return plan.header + bytes(range(256))


@pytest.mark.parametrize(("note", "fits"), [("b", True), ("b" * 100, False)])
def test_the_copy_of_another_holder_is_read_only_if_its_arrays_lie_at_the_same_places(note: str, fits: bool) -> None:
    """The holder that has delivered the header is gone, or too busy to deliver the rest."""

    async def test(bench: Bench) -> None:
        here, first, second = (bench.node(node) for node in (A, B, C))
        for memory, data in ((first, kept("a")), (second, kept(note))):
            worker = Worker(memory)
            grant = worker.take(await memory.want(0, STATE, len(data)))
            worker.maps[grant.buffer][: len(data)] = data
            worker.say(h(7, 1, 2), len(data)).close()
        await Worker(here).commit(7, shard=0, shards=2)
        (_, part) = decode_headers(await here.reading.headers(VERSION, 2, [source(B, 1)]))
        await first.close()
        wanted = [PartRange(1, len(part.header), 256)]
        if not fits:
            with pytest.raises(CheckpointError, match="node c: its copy is laid out in another way"):
                await here.reading.ranges(VERSION, wanted, [source(B, 1), source(C, 1)])
            return
        read = await here.reading.ranges(VERSION, wanted, [source(B, 1), source(C, 1)])
        assert bytes(read.view) == bytes(range(256))
        read.close()

    run(test)


def test_who_joins_a_reading_of_headers_that_fails_has_its_own_sources_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reading was begun in the round before, whose only source is dead; a connection to it ends late."""
    dead = NodeId("dead")
    begun, noticed = threading.Event(), threading.Event()
    header = MemoryCopies.header

    def slow(self: MemoryCopies, host: str, *arguments: Any) -> tuple[bytes, int]:
        if host == dead:
            begun.set()
            assert noticed.wait(LIMIT_S)
            raise CheckpointError("no answer in time")
        return header(self, host, *arguments)

    async def test(bench: Bench) -> None:
        here, _ = await two_parts(bench)
        first = asyncio.create_task(here.reading.headers(VERSION, 2, [source(dead, 1)]))
        await asyncio.to_thread(begun.wait, LIMIT_S)
        later = [asyncio.create_task(here.reading.headers(VERSION, 2, [source(B, 1)])) for _ in range(2)]
        await asyncio.sleep(0)
        noticed.set()
        with pytest.raises(CheckpointError, match="no answer in time"):
            await first
        assert [len(decode_headers(await one)) for one in later] == [2, 2]

    monkeypatch.setattr(MemoryCopies, "header", slow)
    run(test)


def test_headers_are_forgotten_once_workers_train() -> None:
    async def test(bench: Bench) -> None:
        here, _ = await two_parts(bench)
        await here.reading.headers(VERSION, 2, [source(B, 1)])
        assert here.reading._headers is not None
        await Worker(here, 1).commit(8, shard=0, shards=3)
        assert here.reading._headers is None

    run(test)


def test_what_nobody_delivers_is_an_error_that_names_everybody_and_is_tried_again() -> None:
    async def test(bench: Bench) -> None:
        here, _ = await two_parts(bench)
        with pytest.raises(CheckpointError, match=r"no node delivered shard 1 of .*: none is known"):
            await here.reading.headers(VERSION, 2, [source(A, 0)])
        assert len(decode_headers(await here.reading.headers(VERSION, 2, [source(B, 1)]))) == 2
        bench.network.trouble = Trouble.TRUNCATE
        with pytest.raises(CheckpointError, match=f"no node delivered shard 1 of .*: node {B}: .*{B}:1"):
            await here.reading.ranges(VERSION, [PartRange(1, 0, 8)], [source(B, 1)])
        bench.network.trouble = None
        with pytest.raises(CheckpointError, match=r"has .* bytes, 9 from"):
            await here.reading.ranges(VERSION, [PartRange(0, SIZE * 2, 9)], [])

    run(test)
