"""Saves of a sharded state, node by node: none is left out, and what cannot be complete leaves nothing behind."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path

import pytest

from edl.adapters.files import PlainFiles
from edl.checkpoint.directory.writer import FileCheckpointStorage
from edl.checkpoint.memory import shard_saves
from edl.checkpoint.memory.shard_saves import parts_to_write
from edl.errors import CheckpointError
from edl.ports import Files
from edl.wire.local import STATE
from edl.wire.records import Holding, Version
from tests.support.checkpoint_tools import Fault, FaultyFiles, open_checkpoint_storage, state
from tests.support.memory_checkpoints_fixture import SIZE, A, B, Bench, Worker, h, run, until

# --- in memory ------------------------------------------------------------------------------------------------------


def test_each_node_writes_the_parts_of_its_workers_and_the_last_one_says_so() -> None:
    async def test(bench: Bench) -> None:
        first, second = bench.node(A), bench.node(B)
        workers = [Worker(first, 0), Worker(first, 1), Worker(second, 0)]
        for commit in (1, 2):
            for shard, worker in enumerate(workers):
                await worker.commit(commit, save=commit == 2, shard=shard, shards=3)
        assert await bench.reports.get() == (Version(1, 2), "/there/2", "")
        assert sorted(bench.checkpoint_storage.kept) == [(Version(1, 2), shard) for shard in range(3)]
        assert bench.reports.empty()

    run(test)


def test_no_save_is_left_out_while_the_disk_is_slow(caplog: pytest.LogCaptureFixture) -> None:
    """A replicated state would skip the second: the other nodes cannot know which one this node skips."""

    async def test(bench: Bench) -> None:
        memory = bench.node()
        worker = Worker(memory)
        bench.checkpoint_storage.gate.clear()
        for commit in (1, 2, 3, 4):
            await worker.commit(commit, save=True, shard=0, shards=2)
        assert memory.busy
        buffer = asyncio.ensure_future(memory.want(0, STATE, SIZE))
        await until(lambda: "waits for a buffer before its next commit: all 4 buffers" in caplog.text or buffer.done())
        assert not buffer.done(), "no buffer is free: training waits for the disk"
        bench.checkpoint_storage.gate.set()
        worker.take(await buffer)
        await memory.settled()
        assert sorted(bench.checkpoint_storage.kept) == [(Version(1, commit), 0) for commit in (1, 2, 3, 4)]
        assert bench.reports.empty(), "the other part is missing: nothing is complete"

    run(test)


def test_what_others_wrote_may_come_into_sight_late() -> None:
    """The node that looks after a checkpoint asks again."""

    async def test(bench: Bench) -> None:
        memory = bench.node()
        memory.enter(Version(), (A, B), writes=True)
        looks = 0

        def complete(version: Version, shards: int) -> str | None:
            nonlocal looks
            looks += 1
            return None if looks < 3 else f"/there/{version.commit}"

        bench.checkpoint_storage.complete = complete  # type: ignore[method-assign]
        await Worker(memory).commit(1, save=True, shard=0, shards=2)
        assert await bench.reports.get() == (Version(1, 1), "/there/1", "")
        assert looks == 3

    run(test)


@pytest.mark.parametrize("error", [CheckpointError("stale file"), RuntimeError("can't start new thread")], ids=repr)
def test_a_directory_that_is_out_of_reach_for_a_moment_costs_no_checkpoint(error: Exception) -> None:
    """All parts may be there."""

    async def test(bench: Bench) -> None:
        memory = bench.node()
        memory.enter(Version(), (A, B), writes=True)
        looks = 0

        def complete(version: Version, shards: int) -> str | None:
            nonlocal looks
            looks += 1
            if looks == 1:
                raise error
            return f"/there/{version.commit}"

        bench.checkpoint_storage.complete = complete  # type: ignore[method-assign]
        await Worker(memory).commit(1, save=True, shard=0, shards=2)
        assert await bench.reports.get() == (Version(1, 1), "/there/1", "")

    run(test)


def test_a_directory_that_stays_out_of_reach_is_given_up_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        memory.enter(Version(), (A, B), writes=True)

        def complete(version: Version, shards: int) -> str | None:
            raise CheckpointError("stale file handle")

        bench.checkpoint_storage.complete = complete  # type: ignore[method-assign]
        await Worker(memory).commit(1, save=True, shard=0, shards=2)
        assert await bench.reports.get() == (Version(1, 1), "", "stale file handle")

    monkeypatch.setattr(shard_saves, "COMPLETE_S", 0.5)
    run(test)


def test_the_next_world_does_not_wait_for_parts_that_will_not_come() -> None:
    """The other node could not write its part, or is gone."""

    async def test(bench: Bench) -> None:
        memory = bench.node()
        memory.enter(Version(), (A, B), writes=True)
        worker = Worker(memory)
        await worker.commit(1, save=True, shard=0, shards=2)
        assert memory.busy
        await memory.settled()
        memory.looked()
        assert not memory.busy

    run(test)


def test_what_cannot_be_written_costs_the_checkpoint_and_is_said_once() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        workers = [Worker(memory, 0), Worker(memory, 1)]
        bench.checkpoint_storage.refuses = "no space is left"
        for shard, worker in enumerate(workers):
            await worker.commit(1, save=True, shard=shard, shards=2)
        await memory.settled()
        assert await bench.reports.get() == (Version(1, 1), "", "no space is left")
        assert bench.reports.empty()
        bench.checkpoint_storage.refuses = ""
        for shard, worker in enumerate(workers):
            await worker.commit(2, save=True, shard=shard, shards=2)
        assert await bench.reports.get() == (Version(1, 2), "/there/2", "")

    run(test)


def test_at_the_end_all_parts_that_are_here_are_written() -> None:
    async def test(bench: Bench) -> None:
        memory = bench.node()
        for shard, worker in enumerate([Worker(memory, 0), Worker(memory, 1)]):
            await worker.commit(5, shard=shard, shards=2)
        assert await memory.flush("the job has failed") == Version(1, 5)
        assert sorted(bench.checkpoint_storage.kept) == [(Version(1, 5), 0), (Version(1, 5), 1)]
        assert await memory.flush("again") == Version(1, 5)
        assert await bench.reports.get() == (Version(1, 5), "/there/5", "")
        assert bench.reports.empty()

    run(test)


@pytest.mark.parametrize(
    ("held", "written", "version", "expected"),
    [
        ([], [], None, []),
        ([h(5), h(4)], [], None, [h(5)]),
        ([h(5)], [h(5)], None, []),
        # Other nodes write what they have of 5; if they are gone, 4 is the newest that is whole.
        ([h(5, 0, 2), h(4, 0, 2), h(4, 1, 2)], [], None, [h(4, 0, 2), h(4, 1, 2), h(5, 0, 2)]),
        ([h(5, 0, 2), h(5, 1, 2), h(4, 0, 2), h(4, 1, 2)], [], None, [h(5, 0, 2), h(5, 1, 2)]),
        ([h(5, 0, 2), h(4, 1, 2)], [], None, [h(5, 0, 2)]),
        ([h(5, 0, 2), h(4, 0, 2), h(4, 1, 2)], [], Version(1, 4), [h(4, 0, 2), h(4, 1, 2)]),
    ],
)
def test_which_parts_are_written(
    held: list[Holding], written: list[Holding], version: Version | None, expected: list[Holding]
) -> None:
    assert parts_to_write(held, written, version) == expected


# --- in the directory ------------------------------------------------------------------------------------------------

VERSION = Version(1, 10)
PARTS = [memoryview(state(10, part=shard, of=2)) for shard in range(2)]


def checkpoint_storages(files: Files) -> tuple[FileCheckpointStorage, FileCheckpointStorage]:
    """Checkpoint storages of two nodes in the same run."""
    return open_checkpoint_storage(files), open_checkpoint_storage(files)


def test_a_part_that_could_not_be_written_takes_the_others_with_it(tmp_path: Path) -> None:
    files = PlainFiles(tmp_path)
    fault = Fault(error=OSError(errno.EIO, "broken"))
    good, bad = open_checkpoint_storage(files), open_checkpoint_storage(FaultyFiles(files, fault))
    good.write(VERSION, PARTS[0], 0, 2)
    fault.at = fault.count + 1  # first the old record is removed
    with pytest.raises(CheckpointError, match="broken"):
        bad.write(VERSION, PARTS[1], 1, 2)
    assert "state-00001" in fault.log[fault.at]
    assert [entry.name for entry in files.entries() if entry.folder] == [], "nothing takes the room of the next one"
    good.write(VERSION, PARTS[0], 0, 2)  # had not heard of it
    later = Version(1, 11)
    for shard, checkpoint_storage in enumerate((good, bad)):
        checkpoint_storage.write(later, memoryview(state(11, part=shard, of=2)), shard, 2)
    assert [entry.name for entry in files.entries() if entry.folder] == ["commit-0000000011.era-0000000001"]


def test_two_nodes_that_have_the_same_parts_do_not_disturb_each_other(tmp_path: Path) -> None:
    first, second = checkpoint_storages(PlainFiles(tmp_path))
    assert first.write(VERSION, PARTS[0], 0, 2) == ""
    assert second.write(VERSION, PARTS[0], 0, 2) == ""
    where = second.write(VERSION, PARTS[1], 1, 2)
    assert where.endswith("commit-0000000010.era-0000000001")
    done = (tmp_path / "commit-0000000010.era-0000000001" / "DONE").stat().st_ino
    assert first.write(VERSION, PARTS[1], 1, 2) == "", "it is there already"
    assert first.complete(VERSION, 2) == ""
    assert (tmp_path / "commit-0000000010.era-0000000001" / "DONE").stat().st_ino == done


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"!"), "the checksum of state-00001-of-00002"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "state-00001-of-00002.safetensors is truncated"),
        (lambda path: path.unlink(), "state-00001-of-00002.safetensors is missing"),
    ],
)
def test_every_byte_of_a_sharded_checkpoint_is_looked_at_before_it_is_used(
    tmp_path: Path, damage: object, reason: str
) -> None:
    said: list[str] = []
    checkpoint_storage = open_checkpoint_storage(PlainFiles(tmp_path), said=said)
    for commit in (9, 10):
        for shard in range(2):
            checkpoint_storage.write(Version(1, commit), memoryview(state(commit, part=shard, of=2)), shard, 2)
    assert checkpoint_storage.load(_no_memory) == (Version(1, 10), True)
    damage(tmp_path / "commit-0000000010.era-0000000001" / "state-00001-of-00002.safetensors")  # type: ignore[operator]
    assert checkpoint_storage.load(_no_memory) == (Version(1, 9), True)
    assert checkpoint_storage.newest() == (Version(1, 9), True), "and stays refused"
    assert [line for line in said if reason in line]
    (tmp_path / "commit-0000000009.era-0000000001" / "DONE").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpoint_storage.load(_no_memory)


def _no_memory(size: int) -> memoryview:
    raise AssertionError("nothing is kept of a sharded one")


def test_an_older_whole_state_may_take_the_place_of_a_damaged_sharded_one(tmp_path: Path) -> None:
    checkpoint_storage = open_checkpoint_storage(PlainFiles(tmp_path))
    checkpoint_storage.write(Version(1, 9), memoryview(state(9)))
    for shard in range(2):
        checkpoint_storage.write(VERSION, PARTS[shard], shard, 2)
    path = tmp_path / "commit-0000000010.era-0000000001" / "state-00000-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    memory = bytearray(len(state(9)))
    assert checkpoint_storage.load(lambda size: memoryview(memory)[:size]) == (Version(1, 9), False)
    assert memory == state(9)


def test_a_part_under_the_name_of_another_one(tmp_path: Path) -> None:
    checkpoint_storage = open_checkpoint_storage(PlainFiles(tmp_path))
    for shard in (1, 0):
        checkpoint_storage.write(VERSION, PARTS[shard], 1 - shard, 2)  # each under the other's number
    with pytest.raises(CheckpointError, match="its header says part 1 of 2, its manifest 0 of 2"):
        checkpoint_storage.verify(VERSION)


def test_a_sharded_checkpoint_is_verified_without_further_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a container's limit on processes."""
    start = threading.Thread.start

    def scarce(thread: threading.Thread) -> None:
        if thread.name.startswith("edl-verify"):
            raise RuntimeError("can't start new thread")
        start(thread)

    checkpoint_storage = open_checkpoint_storage(PlainFiles(tmp_path))
    for shard in range(2):
        checkpoint_storage.write(VERSION, PARTS[shard], shard, 2)
    monkeypatch.setattr(threading.Thread, "start", scarce)
    assert checkpoint_storage.load(_no_memory) == (VERSION, True)
    path = tmp_path / "commit-0000000010.era-0000000001" / "state-00000-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match="checksum of state-00000"):
        checkpoint_storage.verify(VERSION)
