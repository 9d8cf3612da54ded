from __future__ import annotations

import errno
import json
import os
import zlib
from pathlib import Path

import pytest

from edl.adapters.files import PlainFiles
from edl.checkpoint.directory import summed_files
from edl.checkpoint.directory.manifest import folder_name
from edl.checkpoint.directory.writer import FileCheckpointStorage
from edl.errors import CheckpointError
from edl.wire.records import Version
from tests.support.checkpoint_tools import Memory, load, open_checkpoint_storage, save, state


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def state_path(folder: Path, commit: int, era: int = 1) -> Path:
    return folder / folder_name(Version(era, commit)) / "state.safetensors"


def manifest_path(folder: Path, commit: int, era: int = 1) -> Path:
    return folder / folder_name(Version(era, commit)) / "DONE"


def change_marker(folder: Path, of: int, **values: object) -> None:
    path = manifest_path(folder, of)
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}, indent=1) + "\n")


def two(folder: Path, *, size: int = 1000) -> FileCheckpointStorage:
    """A directory with commits 10 and 20."""
    checkpoint_storage = open_checkpoint_storage(PlainFiles(folder))
    checkpoint_storage.check()
    save(checkpoint_storage, 10, size=size)
    save(checkpoint_storage, 20, size=size)
    return checkpoint_storage


# --- writing and reading ---------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    checkpoint_storage = open_checkpoint_storage(PlainFiles(folder))
    checkpoint_storage.check()
    assert checkpoint_storage.newest() is None
    where = save(checkpoint_storage, 123, 4)
    assert where == str(folder / "commit-0000000123.era-0000000004")
    assert names(folder) == ["commit-0000000123.era-0000000004", "edl.json"]
    assert names(Path(where)) == ["DONE", "state.safetensors"]
    data = (Path(where) / "state.safetensors").read_bytes()
    assert data == state(123, 4)
    assert json.loads((Path(where) / "DONE").read_text()) == {
        "format": 1,
        "job": "job",
        "run": "run",
        "era": 4,
        "commit": 123,
        "shards": 1,
        "files": {"state.safetensors": {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}},
        "written_at": "1970-01-01T00:00:00+00:00",
    }
    assert checkpoint_storage.newest() == (Version(4, 123), False)
    assert load(checkpoint_storage) == (Version(4, 123), data)


def test_other_tools_read_the_state(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    where = save(two(tmp_path), 30)
    with safetensors.safe_open(f"{where}/state.safetensors", "numpy") as file:
        assert set(file.get_tensor("x")) == {30}


def test_large_ones_go_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summed_files, "CHUNK_BYTES", 100)
    checkpoint_storage = two(tmp_path)
    assert load(checkpoint_storage) == (Version(1, 20), state(20))
    checkpoint_storage.verify(Version(1, 20))


def test_newest_is_by_era_then_commit(tmp_path: Path) -> None:
    checkpoint_storage = open_checkpoint_storage(PlainFiles(tmp_path), keep=9)
    for era, commit in [(1, 10), (2, 10), (3, 9), (1, 8)]:
        save(checkpoint_storage, commit, era)
    assert checkpoint_storage.newest() == (Version(3, 9), False)


def test_one_version_can_be_asked_for(tmp_path: Path) -> None:
    checkpoint_storage = two(tmp_path)
    assert load(checkpoint_storage, Version(1, 10))[0] == Version(1, 10)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint .*commit-0000000011"):
        load(checkpoint_storage, Version(1, 11))


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint in"):
        load(open_checkpoint_storage(PlainFiles(tmp_path / "none")))


def test_the_same_again_changes_nothing(tmp_path: Path) -> None:
    checkpoint_storage = two(tmp_path)
    before = manifest_path(tmp_path, 20).stat().st_mtime_ns, state_path(tmp_path, 20).stat().st_ino
    save(checkpoint_storage, 20)
    assert (manifest_path(tmp_path, 20).stat().st_mtime_ns, state_path(tmp_path, 20).stat().st_ino) == before


def test_the_same_with_other_bytes_stays_and_is_told(tmp_path: Path) -> None:
    two(tmp_path)
    said: list[str] = []
    checkpoint_storage = open_checkpoint_storage(PlainFiles(tmp_path), said=said)
    save(checkpoint_storage, 20, round_=7)
    assert load(checkpoint_storage)[1] == state(20)
    assert "already exists with different content" in said[0]


def test_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    checkpoint_storage = two(tmp_path)
    data = bytearray(state(20))
    data[-1] ^= 1
    state_path(tmp_path, 20).write_bytes(data)
    assert load(checkpoint_storage)[0] == Version(1, 10)
    save(checkpoint_storage, 20)
    assert load(checkpoint_storage)[0] == Version(1, 20)


