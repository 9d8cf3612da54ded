"""Files of lines on real disks: full, vanished, and torn."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.adapters import line_files
from edl.adapters.line_files import LineFolder, first_line, lines_backwards
from edl.history.parts import HistoryPart
from edl.history.reading import find_runs, read
from edl.history.writer import HistoryFiles
from tests.support.history_fixture import RUN, line
from tests.support.small_disk import small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, where one may be mounted."""
    with small_disk(tmp_path / "disk", "256k", lazy=True) as folder:
        yield folder


def test_appends_whole_lines_and_reads_them(tmp_path: Path) -> None:
    folder = LineFolder(tmp_path / "job")
    with pytest.raises(FileNotFoundError):
        folder.append("a", b"one\n")
    folder.create(parents=False)
    assert folder.append("a", b"one\n") == 4
    assert folder.append("a", b"two\nthree\n") == 14
    assert folder.read("a") == b"one\ntwo\nthree\n"
    assert (first_line(tmp_path / "job" / "a"), next(lines_backwards(tmp_path / "job" / "a"))) == (b"one", b"three")
    (tmp_path / "job" / "folder").mkdir()
    (tmp_path / "job" / "link").symlink_to("a")
    assert [(name, size) for name, (size, _) in folder.files().items()] == [("a", 14)]
    folder.delete("a")
    folder.delete("a")
    assert folder.files() == {}


def test_a_folder_that_is_not_mounted_any_more_is_not_created_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LineFolder(tmp_path / "disk" / "job").create(parents=False)


def test_what_cannot_be_taken_back_is_completed_to_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = LineFolder(tmp_path)
    folder.append("a", b"one\n")
    write, calls = os.write, list[int]()

    def half(file: int, data: memoryview) -> int:
        calls.append(file)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:3])

    def refused(file: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", half)
        broken.setattr(os, "ftruncate", refused)
        with pytest.raises(OSError, match="No space"):
            folder.append("a", b"lines\n")
    folder.append("a", b"two\n")
    assert folder.read("a") == b"one\nlin\ntwo\n"


def test_a_full_disk_tears_no_line_and_loses_none_that_can_wait(disk: Path) -> None:
    said: list[str] = []
    (disk / "of somebody else").write_bytes(b"." * 200_000)
    files = HistoryFiles(LineFolder(disk / "job"), RUN, 0, said.append)
    for number in range(1, 401):
        files.append([line(4, number, number)])
    assert ["No space left on device" in text for text in said] == [True]
    full = (disk / "job" / HistoryPart(RUN, 4, 1).name).read_bytes()
    assert full.endswith(b"\n")
    assert 10 < full.count(b"\n") < 400
    (disk / "of somebody else").unlink()
    files.append([line(4, 401, 401)])
    assert said[1:] == [f"the history is written to {disk / 'job'} again; no line is lost"]
    view = read(find_runs([disk])[0], line_files)
    assert [one.after for one in view.lines] == list(range(1, 402))
    assert view.unreadable == 0
