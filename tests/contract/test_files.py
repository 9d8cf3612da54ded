"""Contract of ``Files``: a folder, an object store, and one with injected failures."""

from __future__ import annotations

import builtins
import contextlib
import errno
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edl.adapters import files as plain
from edl.adapters.files import PlainFiles
from edl.adapters.remote_files import RemoteFiles, open_files
from edl.errors import SettingError
from edl.ports import FileEntry, Files
from tests.support.checkpoint_tools import Crash, Disk, Fault, FaultyFiles

KINDS = ["plain", "memory", "faulty"]


@pytest.fixture(params=KINDS)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    if request.param == "plain":
        return PlainFiles(tmp_path / "place")
    if request.param == "memory":
        return memory(tmp_path)
    return FaultyFiles(PlainFiles(tmp_path / "place"), Fault())


def memory(tmp_path: Path) -> RemoteFiles:
    pytest.importorskip("fsspec")
    return RemoteFiles(f"memory://{tmp_path.parent.name}/{tmp_path.name}")


def test_a_place_that_does_not_exist(files: Files) -> None:
    assert list(files.entries()) == []
    assert list(files.entries("a/b")) == []
    assert files.stamp("a") == ""
    files.remove("a")
    files.remove("a/b")
    with pytest.raises(FileNotFoundError):
        files.read("a")
    with pytest.raises(FileNotFoundError):
        files.read_into("a/b", 0, memoryview(bytearray(1)))


def test_write_and_read(files: Files) -> None:
    files.write("a/b/c.bin", [b"one ", memoryview(b"two "), memoryview(bytearray(b"three"))])
    assert files.read("a/b/c.bin") == b"one two three"
    files.write("a/b/c.bin", [b"shorter"])
    assert files.read("a/b/c.bin") == b"shorter"
    files.write("empty", [])
    assert files.read("empty") == b""


def test_entries(files: Files) -> None:
    for name in ("b", "a/x", "a/y/z", "c.bin"):
        files.write(name, [b"12345"])
    assert list(files.entries()) == [FileEntry("a", 0, True), FileEntry("b", 5), FileEntry("c.bin", 5)]
    assert list(files.entries("a")) == [FileEntry("x", 5), FileEntry("y", 0, True)]
    assert list(files.entries("missing")) == []


def test_entries_that_are_links(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"12345")
    for name, target in (("to-file", "file"), ("to-folder", "folder"), ("to-nothing", "missing")):
        (tmp_path / name).symlink_to(target)
    assert PlainFiles(tmp_path).entries()[2:] == [
        FileEntry("to-file", 5, link=True),
        FileEntry("to-folder", 0, True, link=True),
        FileEntry("to-nothing", 0, link=True),
    ]


def test_a_file_is_no_folder(files: Files) -> None:
    files.write("a", [b"1"])
    with pytest.raises(NotADirectoryError):
        files.entries("a")


@pytest.mark.parametrize(
    ("offset", "size", "expected"), [(0, 10, b"0123456789"), (0, 3, b"012"), (7, 3, b"789"), (7, 99, b"789")]
)
def test_read_into(offset: int, size: int, expected: bytes, files: Files) -> None:
    files.write("a", [b"0123456789"])
    buffer = bytearray(b"?" * size)
    assert files.read_into("a", offset, memoryview(buffer)) == len(expected)
    assert buffer == expected + b"?" * (size - len(expected))


def test_remove(files: Files) -> None:
    files.write("a/b", [b"1"])
    with pytest.raises(OSError, match="not empty"):
        files.remove("a")
    files.remove("a/b")
    files.remove("a")
    assert list(files.entries()) == []


def test_stamp_changes_with_the_file(files: Files) -> None:
    files.write("a", [b"1"])
    first = files.stamp("a")
    assert first
    assert files.stamp("a") == first
    files.write("a", [b"2"])
    assert files.stamp("a") != first
    files.remove("a")
    assert files.stamp("a") == ""


def test_a_write_that_fails_leaves_nothing(files: Files) -> None:
    def broken() -> Iterator[bytes]:
        yield b"half"
        raise OSError(5, "the source is gone")

    with pytest.raises(OSError, match="the source is gone"):
        files.write("a/new", broken())
    assert [entry.name for entry in files.entries("a")] == []


def test_a_new_file_replaces_no_other(files: Files) -> None:
    files.write("a/b", [b"first"], new=True)
    with pytest.raises(FileExistsError):
        files.write("a/b", [b"second"], new=True)
    assert files.read("a/b") == b"first"
    assert [entry.name for entry in files.entries("a")] == ["b"]
    files.write("a/b", [b"third"])
    assert files.read("a/b") == b"third"


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "none"])
def test_one_of_many_writes_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refused)
    files, written = PlainFiles(tmp_path), list[int]()

    def write(number: int) -> None:
        with contextlib.suppress(FileExistsError):
            files.write("same", [bytes([number]) * 100_000], new=True)
            written.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8 if links else 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [bytes([number]) * 100_000 for number in written] == [files.read("same")]
    write(9)
    assert len(written) == 1
    assert [entry.name for entry in files.entries()] == ["same"]


