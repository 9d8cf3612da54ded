"""Commits are copied to other nodes and to the checkpoint directory, and restored from there."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from edl.errors import CheckpointError
from edl.ports import Lent
from edl.testing.memory_copies import MemoryCopies, Trouble
from edl.testing.snapshots import fill_of, make_snapshot
from edl.types import NodeId
from edl.wire.local import STATE
from edl.wire.records import Version
from tests.support.memory_checkpoints_fixture import (
    LIMIT_S,
    SIZE,
    A,
    B,
    Bench,
    C,
    Worker,
    content,
    h,
    piece,
    run,
    source,
    until,
)

# --- other nodes -----------------------------------------------------------------------------------------------------


def test_each_commit_reaches_the_other_node() -> None:
    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        worker = Worker(here)
        await worker.commit(1)
        assert not await here.copied_before_leaving(0.01)
        here.keep_with(B, B, 1)
        assert await here.copied_before_leaving(LIMIT_S)
        assert there.holdings() == (h(1),)
        await worker.commit(2)
        assert await here.copied_before_leaving(LIMIT_S)
        assert there.holdings()[-1] == h(2)
        assert await piece(there, 2) == 2

    run(test)


def test_the_node_that_a_copy_comes_to_says_so() -> None:
    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        here.keep_with(B, B, 1)
        await Worker(here).commit(1)
        assert await bench.copied.get() == B
        assert there.holdings() == (h(1),), "it is there by then"

    run(test)


def test_the_number_of_nodes_with_a_commit_is_that_of_the_part_on_the_fewest() -> None:
    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        assert here.holders() == 0, "no commits"
        here.enter(Version(), [A], writes=False)
        worker = Worker(here)
        await worker.commit(1)
        assert here.holders() == 1
        here.keep_with(B, B, 1)
        await until(lambda: there.holdings() == (h(1),))
        await until(lambda: here.holders() == 2)
        await worker.commit(3)
        assert here.holders() == 2, "at most two commits behind"
        here.enter(Version(1, 3), [A, B, C], writes=False)
        await worker.commit(4)
        assert here.holders() == 3, "workers of all nodes keep a state that is not sharded"

    run(test)


def test_of_a_sharded_state_only_nodes_with_the_same_part_count() -> None:
    async def test(bench: Bench) -> None:
        here = bench.node(A)
        here.enter(Version(), [A, B, C], writes=False)
        await Worker(here, slot=0).commit(1, shard=0, shards=3, others=(C,))
        assert here.holders() == 2
        await Worker(here, slot=1).commit(1, shard=1, shards=3)
        assert here.holders() == 1, "the other part is here only"
        here.enter(Version(1, 1), [A, B], writes=False)
        assert here.holders() == 1, "the other node is gone"

    run(test)


def test_a_dead_node_loses_nothing() -> None:
    """The values are compared, not only their size."""

    async def test(bench: Bench) -> None:
        here, _, newcomer = bench.node(A), bench.node(B), bench.node(C)
        here.keep_with(B, B, 1)
        worker = Worker(here)
        for commit in range(1, 8):
            await worker.commit(commit)
        assert await here.copied_before_leaving(LIMIT_S)
        await here.close()
        assert await piece(newcomer, 7, source(A), source(B)) == 7

    run(test)


def test_an_unreachable_node_is_complained_about_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        bench.network.trouble = Trouble.FLIP
        here.keep_with(B, B, 1)
        worker = Worker(here)
        for commit in (1, 2, 3):
            await worker.commit(commit)
            assert not await here.copied_before_leaving(0.05)
        await until(lambda: bool(caplog.records))
        assert there.holdings() == ()
        bench.network.trouble = None
        await worker.commit(4)
        assert await here.copied_before_leaving(LIMIT_S)
        assert there.holdings()[-1] == h(4)

    run(test)
    assert [record.message[:30] for record in caplog.records if record.levelname == "WARNING"] == [
        "State: cannot copy commits to "
    ]


def test_without_another_node_only_nothing_can_be_handed_over() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        assert await memory.copied_before_leaving(LIMIT_S)
        await Worker(memory).commit(1)
        assert not await memory.copied_before_leaving(LIMIT_S)
        memory.keep_with(A, A, 1)
        assert not await memory.copied_before_leaving(LIMIT_S)

    run(test)


def test_many_ask_for_one_piece_and_it_comes_once() -> None:
    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        await Worker(there).commit(3)
        pieces = [here.piece(slot, STATE, Version(1, 3), 0, [source(B)]) for slot in range(8)]
        assert [content(one) for one in await asyncio.gather(*pieces)] == [3] * 8
        assert bench.network.served == ["get b:1"]

    run(test)


def test_one_asker_that_gives_up_does_not_spoil_it_for_the_others() -> None:
    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        await Worker(there).commit(3)
        first, second = (asyncio.create_task(here.piece(slot, STATE, Version(1, 3), 0, [source(B)])) for slot in (0, 1))
        await asyncio.sleep(0)
        first.cancel()
        assert content(await second) == 3

    run(test)


def test_who_joins_a_fetch_that_fails_has_its_own_sources_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fetch was begun in the round before, whose only source is dead; a connection to it ends late."""
    dead = NodeId("dead")
    begun, noticed = threading.Event(), threading.Event()
    get = MemoryCopies.get

    def slow(self: MemoryCopies, host: str, *arguments: Any) -> None:
        if host == dead:
            begun.set()
            assert noticed.wait(LIMIT_S)
            raise CheckpointError("no answer in time")
        get(self, host, *arguments)

    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        await Worker(there).commit(3)
        first = asyncio.create_task(here.piece(0, STATE, Version(1, 3), 0, [source(dead)]))
        await asyncio.to_thread(begun.wait, LIMIT_S)
        same = asyncio.create_task(here.piece(1, STATE, Version(1, 3), 0, [source(dead)]))
        later = [asyncio.create_task(here.piece(slot, STATE, Version(1, 3), 0, [source(B)])) for slot in (2, 3)]
        await asyncio.sleep(0)
        noticed.set()
        for one in (first, same):
            with pytest.raises(CheckpointError, match="no answer in time"):
                await one
        assert [content(await one) for one in later] == [3, 3]
        assert bench.network.served == ["get b:1"], "those that ask again share a transfer, too"

    monkeypatch.setattr(MemoryCopies, "get", slow)
    run(test)


