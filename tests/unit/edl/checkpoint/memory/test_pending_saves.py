"""Which saved commit has yet to be written, and by whom."""

from __future__ import annotations

import asyncio

import pytest

from edl.checkpoint.memory.copy_policy import Copying, needed
from edl.checkpoint.memory.pending_saves import PendingSave
from edl.ports import Lent
from edl.testing.memory_copies import MemoryCopies
from edl.wire.records import Holding, Version
from tests.support.memory_checkpoints_fixture import A, B, Bench, Worker, h, run, until


def v(commit: int, era: int = 1) -> Version:
    return Version(era, commit)


def test_the_newest_saved_commit_counts() -> None:
    owed = PendingSave()
    assert not owed.due and owed.to_write is None and owed.text == ""
    owed.take(v(3))
    owed.take(v(7))
    owed.take(v(5))
    assert owed.to_write == v(7)
    owed.written(v(3))
    assert owed.due and "commit 7" in owed.text and "has not been written yet" in owed.text
    owed.written(v(9))
    assert not owed.due and owed.text == ""


def test_the_reason_is_that_of_the_newest() -> None:
    owed = PendingSave()
    owed.take(v(3))
    owed.failed(v(3), "disk full")
    assert owed.text.endswith("disk full") and owed.to_write == v(3), "to be tried again"
    owed.take(v(4))
    assert "disk full" not in owed.text
    owed.failed(v(3), "late")
    assert "late" not in owed.text


def test_what_workers_write_themselves_is_waited_for_and_not_written_here() -> None:
    owed = PendingSave()
    owed.take(v(3), whole=False)
    assert owed.due and owed.to_write is None


def test_what_a_world_goes_back_behind_is_saved_again_by_the_workers() -> None:
    owed = PendingSave()
    owed.take(v(6))
    owed.begin(v(6))
    assert owed.due
    owed.begin(v(5))
    assert not owed.due


@pytest.mark.parametrize(("nodes", "auto"), [(1, True), (2, False), (9, False)])
def test_copies_are_made_where_nobody_else_has_the_same(nodes: int, auto: bool) -> None:
    assert needed(Copying.AUTO, nodes) is auto
    assert needed(Copying.ALWAYS, nodes)
    assert not needed(Copying.NEVER, nodes)


# --- in memory ------------------------------------------------------------------------------------------------------


def test_the_end_waits_for_the_newest_save_and_for_no_other() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        memory.enter(Version(), (A, B), writes=True)
        worker = Worker(memory)
        bench.checkpoint_storage.gate.clear()
        await worker.commit(1, save=True)
        await asyncio.to_thread(bench.checkpoint_storage.writes.acquire)
        await worker.commit(2, save=True)
        await worker.commit(3, save=True)
        assert memory.saving
        flushed = asyncio.create_task(memory.flush_saves())
        await asyncio.sleep(0)
        assert not flushed.done()
        bench.checkpoint_storage.gate.set()
        assert await flushed == ""
        assert {version.commit for version, _ in bench.checkpoint_storage.kept} == {1, 3}
        assert not memory.saving

    run(test)


def test_at_the_end_what_failed_is_tried_once_more() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        memory.enter(Version(), (A,), writes=True)
        bench.checkpoint_storage.refuses = "disk full"
        await Worker(memory).commit(4, save=True)
        assert (await bench.reports.get())[2] == "disk full"
        lost = await memory.flush_saves()
        assert lost == "commit 4, the newest saved one, is not in the checkpoint directory: disk full"
        bench.checkpoint_storage.refuses = ""
        assert await memory.flush_saves() == ""
        assert (v(4), 0) in bench.checkpoint_storage.kept

    run(test)


def test_a_node_that_does_not_write_waits_for_nothing() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        memory.enter(Version(), (A, B), writes=False)
        await Worker(memory).commit(1, save=True)
        assert not memory.saving and await memory.flush_saves() == ""
        assert not bench.checkpoint_storage.kept

    run(test)


def test_whoever_writes_next_writes_what_the_one_before_owed() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        memory.enter(Version(), (A, B), writes=False)
        worker = Worker(memory)
        await worker.commit(1, save=True)
        await worker.commit(2)
        await worker.commit(3)
        memory.enter(v(3), (A,), writes=True)
        version, where, error = await bench.reports.get()
        assert (version, error) == (v(3), ""), "what has taken its place"
        assert where and not memory.saving

    run(test)


