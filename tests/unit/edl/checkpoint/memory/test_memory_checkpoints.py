"""Commits of workers are kept, and restored."""

from __future__ import annotations

import asyncio
import mmap
import os
from typing import Any

import pytest

from edl.checkpoint.memory import memory_files
from edl.checkpoint.memory.buffer_table import BufferRefusal
from edl.checkpoint.memory.memory_checkpoints import BufferGrant
from edl.errors import CheckpointError, ProtocolError
from edl.testing.snapshots import fill_of, make_snapshot
from edl.wire.local import OWN, STATE, Committed
from edl.wire.records import Version
from tests.support.memory_checkpoints_fixture import LIMIT_S, SIZE, A, B, Bench, Worker, content, h, piece, run, until


def test_a_commit_is_held_and_given_back() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        worker = Worker(memory)
        for commit in (1, 2, 3):
            await worker.commit(commit)
            assert h(commit) in memory.holdings()
            assert await piece(memory, commit) == commit
        assert len(worker.maps) == 2

    run(test)


def test_a_half_written_buffer_harms_nothing_and_the_next_worker_starts_afresh() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        first = Worker(memory)
        for commit in (1, 2):
            await first.commit(commit)
        assert first.grant is not None
        first.maps[first.grant.buffer][:5000] = b"x" * 5000
        memory.forget_worker(0)
        assert memory.holdings() == (h(2),)
        assert await piece(memory, 2) == 2
        second = Worker(memory)
        for commit in (3, 4):
            await second.commit(commit)
        assert await piece(memory, 4) == 4
        assert memory.usage().workers < 3 * SIZE

    run(test)


def test_what_a_dead_worker_was_writing_is_memory_for_others() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node(limit_bytes=5 * SIZE // 2)
        await Worker(memory).commit(1)
        assert isinstance(await memory.want(1, STATE, SIZE), BufferRefusal)
        memory.forget_worker(0)
        Worker(memory, 1).take(await memory.want(1, STATE, SIZE))
        assert memory.holdings() == (h(1),)

    run(test)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"buffer": 99}, "was not granted"),
        ({"size": 10**9}, "cannot be in buffer"),
        ({"size": 5000}, "truncated"),
        ({"commit": 9}, "holds"),
        ({"shard": 1, "shards": 2}, "holds"),
        ({"stream": OWN}, "was not granted"),
    ],
)
def test_a_commit_that_is_not_what_it_says_does_not_count(change: dict[str, Any], problem: str) -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        worker = Worker(memory)
        await worker.commit(1)
        assert worker.grant is not None
        size = worker.fill(h(2), 2)
        fields = {"stream": STATE, "buffer": worker.grant.buffer, "size": size, "era": 1, "commit": 2}
        message = Committed(**(fields | {"shard": 0, "shards": 1, "save": False} | change))  # type: ignore[arg-type]
        with pytest.raises(ProtocolError, match=problem):
            memory.committed(0, message)
        assert memory.holdings() == (h(1),)
        worker.take(await worker.say(h(2), size))
        assert await piece(memory, 2) == 2

    run(test)


def test_a_commit_never_goes_back() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        worker = Worker(memory)
        await worker.commit(5, era=2)
        with pytest.raises(ProtocolError, match="cannot come after"):
            await worker.commit(6, era=1)
        assert memory.holdings() == (h(5, era=2),)

    run(test)


def test_another_jobs_snapshot_does_not_count() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        worker = Worker(memory)
        grant = worker.take(await memory.want(0, STATE, 9000))
        data = make_snapshot(h(1), 1, job="other")
        worker.maps[grant.buffer][: len(data)] = data
        with pytest.raises(ProtocolError, match="belongs to job 'other'"):
            await worker.say(h(1), len(data))
        assert memory.holdings() == ()

    run(test)


def test_own_values_stay_with_their_slot_and_the_ones_before_too() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        workers = [Worker(memory, slot, OWN) for slot in (0, 1)]
        for commit in (1, 2, 3):
            for worker in workers:
                await worker.commit(commit + 10 * worker.slot)
        assert memory.holdings() == ()
        for commit in (12, 13):
            assert content(await memory.piece(1, OWN, Version(1, commit), 0)) == commit
        with pytest.raises(CheckpointError, match="slot 1 has no values of its own"):
            await memory.piece(1, OWN, Version(1, 3), 0)

    run(test)


def test_of_a_sharded_state_two_earlier_commits_stay_until_there_is_to_be_a_next_one() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        workers = [Worker(memory, slot) for slot in (0, 1)]
        for commit in (1, 2, 3):
            for worker in workers:
                await worker.commit(commit, shard=worker.slot, shards=2)
        assert memory.holdings() == tuple(h(commit, shard, 2) for commit in (1, 2, 3) for shard in (0, 1))
        assert await piece(memory, 1, shard=1) == 1
        for worker in workers:
            worker.take(await memory.want(worker.slot, STATE, SIZE))
        assert memory.holdings() == tuple(h(commit, shard, 2) for commit in (2, 3) for shard in (0, 1))
        assert await piece(memory, 2, shard=1) == 2

    run(test)


def test_what_a_worker_reads_is_not_written_until_it_says_so() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        worker = Worker(memory)
        await worker.commit(1)
        descriptor, size = await memory.piece(1, STATE, Version(1, 1), 0)
        for commit in (2, 3, 4, 5):
            await worker.commit(commit)
        assert fill_of(os.pread(descriptor, size, 0)) == 1
        memory.restored(1)
        for commit in (6, 7, 8):
            await worker.commit(commit)
        assert content((descriptor, size)) != 1

    run(test)