def test_newcomers_spread_over_the_sources() -> None:
    async def test(bench: Bench) -> None:
        givers = [NodeId(f"giver-{number}") for number in range(4)]
        for giver in givers:
            await Worker(bench.node(giver)).commit(3)
        for number in range(24):
            await piece(bench.node(NodeId(f"newcomer-{number}")), 3, *(source(giver) for giver in givers))
        assert len(set(bench.network.served)) == 4

    run(test)


def test_the_next_source_is_tried_and_all_causes_are_named() -> None:
    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        await Worker(there).commit(3)
        gone = [source(NodeId("gone")), source(NodeId("lost"))]
        assert await piece(here, 3, *gone, source(B)) == 3
        with pytest.raises(CheckpointError) as caught:
            await piece(here, 4, *gone, source(B), source(A), source(C, shard=1))
        for words in ("node gone: gone:1: nobody is there", "node lost:", "node b: b:1 does not hold shard 0"):
            assert words in str(caught.value)
        assert "node c" not in str(caught.value)
        with pytest.raises(CheckpointError, match="none is known"):
            await piece(here, 5)

    run(test)


def test_a_damaged_piece_is_had_from_another_source_or_not_at_all() -> None:
    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        await Worker(there).commit(3)
        bench.network.trouble = Trouble.FLIP
        with pytest.raises(CheckpointError, match="checksum"):
            await piece(here, 3, source(B))
        assert here.holdings() == ()
        assert here.usage().total == 0

    run(test)


def test_what_was_fetched_goes_when_it_is_outgrown() -> None:
    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        await Worker(there).commit(3)
        assert await piece(here, 3, source(B)) == 3
        assert here.holdings() == (h(3),)
        await Worker(here).commit(4)
        assert here.holdings() == (h(4),)
        assert here.usage().loaded == 0

    run(test)