def test_a_state_in_parts(tmp_path: Path) -> None:
    first, second = (open_checkpoint_storage(PlainFiles(tmp_path)) for _ in range(2))
    version = Version(1, 10)
    parts = [state(10, part=shard, of=2) for shard in range(2)]
    first.write(version, memoryview(parts[1]), 1, 2)
    assert first.newest() is None
    second.write(version, memoryview(parts[0]), 0, 2)
    assert first.newest() == (version, True)
    assert [load(first, version, shard)[1] for shard in range(2)] == parts


def test_parts_of_another_run_do_not_count(tmp_path: Path) -> None:
    files = PlainFiles(tmp_path)
    open_checkpoint_storage(files, "run-1").write(Version(1, 10), memoryview(state(10, part=0, of=2)), 0, 2)
    # not tidied away: the second run begins at a directory without an owner's file
    (tmp_path / "edl.json").unlink()
    checkpoint_storage = open_checkpoint_storage(files, "run-2")
    checkpoint_storage.write(Version(1, 10), memoryview(state(10, part=1, of=2)), 1, 2)
    assert checkpoint_storage.newest() is None


def test_too_little_memory_is_not_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bytes of memory"):
        two(tmp_path).read(None, lambda size: memoryview(bytearray(size - 1)))


# --- what is refused, and why ----------------------------------------------------------------------------------------


def refused_for(tmp_path: Path, reason: str) -> None:
    """Commit 20 is not read, and the reason is reported; commit 10 is. Without it, none is, and the error says why."""
    said: list[str] = []
    checkpoint_storage = open_checkpoint_storage(PlainFiles(tmp_path), said=said)
    for _ in range(2):
        assert load(checkpoint_storage)[0] == Version(1, 10)
    assert checkpoint_storage.newest() == (Version(1, 10), False)
    assert len(said) == 1
    assert reason in said[0]
    assert folder_name(Version(1, 20)) in said[0]
    manifest_path(tmp_path, 10).unlink()
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint_storage)
    with pytest.raises(CheckpointError):
        checkpoint_storage.newest()
    assert reason in str(caught.value)
    assert "move these folders away to start without them" in str(caught.value)
    assert folder_name(Version(1, 10)) not in str(caught.value)  # it counts as never completed


def test_each_flipped_bit_is_found(tmp_path: Path) -> None:
    two(tmp_path, size=100)
    path = state_path(tmp_path, 20)
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ (1 << position % 8)]) + data[position + 1 :])
        said: list[str] = []
        assert load(open_checkpoint_storage(PlainFiles(tmp_path), said=said))[0] == Version(1, 10)
        assert "the checksum of state.safetensors differs" in said[0]
    refused_for(tmp_path, "the checksum of state.safetensors differs")


def test_each_flipped_bit_of_the_marker_is_found_or_harmless(tmp_path: Path) -> None:
    """Only what is for people may change unnoticed: which run wrote it, and when."""
    two(tmp_path, size=100)
    path = manifest_path(tmp_path, 20)
    data = path.read_bytes()
    harmless = 0
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ (1 << position % 7)]) + data[position + 1 :])
        found, read = load(open_checkpoint_storage(PlainFiles(tmp_path)))
        assert read == state(found.commit, size=100)
        harmless += found == Version(1, 20)
    assert harmless < len(data) / 3


def test_each_truncation_is_found(tmp_path: Path) -> None:
    two(tmp_path, size=100)
    data = state_path(tmp_path, 20).read_bytes()
    for length in range(len(data)):
        state_path(tmp_path, 20).write_bytes(data[:length])
        said: list[str] = []
        assert load(open_checkpoint_storage(PlainFiles(tmp_path), said=said))[0] == Version(1, 10)
        assert f"state.safetensors is truncated: {length} of {len(data)} bytes" in said[0]
    refused_for(tmp_path, f"truncated: {len(data) - 1} of {len(data)} bytes")


def test_each_truncation_of_the_marker_is_found(tmp_path: Path) -> None:
    two(tmp_path, size=100)
    data = manifest_path(tmp_path, 20).read_bytes()
    for length in range(len(data) - 1):  # without its line end it says the same
        manifest_path(tmp_path, 20).write_bytes(data[:length])
        assert load(open_checkpoint_storage(PlainFiles(tmp_path)))[0] == Version(1, 10)
    refused_for(tmp_path, "the manifest is not JSON")


def test_too_long(tmp_path: Path) -> None:
    two(tmp_path)
    with state_path(tmp_path, 20).open("ab") as file:
        file.write(b"x")
    refused_for(tmp_path, "state.safetensors has")