def test_writes_from_many_threads(files: Files) -> None:
    contents = [bytes([number]) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=files.write, args=("same", [content])) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files.read("same") in contents
    assert [entry.name for entry in files.entries()] == ["same"]


def test_sync_of_what_others_wrote(files: Files) -> None:
    files.write("a/b/c", [b"1"])
    files.sync("a")


def test_names_for_people(files: Files) -> None:
    assert files.path("").rstrip("/") == files.where.rstrip("/")
    assert files.path("a/b") == f"{files.where.rstrip('/')}/a/b"
    free = files.free_bytes()
    assert free is None if files.remote else free is not None and free > 0


# --- only on a file system -------------------------------------------------------------------------------------------


def test_nothing_is_ever_seen_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old content until the very moment of the new one, whatever operation is the last."""
    files = PlainFiles(tmp_path)
    files.write("a", [b"old"])
    at = 0
    while True:
        fault = Fault(at, halfway=True)
        monkeypatch.setattr(plain, "os", Disk(fault))
        try:
            files.write("a", [b"brand ", b"new"])
        except Crash:
            assert files.read("a") in (b"old", b"brand new")
        else:
            break
        at += 1
    assert at > 5
    assert files.read("a") == b"brand new"


def test_order_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault()
    monkeypatch.setattr(plain, "os", Disk(fault))
    PlainFiles(tmp_path).write("folder/a", [b"1"])
    words = [line.split()[0] for line in fault.log]
    assert words == ["mkdir", "sync", "create", "write", "sync", "rename", "sync"]
    assert fault.log[1].endswith(str(tmp_path))
    assert fault.log[-1].endswith("folder")
    fault.log.clear()
    PlainFiles(tmp_path).remove("folder/a")
    assert [line.split()[0] for line in fault.log] == ["unlink", "sync"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault()
    monkeypatch.setattr(plain, "os", Disk(fault))  # writes two thirds of what it gets
    data = os.urandom(1000)
    PlainFiles(tmp_path).write("a", [data])
    assert (tmp_path / "a").read_bytes() == data
    assert sum(line.startswith("write") for line in fault.log) > 3


def test_two_may_make_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Disk):
        def mkdir(self, path: str) -> None:
            os.mkdir(path)
            super().mkdir(path)

    monkeypatch.setattr(plain, "os", Slow(Fault()))
    PlainFiles(tmp_path).write("a/b/c", [b"1"])
    assert (tmp_path / "a/b/c").read_bytes() == b"1"


# --- only over a network ---------------------------------------------------------------------------------------------


def test_which_place_is_meant(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    assert isinstance(open_files(str(tmp_path)), PlainFiles)
    local = open_files(f"file://{tmp_path}")
    assert isinstance(local, PlainFiles)
    assert local.path("a") == f"{tmp_path}/a"
    assert isinstance(open_files("memory://x"), RemoteFiles)


def without(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    real: Callable[..., ModuleType] = importlib.import_module
    real_import = builtins.__import__

    def import_module(name: str, package: str | None = None) -> ModuleType:
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}")
        return real(name, package)

    def dunder(name: str, *arguments: Any) -> Any:
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}")
        return real_import(name, *arguments)

    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(builtins, "__import__", dunder)


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "fsspec")
    with pytest.raises(SettingError) as caught:
        open_files("s3://bucket/folder")
    assert str(caught.value) == (
        "--checkpoint-dir=s3://bucket/folder: a URL needs the package fsspec, which is not installed. "
        "Run: pip install fsspec s3fs"
    )


def test_without_the_package_of_a_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    without(monkeypatch, "s3fs")
    with pytest.raises(SettingError, match=r"s3:// needs a package that is not installed .*pip install fsspec s3fs"):
        open_files("s3://bucket/folder")


def test_an_unknown_protocol() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(SettingError, match="nonsense"):
        open_files("nonsense://bucket/folder")


def test_errors_of_a_client_library_become_os_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ServiceError(Exception):
        pass

    def fail(*_: object, **__: object) -> None:
        raise ServiceError("try again later")

    files = memory(tmp_path)
    system = files._system
    for name in ("ls", "info", "cat_file", "open", "isdir"):
        monkeypatch.setattr(type(system), name, fail)
    buffer = memoryview(bytearray(1))
    actions: list[Callable[[], object]] = [
        files.entries,
        lambda: files.stamp("a"),
        lambda: files.read("a"),
        lambda: files.read_into("a", 0, buffer),
        lambda: files.write("a", [b"1"]),
        lambda: files.remove("a"),
    ]
    for action in actions:
        with pytest.raises(OSError, match="ServiceError: try again later"):
            action()