def test_what_the_one_before_has_written_is_not_written_again() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        memory.enter(Version(), (A, B), writes=False)
        await Worker(memory).commit(1, save=True)
        bench.checkpoint_storage.kept[v(1), 0] = b"by another node"
        memory.enter(v(1), (A,), writes=True)
        await until(lambda: not memory.saving)
        assert bench.checkpoint_storage.kept == {(v(1), 0): b"by another node"} and bench.reports.empty()

    run(test)


def test_who_has_a_copy_writes_what_its_owner_owed() -> None:
    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        here.enter(Version(), (A,), writes=True)
        here.keep_with(B, B, 1)
        bench.checkpoint_storage.gate.clear()
        await Worker(here).commit(1, save=True)
        await until(lambda: h(1) in there.holdings())
        await here.close()
        bench.memories.remove(here)
        bench.checkpoint_storage.gate.set()
        bench.checkpoint_storage.kept.clear()
        there.enter(v(1), (A,), writes=True)
        await until(lambda: (v(1), 0) in bench.checkpoint_storage.kept)

    run(test)


def test_a_replicated_state_is_copied_only_where_one_node_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    puts: list[Holding] = []
    put = MemoryCopies.put

    def counted(self: MemoryCopies, host: str, port: int, lent: Lent, *, urgent: bool = False) -> None:
        puts.append(lent.label.holding)
        put(self, host, port, lent, urgent=urgent)

    monkeypatch.setattr(MemoryCopies, "put", counted)

    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        here.enter(Version(), (A, B), writes=True)
        here.keep_with(B, B, 1)
        worker = Worker(here)
        for commit in range(1, 6):
            await worker.commit(commit)
        assert not puts
        assert await here.copied_before_leaving(5.0), "whoever leaves does not know who else has it"
        assert puts == [h(5)] and there.holdings() == (h(5),)

    run(test)


def test_a_node_that_has_made_the_commit_itself_takes_no_copy() -> None:
    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        for memory in (here, there):
            memory.enter(Version(), (A, B), writes=False)
            await Worker(memory).commit(3)
        here.keep_with(B, B, 1)
        assert await here.copied_before_leaving(5.0)
        assert there.usage().replicas == 0

    run(test)


def test_a_world_that_shrinks_to_one_node_is_copied_from_then_on() -> None:
    async def test(bench: Bench) -> None:
        here, there = bench.node(A), bench.node(B)
        here.enter(Version(), (A, B), writes=True)
        here.keep_with(B, B, 1)
        await Worker(here).commit(3)
        here.enter(v(3), (A,), writes=True)
        await until(lambda: h(3) in there.holdings())

    run(test)


def test_room_is_told_when_it_ends_and_when_it_is_back() -> None:
    async def test(bench: Bench) -> None:
        reports: list[str] = []
        memory = bench.node(limit_bytes=150_000, on_room=reports.append)
        await memory.want(0, "state", 100_000)
        for _ in range(2):
            await memory.want(1, "state", 100_000)
        assert len(reports) == 1 and "--state-memory" in reports[0]
        memory.forget_worker(0)
        await memory.want(1, "state", 100_000)
        assert reports[1:] == [""]

    run(test)


def test_a_commit_that_a_worker_wrote_by_itself_is_accepted_or_said_to_be_missing() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        memory.enter(Version(), (A, B), writes=True)
        await memory.wrote_through(v(1), 7, 8, "")
        assert bench.checkpoint_storage.accepted == [(v(1), 7, 8)] and memory.unsaved == ""
        await memory.wrote_through(v(2), 0, 0, "the disk is full")
        bench.checkpoint_storage.refuses = "its checksum differs"
        await memory.wrote_through(v(3), 7, 8, "")
        assert bench.checkpoint_storage.accepted == [(v(1), 7, 8)] and "its checksum differs" in memory.unsaved
        reports = [bench.reports.get_nowait() for _ in range(3)]
        assert reports == [(v(1), "/there/1", ""), (v(2), "", "the disk is full"), (v(3), "", "its checksum differs")]

    run(test)