def test_what_a_worker_gets_to_read_it_cannot_write() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        await Worker(memory).commit(1)
        descriptor, size = await memory.piece(0, STATE, Version(1, 1), 0)
        with pytest.raises(OSError, match="descriptor"):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, size)
        os.close(descriptor)

    run(test)


def test_a_worker_cannot_take_the_pages_away() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        grant = await memory.want(0, STATE, SIZE)
        assert isinstance(grant, BufferGrant)
        assert grant.descriptor is not None
        for size in (0, 10 * SIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(grant.descriptor, size)
        os.close(grant.descriptor)

    run(test)


def test_too_little_memory_is_said_with_numbers() -> None:
    async def test(bench: Bench) -> None:
        refusal = await bench.node(limit_bytes=SIZE).want(0, STATE, 2 * SIZE)
        assert isinstance(refusal, BufferRefusal)
        assert "slot 0 (stream state) asks for 200 KiB; of 97.7 KiB (--state-memory)" in refusal.why

    run(test)


def test_a_shortage_ends_with_the_worker_that_had_it() -> None:
    async def test(bench: Bench) -> None:
        said: list[str] = []
        memory = bench.node(limit_bytes=SIZE, on_room=said.append)
        assert isinstance(await memory.want(0, STATE, 2 * SIZE), BufferRefusal)
        memory.forget_worker(0)
        assert len(said) == 2 and said[1] == "", said

    run(test)


@pytest.mark.parametrize("shards", [1, 2])
def test_what_a_slot_has_kept_goes_once_others_commit_in_its_place(shards: int) -> None:
    """As after a slot was dropped: the first worker of the node, or the one with this part, is in another slot now."""

    async def test(bench: Bench) -> None:
        memory = bench.node(A)
        bench.node(B)
        memory.keep_with(B, B, 1)
        before = Worker(memory, slot=1)
        for commit in (1, 2):
            await before.commit(commit, shards=shards)
        memory.forget_worker(1)
        memory.enter(Version(1, 2), (A,), writes=False)
        after = Worker(memory, slot=0)
        for commit in (3, 4, 5):
            await after.commit(commit, era=2, shards=shards)
        assert all(holding.version.era == 2 for holding in memory.holdings())
        memory.keep_with(B, B, 1)
        assert await memory.copied_before_leaving(LIMIT_S)
        assert memory.holders() == 2
        await until(lambda: memory.usage().workers < (shards + 2.5) * SIZE)  # those of one slot

    run(test)


def test_a_machine_without_so_much_memory_refuses_before_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_files, "available_bytes", lambda: memory_files.SPARE_BYTES + SIZE)

    async def test(bench: Bench) -> None:
        memory = bench.node()
        refusal = await memory.want(0, STATE, 2 * SIZE)
        assert isinstance(refusal, BufferRefusal)
        assert "the machine has only 67,208,864 available" in refusal.why
        assert memory.usage().total == 0
        assert isinstance(await memory.want(0, STATE, SIZE // 2), BufferGrant)

    run(test)


def test_with_every_buffer_being_read_the_next_commit_waits() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        memory.enter(Version(), (A,), writes=True)
        worker = Worker(memory)
        bench.checkpoint_storage.gate.clear()
        await worker.commit(1, save=True)
        await asyncio.to_thread(bench.checkpoint_storage.writes.acquire)
        await worker.commit(2)
        descriptor, size = await memory.piece(1, STATE, Version(1, 2), 0)
        next_one = asyncio.create_task(worker.commit(3))
        await until(lambda: h(3) in memory.holdings())
        assert not next_one.done()
        bench.checkpoint_storage.gate.set()
        await next_one
        assert content((descriptor, size)) == 2
        assert fill_of(bench.checkpoint_storage.kept[Version(1, 1), 0]) == 1

    run(test)


def test_without_memory_for_a_further_buffer_the_next_commit_waits_for_one_that_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host that is short of memory for a moment must not cost all later commits."""

    async def test(bench: Bench) -> None:
        memory = bench.node()
        worker = Worker(memory)
        await worker.commit(1)
        await memory.made_ahead()
        first = await memory.piece(1, STATE, Version(1, 1), 0)
        monkeypatch.setattr(memory_files, "available_bytes", lambda: memory_files.SPARE_BYTES)
        asking = asyncio.ensure_future(worker.commit(2))
        await until(lambda: h(2) in memory.holdings())
        await asyncio.to_thread(int)
        os.close(first[0])
        memory.restored(1)
        await asking
        await worker.commit(3)
        assert h(3) in memory.holdings()

    run(test)


@pytest.mark.parametrize("begun", [True, False])
def test_a_worker_that_goes_while_it_waits(begun: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node(limit_bytes=3 * SIZE)
        worker = Worker(memory)
        await worker.commit(1)
        descriptor, _ = await memory.piece(1, STATE, Version(1, 1), 0)
        os.close(descriptor)
        size = worker.fill(h(2), 2)
        waiting = asyncio.create_task(worker.say(h(2), size))
        if begun:
            await until(lambda: "waits for a buffer before its next commit" in caplog.text)
        memory.forget_worker(0)
        assert isinstance(await waiting, BufferRefusal)
        memory.restored(1)
        await Worker(memory).commit(3)

    run(test)
