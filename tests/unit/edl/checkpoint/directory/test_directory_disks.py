"""Disks that are full, err, or are written by two at once; and a clock that jumps."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from edl.adapters.files import PlainFiles
from edl.checkpoint.directory import record_wait
from edl.checkpoint.directory.manifest import Retention, folder_name
from edl.checkpoint.directory.writer import FileCheckpointStorage, WriterIdentity
from edl.errors import CheckpointError
from edl.ports import FileEntry
from edl.wire.records import Version
from tests.support.checkpoint_tools import Crash, Fault, FaultyFiles, Memory, load, open_checkpoint_storage, save, state
from tests.unit.edl.checkpoint.directory.test_retention import commits

ONE = len(state(1)) + 400
"""Bytes of a checkpoint with its manifest, and a little more."""


class SmallDisk(PlainFiles):
    """A disk of limited capacity."""

    def __init__(self, folder: Path, capacity: int) -> None:
        super().__init__(folder)
        self._folder, self.capacity, self.refused = folder, capacity, 0

    def used(self) -> int:
        return sum(map(_size, self._folder.rglob("*")))

    def free_bytes(self) -> int:
        return self.capacity - self.used()

    def write(self, name: str, pieces: Iterable[bytes | memoryview], *, new: bool = False) -> str:
        data = b"".join(pieces)
        if len(data) > self.free_bytes():
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path(name))
        return super().write(name, [data], new=new)


def test_with_room_for_three_a_fourth_is_written_all_the_same(tmp_path: Path) -> None:
    disk, said = SmallDisk(tmp_path, 3 * ONE + 500), list[str]()
    checkpoint_storage = open_checkpoint_storage(disk, said=said)
    for commit in range(1, 9):
        save(checkpoint_storage, commit)
        assert load(open_checkpoint_storage(disk))[0] == Version(1, commit)
        assert len(commits(tmp_path)) >= min(commit, 2)
    assert commits(tmp_path) == [6, 7, 8]
    assert disk.refused == 1, "from then on room is made first"
    (warning,) = [text for text in said if "has no room for 3 checkpoints and the next one" in text]
    assert "--checkpoint-keep=3" in warning and str(tmp_path) in warning


def test_a_run_that_finds_the_disk_full_makes_room_as_well(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path, 3 * ONE + 500)
    checkpoint_storage = open_checkpoint_storage(disk)
    for commit in (1, 2, 3):
        save(checkpoint_storage, commit)
    save(open_checkpoint_storage(disk), 4)
    assert commits(tmp_path)[-2:] == [3, 4]


def test_a_full_disk_refuses_a_new_run_and_no_launcher_of_one_under_way(tmp_path: Path) -> None:
    disk, said = SmallDisk(tmp_path, 3 * ONE), list[str]()
    first = open_checkpoint_storage(disk)
    first.check()
    save(first, 1)
    disk.capacity = disk.used()
    again = open_checkpoint_storage(disk, said=said)
    again.check()
    (warning,) = said
    assert (
        "no space is left" in warning
        and "Free some space" in warning
        and warning.endswith("No checkpoints are written until then")
    )
    with pytest.raises(CheckpointError, match="no space is left"):
        open_checkpoint_storage(disk, "another run").check()
    disk.capacity = 3 * ONE
    save(again, 2)
    assert commits(tmp_path) == [1, 2]


def test_two_stay_and_so_do_those_that_are_kept_for_good(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path, 3 * ONE + 500)
    checkpoint_storage = open_checkpoint_storage(disk, every=2)
    for commit in (2, 4, 5):
        save(checkpoint_storage, commit)
    with pytest.raises(CheckpointError, match="no space is left"):
        save(checkpoint_storage, 7)
    assert commits(tmp_path) == [2, 4, 5]


class ErringDisk(PlainFiles):
    """A disk that flips a bit in its next ``wrong`` reads of a state."""

    wrong = 1
    forgot = 0

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        count = super().read_into(name, offset, buffer)
        if self.wrong and name.endswith("safetensors"):
            self.wrong -= 1
            buffer[count - 1] ^= 4
        return count

    def forget(self, name: str) -> None:
        self.forgot += 1
        super().forget(name)


def test_bytes_that_come_wrong_once_are_read_again(tmp_path: Path) -> None:
    disk, said = ErringDisk(tmp_path), list[str]()
    for commit in (1, 2):
        save(open_checkpoint_storage(disk), commit)
    assert load(open_checkpoint_storage(disk, said=said))[0] == Version(1, 2)
    assert disk.forgot == 1, "not from the page cache"
    (warning,) = said
    assert "was read incorrectly once" in warning and folder_name(Version(1, 2)) in warning


def save_part(checkpoint_storage: FileCheckpointStorage, commit: int, part: int, of: int, **options: Any) -> str:
    """Write one part of a state, or all of it."""
    return checkpoint_storage.write(
        Version(1, commit), memoryview(state(commit, part=part, of=of, **options)), part, of
    )


class UnreadableDisk(PlainFiles):
    """Cannot read the data of one checkpoint, so many times."""

    broken = ""
    times = 1 << 30

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        if self.broken and self.broken in name and self.times:
            self.times -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        return super().read_into(name, offset, buffer)


@pytest.mark.parametrize("parts", [1, 2])
def test_what_cannot_be_read_is_passed_over_and_not_given_up(tmp_path: Path, parts: int) -> None:
    """Neither for one error, nor for good when the disk reads again."""
    disk, said = UnreadableDisk(tmp_path), list[str]()
    checkpoint_storage = open_checkpoint_storage(disk, said=said)
    for commit in (1, 2):
        for part in range(parts):
            save_part(checkpoint_storage, commit, part, parts)
    disk.broken = "commit-0000000002"
    assert checkpoint_storage.load(Memory()) == (Version(1, 1), parts > 1)
    assert any("commit-0000000002" in text and "is unreadable: Input/output error" in text for text in said)
    disk.times = 1
    assert checkpoint_storage.load(Memory()) == (Version(1, 2), parts > 1)
    assert any("read incorrectly once (Input/output error)" in text for text in said)
    disk.times = 0
    assert checkpoint_storage.load(Memory()) == (Version(1, 2), parts > 1)


def test_room_is_made_without_taking_what_other_nodes_have_written(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path, 1 << 30)
    here, there = open_checkpoint_storage(disk), open_checkpoint_storage(disk)
    for commit in (1, 2, 3):
        save_part(there, commit, 0, 2)
        assert save_part(here, commit, 1, 2)
    disk.capacity = disk.used() + ONE + 300
    assert not save_part(there, 4, 0, 2)
    assert save_part(here, 4, 1, 2), "complete, though it found the disk full"
    assert open_checkpoint_storage(disk).load(Memory()) == (Version(1, 4), True)
    disk.capacity = disk.used() + ONE + 300
    for checkpoint_storage, part in ((there, 0), (here, 1)):
        with contextlib.suppress(CheckpointError):
            save_part(checkpoint_storage, 5, part, 2, size=1000 if checkpoint_storage is there else 20_000)
    assert commits(tmp_path)[-1] == 4, "what will never be complete leaves no part"


def _size(path: Path) -> int:
    """Size of a file; 0 if a concurrent writer renamed it."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


