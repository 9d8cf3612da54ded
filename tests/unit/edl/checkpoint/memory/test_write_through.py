"""A commit straight into the checkpoint directory."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from edl.adapters.remote_files import RemoteFiles, open_files
from edl.wire import snapshot
from edl.worker import write_through
from tests.support.checkpoint_tools import state

DATA = state(7, era=2)


def fill(room: Callable[[int], memoryview]) -> int:
    view = room(len(DATA))
    view[:] = DATA
    return len(DATA)


def test_what_is_written_is_what_is_mapped_again(tmp_path: Path) -> None:
    written = write_through.write(str(tmp_path), 2, 7, fill)
    assert (written.size, written.crc32, written.error) == (len(DATA), zlib.crc32(DATA), "")
    (folder,) = tmp_path.iterdir()
    assert (folder.name, os.listdir(folder)) == (snapshot.folder_name(2, 7), ["state.safetensors"])
    memory = write_through.mapped(str(tmp_path), 2, 7)
    assert bytes(memory.view) == DATA
    memory.view[:8] = bytes(8)
    memory.close()
    assert (folder / "state.safetensors").read_bytes() == DATA, "what is done with it nobody else sees"


def test_the_same_in_an_object_store(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    where = f"memory://{tmp_path.name}/run"
    assert write_through.write(where, 2, 7, fill).crc32 == zlib.crc32(DATA)
    memory = write_through.mapped(where, 2, 7)
    assert bytes(memory.view) == DATA
    memory.close()


def test_a_full_disk_costs_the_checkpoint_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    written = write_through.write(str(tmp_path), 2, 7, fill)
    assert "no space is left" in written.error and str(tmp_path) in written.error
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_an_error_of_the_script_leaves_nothing(tmp_path: Path) -> None:
    def fails(room: Callable[[int], memoryview]) -> int:
        room(100)
        raise RuntimeError("connection lost")

    with pytest.raises(RuntimeError):
        write_through.write(str(tmp_path), 2, 7, fails)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_complete_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / snapshot.folder_name(2, 7)
    folder.mkdir()
    (folder / "DONE").write_text("{}\n}\n")
    assert "is already complete" in write_through.write(str(tmp_path), 2, 7, fill).error
    assert os.listdir(folder) == ["DONE"]


@pytest.mark.parametrize("remote", [False, True])
def test_the_file_of_a_node_that_was_faster_stays_and_is_described(tmp_path: Path, remote: bool) -> None:
    """Its node may have died before it added the manifest; the one that this node adds has to be that of its file."""
    if remote:
        pytest.importorskip("fsspec")
    where = f"memory://{tmp_path.name}/run" if remote else str(tmp_path)
    files, theirs = open_files(where), state(7, era=2, size=2000)
    name = f"{snapshot.folder_name(2, 7)}/{snapshot.FILE_NAME}"

    def slow(room: Callable[[int], memoryview]) -> int:
        size = fill(room)
        files.write(name, [theirs])
        return size

    written = write_through.write(where, 2, 7, slow)
    assert (written.size, written.crc32, written.error) == (len(theirs), zlib.crc32(theirs), "")
    assert files.read(name) == theirs
    assert [entry.name for entry in files.entries(snapshot.folder_name(2, 7))] == [snapshot.FILE_NAME]


def test_a_short_answer_of_the_store_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros in its place would be taken for weights."""
    pytest.importorskip("fsspec")
    where = f"memory://{tmp_path.name}/run"
    assert write_through.write(where, 2, 7, fill).error == ""

    def short(self: RemoteFiles, name: str, offset: int, buffer: memoryview) -> int:
        return len(buffer) - 1

    monkeypatch.setattr(RemoteFiles, "read_into", short)
    with pytest.raises(OSError, match=f"the file ends after {len(DATA) - 1} bytes"):
        write_through.mapped(where, 2, 7)


def test_a_checkpoint_that_is_missing_in_the_store_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(FileNotFoundError):
        write_through.mapped(f"memory://{tmp_path.name}/run", 2, 7)