def test_lost_file(tmp_path: Path) -> None:
    two(tmp_path)
    state_path(tmp_path, 20).unlink()
    refused_for(tmp_path, "state.safetensors is missing")


def test_newer_format(tmp_path: Path) -> None:
    two(tmp_path)
    change_marker(tmp_path, 20, format=2)
    refused_for(tmp_path, "the manifest has format 2, newer than this edl knows (1): upgrade edl")


@pytest.mark.parametrize("number", [None, 0, "1", True])
def test_no_format(number: object, tmp_path: Path) -> None:
    two(tmp_path)
    change_marker(tmp_path, 20, format=number)
    refused_for(tmp_path, "the manifest was not written by edl")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"files": {}}, "names no file"),
        ({"files": {"state.safetensors": 1}}, "has no entry for state.safetensors"),
        ({"files": {"state.safetensors": {"bytes": 1, "crc32": "x"}}}, "no checksum for state.safetensors"),
        ({"files": {"../../secret": {"bytes": 1, "crc32": "0"}}}, "../../secret is missing"),
        ({"commit": 21}, "its manifest says commit-0000000021"),
        ({"era": -1}, "era is -1"),
        ({"job": 7}, "job is 7"),
        ({"shards": True}, "shards is True"),
        ({"shards": 3}, "an older edl wrote this sharded state in bare parts"),
        ({"shards": 0}, "metadata is a pickle"),
    ],
)
def test_a_marker_that_makes_no_sense(values: dict[str, object], reason: str, tmp_path: Path) -> None:
    two(tmp_path)
    change_marker(tmp_path, 20, **values)
    said: list[str] = []
    assert load(open_checkpoint_storage(PlainFiles(tmp_path), said=said))[0] == Version(1, 10)
    assert reason in said[0]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (state(21), "its header says commit-0000000021"),
        (state(20, 2), "era-0000000002"),
        (state(20, part=1, of=3), "its header says part 1 of 3"),
        (state(20, job="other"), "its header says job other"),
        (b"no snapshot at all", "not a snapshot"),
    ],
)
def test_a_state_that_is_not_what_the_marker_says(data: bytes, reason: str, tmp_path: Path) -> None:
    two(tmp_path)
    state_path(tmp_path, 20).write_bytes(data)
    change_marker(tmp_path, 20, files={"state.safetensors": {"bytes": len(data), "crc32": f"{zlib.crc32(data):x}"}})
    refused_for(tmp_path, reason)


def test_another_jobs_checkpoint(tmp_path: Path) -> None:
    two(tmp_path)
    data = state(20, job="other")
    state_path(tmp_path, 20).write_bytes(data)
    sums = {"state.safetensors": {"bytes": len(data), "crc32": f"{zlib.crc32(data):x}"}}
    change_marker(tmp_path, 20, job="other", files=sums)
    assert load(open_checkpoint_storage(PlainFiles(tmp_path), adopt=True)) == (Version(1, 20), data)
    refused_for(tmp_path, "written by job other, this is job job (--adopt-checkpoint allows it)")


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two(tmp_path)
    read_into = PlainFiles.read_into

    def bad_sector(self: PlainFiles, name: str, offset: int, buffer: memoryview) -> int:
        if "0000000020" in name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        return read_into(self, name, offset, buffer)

    monkeypatch.setattr(PlainFiles, "read_into", bad_sector)
    said: list[str] = []
    assert load(open_checkpoint_storage(PlainFiles(tmp_path), said=said))[0] == Version(1, 10)
    assert "unreadable: Input/output error" in said[0]


def test_truncated_while_it_is_read(tmp_path: Path) -> None:
    two(tmp_path)
    memory = Memory()

    def allocate(size: int) -> memoryview:
        if not memory.asked:
            os.truncate(state_path(tmp_path, 20), 50)
        return memory(size)

    said: list[str] = []
    assert open_checkpoint_storage(PlainFiles(tmp_path), said=said).read(None, allocate) == Version(1, 10)
    assert "is truncated: 50 of" in said[0]
    assert memory.data == state(10)


def test_what_is_none_of_ours_is_not_touched(tmp_path: Path) -> None:
    for name in ["commit-1.era-1", "commit-00000000030.era-0000000001", "notes", "commit-0000000030.era-0000000001x"]:
        (tmp_path / name).mkdir()
    (tmp_path / "commit-0000000040.era-0000000001").write_text("a file")
    before = names(tmp_path)
    checkpoint_storage = two(tmp_path)
    for commit in (21, 22, 23):
        save(checkpoint_storage, commit)
    assert checkpoint_storage.newest() == (Version(1, 23), False)
    assert set(before) < set(names(tmp_path))