def test_the_others_still_have_what_was_copied_of_a_lost_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node c is lost while its copies are as late as they can be, and node a is as far ahead as it can be."""
    gate = threading.Event()
    gate.set()
    put = MemoryCopies.put

    def late(self: MemoryCopies, host: str, port: int, lent: Lent, *, urgent: bool = False) -> None:
        gate.wait(LIMIT_S)
        put(self, host, port, lent, urgent=urgent)

    monkeypatch.setattr(MemoryCopies, "put", late)

    async def test(bench: Bench) -> None:
        here, lost = bench.node(A), bench.node(C)
        for memory in (here, lost):
            memory.enter(Version(), (A, B), writes=False)
        here.keep_with(NodeId(""), "", 0)
        mine, theirs = Worker(here), Worker(lost)
        await mine.commit(1, shard=0, shards=2)
        await theirs.commit(1, shard=1, shards=2)
        buffer = asyncio.ensure_future(lost.want(0, STATE, SIZE))
        await mine.commit(2, shard=0, shards=2)  # the other one takes part in this step before it needs a buffer
        assert not buffer.done(), "it waits for the Master to name a node for its copies"
        lost.keep_with(A, A, 1)
        theirs.take(await buffer)
        gate.clear()
        await theirs.commit(2, shard=1, shards=2)
        buffer = asyncio.ensure_future(lost.want(0, STATE, SIZE))
        await mine.commit(3, shard=0, shards=2)
        assert not buffer.done(), "its own copy of commit 2 is not there"
        assert here.holdings() == (h(1, 0, 2), h(1, 1, 2), h(2, 0, 2), h(3, 0, 2)), "commit 1 is complete"
        gate.set()
        theirs.take(await buffer)
        assert h(2, 1, 2) in here.holdings()

    run(test)


def test_a_part_that_another_node_keeps_is_copied_once_that_node_is_gone() -> None:
    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        here.enter(Version(), (A, B, C), writes=False)
        here.keep_with(B, B, 1)
        worker = Worker(here)
        for commit in (1, 2, 3):
            await worker.commit(commit, shard=0, shards=2, others=(C,))
            worker.take(await here.want(0, STATE, SIZE))  # nothing to wait for
        assert there.holdings() == ()
        here.enter(Version(1, 3), (A, B), writes=False)
        await until(lambda: there.holdings() == (h(3, 0, 2),))
        await worker.commit(4, shard=0, shards=2, others=(B,))
        await worker.commit(5, shard=0, shards=2)
        await until(lambda: h(5, 0, 2) in there.holdings())
        assert h(4, 0, 2) not in there.holdings()

    run(test)


def test_copies_of_a_world_of_another_size_go_when_three_commits_are_newer() -> None:
    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        there.keep_with(A, A, 1)
        mine, theirs = Worker(here), Worker(there)
        for commit, parts in ((1, 2), (2, 2), (3, 4), (4, 4), (5, 4)):
            await mine.commit(commit, shard=0, shards=parts)
            assert h(commit, 0, parts) in here.holdings()
            await theirs.commit(commit, shard=parts - 1, shards=parts)
            assert await there.copied_before_leaving(LIMIT_S)
            kept = {(one.version.commit, one.shards) for one in here.holdings() if one.shard}
            assert (commit, parts) in kept
            # Commit 2 of two parts stays until three newer ones are here.
            assert ((2, 2) in kept) == (commit in (2, 3, 4))

    run(test)


def test_a_new_world_makes_older_copies_useless_and_ends_the_line_given_up() -> None:
    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        here.keep_with(B, B, 1)
        await Worker(here, 0).commit(2, shard=0, shards=2)
        assert await here.copied_before_leaving(LIMIT_S)
        worker = Worker(there, 0)
        for commit in (2, 3):
            await worker.commit(commit, shard=1, shards=2)
        there.trim(Version())
        assert there.holdings() == (h(2, 0, 2), h(2, 1, 2), h(3, 1, 2))
        there.trim(Version(1, 3))
        assert there.holdings() == (h(2, 1, 2), h(3, 1, 2))
        there.trim(Version(1, 2))
        assert there.holdings() == (h(2, 1, 2),)
        there.trim(Version(1, 9))
        assert there.holdings() == (h(2, 1, 2),)
        await worker.commit(3, shard=1, shards=2, era=2)
        assert there.holdings() == (h(2, 1, 2), h(3, 1, 2, era=2))

    run(test)


# --- the checkpoint directory ----------------------------------------------------------------------------------------


def test_the_writer_writes_what_is_to_be_saved() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        worker = Worker(memory)
        memory.enter(Version(), (A, B), writes=False)
        await worker.commit(1, save=True)
        await worker.commit(2)
        assert not bench.checkpoint_storage.kept
        memory.enter(Version(1, 2), (A,), writes=True)
        await worker.commit(3, save=True)
        assert await bench.reports.get() == (Version(1, 3), "/there/3", "")
        assert {version.commit for version, _ in bench.checkpoint_storage.kept} == {3}

    run(test)


def test_what_cannot_be_written_is_told_and_the_next_is_tried() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        memory.enter(Version(), (A,), writes=True)
        worker = Worker(memory)
        bench.checkpoint_storage.refuses = "disk full"
        await worker.commit(1, save=True)
        assert await bench.reports.get() == (Version(1, 1), "", "disk full")
        bench.checkpoint_storage.refuses = ""
        await worker.commit(2, save=True)
        assert await bench.reports.get() == (Version(1, 2), "/there/2", "")

    run(test)


def test_whatever_goes_wrong_with_one_save_the_next_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def fails() -> None:
        asked.set()
        raise ValueError("a bug of a client library")

    async def test(bench: Bench) -> None:
        memory = bench.node()
        worker = Worker(memory)
        await worker.commit(1, save=True)  # this node is not the writer yet
        with monkeypatch.context() as patch:
            patch.setattr(bench.checkpoint_storage, "newest", fails)
            memory.enter(Version(1, 1), (A,), writes=True)
            assert await asyncio.to_thread(asked.wait, LIMIT_S)
        await worker.commit(2, save=True)
        assert await bench.reports.get() == (Version(1, 2), "/there/2", "")

    run(test)


def test_with_a_slow_disk_training_goes_on_and_the_last_save_counts() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        memory.enter(Version(), (A,), writes=True)
        worker = Worker(memory)
        bench.checkpoint_storage.gate.clear()
        for commit in range(1, 10):
            await worker.commit(commit, save=commit in (1, 4, 7))
            if commit == 1:
                await asyncio.to_thread(bench.checkpoint_storage.writes.acquire)
        bench.checkpoint_storage.gate.set()
        reports = [await bench.reports.get() for _ in range(2)]
        assert [(version.commit, error) for version, _, error in reports] == [(1, ""), (9, "")]
        assert {version.commit: fill_of(data) for (version, _), data in bench.checkpoint_storage.kept.items()} == {
            1: 1,
            9: 9,
        }

    run(test)


def test_flush_writes_the_newest_once() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        assert await memory.flush("the end") is None
        worker = Worker(memory)
        for commit in (1, 2):
            await worker.commit(commit)
        for _ in range(2):
            assert await memory.flush("the end") == Version(1, 2)
        assert bench.reports.qsize() == 1
        bench.checkpoint_storage.refuses = "disk full"
        await worker.commit(3)
        assert await memory.flush("the end") is None

    run(test)


def test_flush_while_it_is_being_written_waits_and_does_not_write_it_again() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        memory.enter(Version(), (A,), writes=True)
        bench.checkpoint_storage.gate.clear()
        await Worker(memory).commit(1, save=True)
        await asyncio.to_thread(bench.checkpoint_storage.writes.acquire)
        flushed = asyncio.create_task(memory.flush("suspended"))
        await asyncio.sleep(0)
        bench.checkpoint_storage.gate.set()
        assert await flushed == Version(1, 1)
        assert bench.reports.qsize() == 1

    run(test)


def test_flush_of_one_commit_writes_its_parts_only() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        ahead, behind = Worker(memory, 0), Worker(memory, 1)
        for worker, shard, commit in ((ahead, 0, 3), (behind, 1, 3), (ahead, 0, 4)):
            await worker.commit(commit, shard=shard, shards=2)
        assert await memory.flush("suspended", Version(1, 3)) == Version(1, 3)
        assert sorted(bench.checkpoint_storage.kept) == [(Version(1, 3), 0), (Version(1, 3), 1)]
        assert await memory.flush("suspended", Version(1, 9)) is None

    run(test)


def test_flush_of_one_commit_writes_a_part_again_that_is_gone() -> None:
    """A node that could not write its own part has deleted the folder, because it took space."""

    async def test(bench: Bench) -> None:
        memory = bench.node()
        await Worker(memory).commit(3, shard=0, shards=2)
        for _ in range(2):
            await memory.flush("suspended", Version(1, 3))
            assert list(bench.checkpoint_storage.kept) == [(Version(1, 3), 0)]
            bench.checkpoint_storage.kept.clear()

    run(test)


def test_flush_writes_every_part_that_is_here() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        for slot in (0, 1):
            await Worker(memory, slot).commit(4, shard=slot, shards=2)
        await memory.flush("the end")
        assert sorted(bench.checkpoint_storage.kept) == [(Version(1, 4), 0), (Version(1, 4), 1)]

    run(test)


def test_what_was_loaded_is_held_and_not_written_again() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        assert await memory.load() == Version()
        bench.checkpoint_storage.kept[Version(3, 8), 0] = make_snapshot(h(8, era=3), 8, SIZE)
        for _ in range(2):
            assert await memory.load() == Version(3, 8)
        assert memory.holdings() == (h(8, era=3),)
        assert content(await memory.piece(0, STATE, Version(3, 8), 0)) == 8
        assert await memory.flush("the end") == Version(3, 8)
        assert bench.reports.empty()
        assert memory.usage().loaded < 3 * SIZE

    run(test)


def test_a_checkpoint_that_cannot_be_used_is_not_held() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        bench.checkpoint_storage.kept[Version(3, 8), 0] = make_snapshot(h(7, era=3), 8, SIZE)
        with pytest.raises(CheckpointError, match="the checkpoint directory's"):
            await memory.load()
        bench.checkpoint_storage.refuses = "all damaged"
        with pytest.raises(CheckpointError, match="all damaged"):
            await memory.load()
        assert memory.holdings() == ()
        assert memory.usage().total == 0

    run(test)


def test_a_sharded_checkpoint_is_checked_and_left_to_the_workers() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        bench.checkpoint_storage.kept[Version(3, 8), 0] = b""
        bench.checkpoint_storage.sharded = True
        assert await memory.load() == Version(3, 8)
        assert memory.holdings() == ()
        bench.checkpoint_storage.refuses = "all damaged"
        with pytest.raises(CheckpointError, match="all damaged"):
            await memory.load()

    run(test)