class CrowdedDisk(SmallDisk):
    """Two who write at the same time find it full together: the second one only when the first has given its part
    back."""

    together: threading.Barrier | None = None

    def write(self, name: str, pieces: Iterable[bytes | memoryview], *, new: bool = False) -> str:
        both, data = self.together, b"".join(pieces)
        if both is not None and name.endswith("safetensors"):
            both.wait(20)
            self.together = None
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path(name))
        return super().write(name, [data], new=new)


def test_two_parts_that_find_the_disk_full_together_both_get_room(tmp_path: Path) -> None:
    disk = CrowdedDisk(tmp_path, 1 << 30)
    checkpoint_storage = open_checkpoint_storage(disk)
    for commit in (1, 2, 3):
        for part in (0, 1):
            save_part(checkpoint_storage, commit, part, 2)
    disk.capacity = disk.used() + ONE
    disk.together = threading.Barrier(2)
    with ThreadPoolExecutor(2) as both:
        saved = list(both.map(lambda part: save_part(checkpoint_storage, 4, part, 2), (0, 1)))
    assert any(saved) and commits(tmp_path)[-1] == 4


def test_a_part_of_what_has_been_given_up_goes_with_the_next_save(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path, 1 << 30)
    checkpoint_storage = open_checkpoint_storage(disk)
    disk.capacity = disk.used() + ONE + 300
    with pytest.raises(CheckpointError):
        save_part(checkpoint_storage, 1, 0, 2, size=20_000)
    save_part(checkpoint_storage, 1, 1, 2)  # of another thread, which had not begun
    disk.capacity = 1 << 30
    for part in (0, 1):
        save_part(checkpoint_storage, 2, part, 2)
    assert commits(tmp_path) == [2]


