"""Buffers are there before a commit waits for them."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from typing import Any

import pytest

from edl.checkpoint.memory.buffer_table import BufferRefusal, BufferTable, SnapshotStream, WritableBuffer
from edl.checkpoint.memory.memory_checkpoints import MemoryCheckpoints
from edl.errors import CheckpointError
from edl.pages import populate
from edl.testing.memory_copies import Trouble
from edl.wire.local import OWN, STATE
from edl.wire.records import Version
from edl.worker.prefault import LEAST_BYTES, prefault_in_thread
from tests.support.memory_checkpoints_fixture import LIMIT_S, SIZE, A, B, Bench, Worker, h, piece, run, source, until

LINE = SnapshotStream.of_worker(0, STATE)


def test_with_the_first_buffer_the_second_is_made_and_with_the_first_save_the_third() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        memory.enter(Version(), (A, B), writes=True)
        worker = Worker(memory)
        worker.take(await memory.want(0, STATE, 100_000))
        one = memory.usage().workers
        await memory.made_ahead()
        assert memory.usage().workers == 2 * one
        for commit in (1, 2, 3):
            await worker.commit(commit)
            await memory.made_ahead()
            assert memory.usage().workers == 2 * one, "nobody reads"
        await worker.commit(4, save=True)
        await memory.made_ahead()
        assert memory.usage().workers == 3 * one
        for commit in (5, 6, 7):
            await worker.commit(commit)
            assert h(commit) in memory.holdings() and len(memory.holdings()) < 3
        await memory.made_ahead()
        assert memory.usage().workers == 3 * one

    run(test)


def test_where_commits_will_be_saved_the_third_is_made_before_the_first_save() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        memory.enter(Version(), (A,), writes=True)
        worker = Worker(memory)
        worker.take(await memory.want(0, STATE, 100_000, saves=True))
        one = memory.usage().workers
        await memory.made_ahead()
        assert memory.usage().workers == 3 * one
        for commit in range(1, 6):
            await worker.commit(commit, save=True)
            assert memory.usage().workers == 3 * one, "and no other"

    run(test)


def test_copies_are_readers_too() -> None:
    async def test(bench: Bench) -> None:
        memory, _ = bench.node(), bench.node(B)
        memory.enter(Version(), (A,), writes=False)
        memory.keep_with(B, B, 1)
        worker = Worker(memory)
        await worker.commit(1)
        await memory.made_ahead()
        assert memory.usage().workers > 3 * 100_000

    run(test)


def test_a_commit_is_copied_only_when_there_is_a_buffer_in_which_commits_go_on() -> None:
    async def test(bench: Bench) -> None:
        memory, _ = bench.node(), bench.node(B)
        memory.enter(Version(), (A,), writes=False)
        worker = Worker(memory)
        await worker.commit(1)
        await memory.made_ahead()
        seen = []
        put = memory._replication._copies.put

        def noting(*arguments: Any, **named: Any) -> None:
            seen.append(memory.usage().workers // 100_000)
            put(*arguments, **named)

        memory._replication._copies.put = noting  # type: ignore[method-assign]
        memory.keep_with(B, B, 1)
        assert await bench.copied.get() == B
        assert seen == [3]

    run(test)


def test_a_copy_that_is_wanted_while_the_second_is_made_waits_for_the_third() -> None:
    async def test(bench: Bench) -> None:
        memory, _ = bench.node(), bench.node(B)
        making, may_make = threading.Event(), threading.Event()
        ahead, put = memory._snapshot_pool.ahead, memory._replication._copies.put
        seen = []

        def slow(stream: SnapshotStream, size: int, most: int) -> bool:
            making.set()
            assert may_make.wait(LIMIT_S)
            return ahead(stream, size, most)

        def noting(*arguments: Any, **named: Any) -> None:
            seen.append(memory.usage().workers // SIZE)
            put(*arguments, **named)

        memory._snapshot_pool.ahead = slow  # type: ignore[method-assign]
        memory._replication._copies.put = noting  # type: ignore[method-assign]
        memory.enter(Version(), (A,), writes=False)
        memory.keep_with(B, B, 1)
        worker = Worker(memory)
        worker.take(await memory.want(0, STATE, SIZE + 1000))
        assert await asyncio.to_thread(making.wait, LIMIT_S)
        commit = asyncio.create_task(worker.commit(1))
        await until(lambda: memory.holdings() == (h(1),) and LINE in memory._ahead._read)
        may_make.set()
        assert await bench.copied.get() == B
        await commit
        assert seen == [3]

    run(test)


async def newcomer(bench: Bench, size: int) -> tuple[MemoryCheckpoints, Worker]:
    """Node A with a worker that waits for its world and expects commits of this size, beside B, which has commit 1."""
    there, here = bench.node(B), bench.node()
    await Worker(there).commit(1)
    worker = Worker(here)
    worker.take(await here.want(0, STATE, size, waits=True))
    return here, worker


def test_a_worker_that_waits_for_its_world_gets_memory_for_the_commit_that_it_will_restore_too() -> None:
    async def test(bench: Bench) -> None:
        here, worker = await newcomer(bench, SIZE + 1000)
        before = here.usage()
        assert before.workers > 2 * SIZE, "the answer comes when both are there"
        assert await piece(here, 1, source(B), slot=0) == 1
        assert here.usage() == before, "no other memory"
        assert here.holdings() == (h(1),)
        await worker.commit(2)
        assert set(here.holdings()) >= {h(2)}
        await worker.commit(3)
        await here.made_ahead()
        assert here.usage() == before and h(3) in here.holdings()

    run(test)


@pytest.mark.parametrize("size", [SIZE // 8, 8 * SIZE])
def test_a_commit_of_another_size_than_expected_gets_memory_of_its_own(size: int) -> None:
    async def test(bench: Bench) -> None:
        here, worker = await newcomer(bench, size)
        assert await piece(here, 1, source(B), slot=0) == 1
        assert here.usage().loaded > SIZE
        worker.take(await here.want(0, STATE, SIZE + 1000))
        await worker.commit(2)
        assert here.usage().loaded == 0

    run(test)


def test_a_fetch_that_comes_to_nothing_leaves_the_spare_buffer() -> None:
    async def test(bench: Bench) -> None:
        here, _ = await newcomer(bench, SIZE + 1000)
        before = here.usage()
        bench.network.trouble = Trouble.FLIP
        with pytest.raises(CheckpointError, match="wrong checksum"):
            await piece(here, 1, source(B), slot=0)
        bench.network.trouble = None
        assert here.usage() == before and here.holdings() == ()
        assert await piece(here, 1, source(B), slot=0) == 1
        assert here.usage() == before

    run(test)


def test_what_arrives_after_the_worker_has_committed_is_refused() -> None:
    buffer_table = BufferTable(limit_bytes=10**6)
    assert isinstance(buffer_table.room(LINE, 100_000), WritableBuffer)
    assert buffer_table.take_spare(LINE, 100_000) is None, "there is no other buffer"
    spare = buffer_table.spare(LINE, 100_000, 2)
    assert spare is not None
    buffer_table.pin(spare.buffer)
    buffer_table.unpin(spare.buffer)  # it has its memory
    assert buffer_table.take_spare(LINE, 100_000) == spare.buffer
    assert buffer_table.take_spare(LINE, 100_000) is None, "taken"
    buffer_table.fill(LINE, 100_000, h(2))
    assert "has gone on meanwhile" in buffer_table.adopt(LINE, spare.buffer, 100_000, h(1))
    assert buffer_table.held(LINE)[0].holding == h(2)
    waits = buffer_table.room(LINE, 100_000)
    assert isinstance(waits, WritableBuffer) and waits.buffer != spare.buffer, "somebody may still write to it"
    assert buffer_table.take_spare(SnapshotStream.of_worker(7, STATE), 100_000) is None


def test_values_of_the_slots_own_have_one_more() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        worker = Worker(memory, stream=OWN)
        await worker.commit(1)
        await memory.made_ahead()
        assert 3 * 100_000 < memory.usage().workers < 4 * 100_000

    run(test)


def test_nothing_is_made_ahead_at_the_expense_of_others() -> None:
    buffer_table = BufferTable(limit_bytes=250_000)
    first, other = buffer_table.room(LINE, 100_000), buffer_table.room(SnapshotStream.of_worker(1, STATE), 100_000)
    assert isinstance(first, WritableBuffer) and isinstance(other, WritableBuffer)
    assert buffer_table.spare(LINE, 100_000, 2) is None
    assert buffer_table.spare(SnapshotStream.of_worker(7, STATE), 1000, 2) is None, "of a worker that is gone"


def test_a_commit_waits_for_what_is_being_made_and_makes_no_other() -> None:
    buffer_table = BufferTable(limit_bytes=10**6)
    first = buffer_table.room(LINE, 100_000)
    assert isinstance(first, WritableBuffer)
    spare = buffer_table.spare(LINE, 100_000, 2)
    assert spare is not None and buffer_table.spare(LINE, 100_000, 2) is None
    buffer_table.pin(spare.buffer)
    buffer_table.fill(LINE, 100_000, h(1))
    waits = buffer_table.room(LINE, 100_000)
    assert isinstance(waits, BufferRefusal) and waits.later
    buffer_table.unpin(spare.buffer)
    assert buffer_table.room(LINE, 100_000) == WritableBuffer(spare.buffer, spare.capacity, new=False)


def test_pages_are_mapped_and_keep_what_is_in_them() -> None:
    size = LEAST_BYTES + 4096
    memory = mmap.mmap(-1, size)
    memory[size - 3 :] = b"end"
    view = memoryview(memory)
    if not populate(view):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert bytes(view[-3:]) == b"end"
    assert resident(memory) >= size // 1024
    thread = prefault_in_thread(view)
    assert thread is not None
    thread.join()
    assert prefault_in_thread(view[: LEAST_BYTES - 1]) is None


def resident(memory: mmap.mmap) -> int:
    """KiB of this process that are in memory: at least all of the mapping."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def test_what_may_not_be_written_is_left_alone() -> None:
    assert not populate(memoryview(bytes(LEAST_BYTES)))