def test_bytes_that_stay_wrong_are_not_used(tmp_path: Path) -> None:
    disk, said = ErringDisk(tmp_path), list[str]()
    for commit in (1, 2):
        save(open_checkpoint_storage(disk), commit)
    disk.wrong = 2
    assert load(open_checkpoint_storage(disk, said=said))[0] == Version(1, 1)
    assert "checksum of state.safetensors differs" in said[0]


def test_a_clock_that_jumps_changes_no_order_and_no_name(tmp_path: Path) -> None:
    times = iter([2e9, 1e9, 0.0, 3e9, 5.0])
    clock: Callable[[], float] = lambda: next(times)  # noqa: E731
    checkpoint_storage = FileCheckpointStorage(
        PlainFiles(tmp_path), WriterIdentity("job", "run"), Retention(2), wall_clock_s=clock, say=lambda text: None
    )
    for commit in range(1, 6):
        save(checkpoint_storage, commit)
        assert load(open_checkpoint_storage(PlainFiles(tmp_path)))[0] == Version(1, commit)
    assert commits(tmp_path) == [4, 5]


class Meeting(FaultyFiles):
    """Another node writes just before this operation."""

    def __init__(self, folder: Path, fault: Fault, at: int, other: Callable[[FileCheckpointStorage], object]) -> None:
        super().__init__(PlainFiles(folder), fault)
        self._folder, self._at, self._other = folder, at, other

    def write(self, name: str, pieces: Iterable[bytes | memoryview], *, new: bool = False) -> str:
        self._meet()
        return super().write(name, pieces, new=new)

    def remove(self, name: str) -> None:
        self._meet()
        super().remove(name)

    def _meet(self) -> None:
        if self._fault.count == self._at:
            self._other(open_checkpoint_storage(PlainFiles(self._folder)))


def test_a_node_that_writes_the_same_never_opens_a_gap(tmp_path: Path) -> None:
    """Two nodes write one commit, as when a job fails. From when one of them has it complete, it stays complete,
    wherever the other one is and dies."""
    count = 0

    for at in range(6):
        for dies in range(at, 6):
            folder = tmp_path / f"{at}-{dies}"
            save(open_checkpoint_storage(PlainFiles(folder)), 2)
            fault = Fault()
            checkpoint_storage = open_checkpoint_storage(Meeting(folder, fault, at, lambda other: save(other, 3)))
            fault.at = dies
            try:
                save(checkpoint_storage, 3)
            except Crash:
                count += 1
            if fault.count > at:
                assert load(open_checkpoint_storage(PlainFiles(folder)))[0] == Version(1, 3), (
                    f"met at {at}, died at {dies}"
                )
    assert count >= 2


def test_two_nodes_that_write_one_commit_with_different_values_leave_one_that_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as running statistics, which each worker has for itself. Wherever they meet, and wherever one of them dies,
    the manifest is that of the file."""
    monkeypatch.setattr(record_wait, "PAUSE_S", 0.0)

    def meet(folder: Path, at: int, mine: int, theirs: int) -> None:
        """This node dies at its operation ``mine``, the other one at ``theirs``; 99: it does not."""

        def other(storage: FileCheckpointStorage) -> None:
            storage = open_checkpoint_storage(FaultyFiles(PlainFiles(folder), Fault(theirs)))
            with contextlib.suppress(Crash):
                save(storage, 3, round_=7)

        fault = Fault()
        storage = open_checkpoint_storage(Meeting(folder, fault, at, other))
        fault.at = mine
        with contextlib.suppress(Crash):
            save(storage, 3)
        met = fault.count > at
        if mine == 99 or (met and theirs == 99):
            assert load(open_checkpoint_storage(PlainFiles(folder)))[0] == Version(1, 3), (at, mine, theirs)
        else:
            assert open_checkpoint_storage(PlainFiles(folder)).newest() in (None, (Version(1, 3), False))

    for at in range(5):
        for mine in (*range(at, 6), 99):
            for theirs in (*range(5), 99):
                meet(tmp_path / f"{at}-{mine}-{theirs}", at, mine, theirs)


def test_a_node_that_cannot_write_leaves_the_file_of_another_alone(tmp_path: Path) -> None:
    """The other one has written its file, and is about to write the manifest."""

    class Full(PlainFiles):
        def write(self, name: str, pieces: Iterable[bytes | memoryview], *, new: bool = False) -> str:
            if name.endswith("state.safetensors"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(name, pieces, new=new)

    class Between(PlainFiles):
        def write(self, name: str, pieces: Iterable[bytes | memoryview], *, new: bool = False) -> str:
            if name.endswith("DONE"):
                with contextlib.suppress(CheckpointError):
                    save(open_checkpoint_storage(Full(tmp_path)), 3)
            return super().write(name, pieces, new=new)

    save(open_checkpoint_storage(Between(tmp_path)), 3)
    assert load(open_checkpoint_storage(PlainFiles(tmp_path)))[0] == Version(1, 3)


def test_two_nodes_write_a_part_that_both_have(tmp_path: Path) -> None:
    """Their parts differ in a value. Wherever they meet, the checkpoint is complete, with the bytes of one of them."""

    for at in range(8):
        for dies in (*range(at, 8), 99):
            folder = tmp_path / f"{at}-{dies}"
            save_part(open_checkpoint_storage(PlainFiles(folder)), 3, 1, 2)
            fault = Fault()
            theirs = functools.partial(save_part, commit=3, part=0, of=2, round_=7)
            storage = open_checkpoint_storage(Meeting(folder, fault, at, theirs))
            fault.at = dies
            with contextlib.suppress(Crash):
                save_part(storage, 3, 0, 2)
            if fault.count > at or dies == 99:
                for part in (0, 1):
                    found, _ = load(open_checkpoint_storage(PlainFiles(folder)), Version(1, 3), part)
                    assert found == Version(1, 3), f"met at {at}, died at {dies}"


def test_a_node_that_was_stopped_while_it_wrote_a_part_does_not_describe_the_file_of_another(tmp_path: Path) -> None:
    """The other one has the same part, and takes the first one for dead. Afterwards the first one goes on."""
    for at in range(4):
        folder = tmp_path / str(at)
        theirs = functools.partial(save_part, commit=3, part=0, of=2, round_=7)
        save_part(open_checkpoint_storage(Meeting(folder, Fault(), at, theirs)), 3, 0, 2)
        assert save_part(open_checkpoint_storage(PlainFiles(folder)), 3, 1, 2)
        for part in (0, 1):
            assert load(open_checkpoint_storage(PlainFiles(folder)), Version(1, 3), part)[0] == Version(1, 3), at


class Late(PlainFiles):
    """Shows an old state of a folder for a while, as some network file systems do."""

    shown: Sequence[FileEntry] = ()

    def entries(self, folder: str = "") -> list[FileEntry]:
        return list(self.shown) if self.shown and folder else super().entries(folder)


def test_a_node_that_sees_the_files_late_leaves_a_complete_checkpoint_alone(tmp_path: Path) -> None:
    """It looks after the checkpoint, which another node has completed meanwhile."""
    late = Late(tmp_path)
    here, there = open_checkpoint_storage(late), open_checkpoint_storage(PlainFiles(tmp_path))
    save_part(here, 3, 0, 2)
    assert save_part(there, 3, 1, 2)
    folder = folder_name(Version(1, 3))
    late.shown = [FileEntry(one.name, min(one.size, 1000)) for one in late.entries(folder)]
    assert here.complete(Version(1, 3), 2) is None, "for now"
    assert there.newest() == (Version(1, 3), True)
    late.shown = ()
    assert here.complete(Version(1, 3), 2) == ""


class Restless(PlainFiles):
    """A file system that changes a file's time once more when the file is closed, as some network ones do."""

    def write(self, name: str, pieces: Iterable[bytes | memoryview], *, new: bool = False) -> str:
        stamp = super().write(name, pieces, new=new)
        os.utime(self.path(name), ns=(1, 1))
        return stamp


def test_a_file_system_whose_stamps_change_by_themselves(tmp_path: Path) -> None:
    storage = open_checkpoint_storage(Restless(tmp_path))
    assert save_part(storage, 3, 0, 2) == ""
    assert save_part(storage, 3, 1, 2)
    for part in (0, 1):
        assert load(open_checkpoint_storage(PlainFiles(tmp_path)), Version(1, 3), part)[0] == Version(1, 3)


def test_two_nodes_write_parts_at_the_same_time(tmp_path: Path) -> None:
    storages = [open_checkpoint_storage(PlainFiles(tmp_path), keep=9) for _ in range(2)]
    for commit in range(1, 9):
        both = threading.Barrier(2)

        def write(number: int, commit: int = commit, both: threading.Barrier = both) -> None:
            both.wait(20)
            for part in (0, 1) if number else (1, 0):
                save_part(storages[number], commit, part, 2, round_=number)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for part in (0, 1):
            assert load(open_checkpoint_storage(PlainFiles(tmp_path)), Version(1, commit), part)[0] == Version(
                1, commit
            )


def test_a_part_whose_writer_has_died_is_written_again(tmp_path: Path) -> None:
    storage = open_checkpoint_storage(PlainFiles(tmp_path))
    assert save_part(storage, 3, 1, 2) == ""
    file = tmp_path / "commit-0000000003.era-0000000001" / "state-00000-of-00002.safetensors"
    file.write_bytes(b"what it had written so far")
    assert save_part(storage, 3, 0, 2) == str(file.parent)
    assert load(open_checkpoint_storage(PlainFiles(tmp_path)), Version(1, 3), 0)[0] == Version(1, 3)


# --- what a worker has written by itself -----------------------------------------------------------------------------


def written_by_a_worker(folder: Path, commit: int) -> tuple[int, int]:
    data = state(commit)
    target = folder / folder_name(Version(1, commit))
    target.mkdir(parents=True)
    (target / "state.safetensors").write_bytes(data)
    return len(data), zlib.crc32(data)


def test_a_state_that_a_worker_has_written_counts_once_it_has_been_read_back(tmp_path: Path) -> None:
    checkpoint_storage = open_checkpoint_storage(PlainFiles(tmp_path))
    size, crc32 = written_by_a_worker(tmp_path, 4)
    assert checkpoint_storage.newest() is None
    assert checkpoint_storage.accept(Version(1, 4), size, crc32).endswith(folder_name(Version(1, 4)))
    assert checkpoint_storage.newest() == (Version(1, 4), False)
    assert load(checkpoint_storage)[0] == Version(1, 4)


@pytest.mark.parametrize(("size", "crc32"), [(0, 1), (-1, 0)])
def test_one_that_is_not_what_the_worker_says_does_not_count(size: int, crc32: int, tmp_path: Path) -> None:
    checkpoint_storage = open_checkpoint_storage(PlainFiles(tmp_path))
    right = written_by_a_worker(tmp_path, 4)
    with pytest.raises(CheckpointError, match=r"checksum|truncated"):
        checkpoint_storage.accept(Version(1, 4), right[0] - size, right[1] ^ crc32)
    assert checkpoint_storage.newest() is None


@pytest.mark.parametrize("theirs", [state(4, job="other"), state(5), state(4)[:-1]], ids=["job", "commit", "truncated"])
def test_a_file_that_was_already_there_counts_only_if_it_is_this_commit(theirs: bytes, tmp_path: Path) -> None:
    """The worker describes it instead of replacing it."""
    checkpoint_storage = open_checkpoint_storage(PlainFiles(tmp_path))
    written_by_a_worker(tmp_path, 4)
    (tmp_path / folder_name(Version(1, 4)) / "state.safetensors").write_bytes(theirs)
    with pytest.raises(CheckpointError):
        checkpoint_storage.accept(Version(1, 4), len(theirs), zlib.crc32(theirs))
    assert checkpoint_storage.newest() is None
