"""Synchronised directories with entries that the launcher's user may not read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from edl.errors import CheckpointError
from tests.support.synced_nodes import LIMIT_S, NEVER, Make, SyncedNode, alike, complaint, make, meet

__all__ = ["make"]


class Refusals:
    """Paths whose folder or file cannot be opened, with the error number. Tests may run as root, whom nothing stops."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.numbers: dict[str, int] = {}
        scan, open_ = os.scandir, os.open

        def scandir(path: Any = ".") -> Any:
            self._check(path)
            return scan(path)

        def opened(path: Any, *arguments: Any, **named: Any) -> int:
            self._check(path)
            return open_(path, *arguments, **named)

        monkeypatch.setattr(os, "scandir", scandir)
        monkeypatch.setattr(os, "open", opened)

    def add(self, path: Path, number: int = errno.EACCES) -> None:
        self.numbers[str(path)] = number

    def _check(self, path: Any) -> None:
        number = self.numbers.get(str(path))
        if number is not None:
            raise OSError(number, os.strerror(number), str(path))


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Refusals:
    return Refusals(monkeypatch)


def unreadable_now(node: SyncedNode) -> None:
    """Looking at this node's directory fails: nothing counts as removed."""
    with pytest.raises(CheckpointError, match="Permission denied"):
        node.sync.alike(9, [node.name], LIMIT_S, NEVER)


def test_a_folder_that_may_not_be_read_at_the_start_is_skipped_and_named_once(make: Make, refusals: Refusals) -> None:
    a, b = make("a"), make("b")
    a.write("x", "x")
    a.write("lost+found/y", "y")
    refusals.add(a.out / "lost+found")
    a.open(), b.open()
    meet(a, b)
    assert alike(1, a, b) == []
    assert alike(2, a, b) == []
    assert b.files() == {"x": "x"}
    (line,) = [line for line in a.lines if "not copied" in line]
    assert "lost+found' is not copied: it is a folder that this user may not read" in line


def test_files_of_a_folder_that_becomes_unreadable_do_not_count_as_removed(make: Make, refusals: Refusals) -> None:
    a, b = make("a"), make("b")
    a.write("deep/x", "x")
    a.open(), b.open()
    meet(a, b)
    assert alike(1, a, b) == []
    refusals.add(a.out / "deep")
    unreadable_now(a)
    assert b.files() == {"deep/x": "x"}


def test_a_skipped_folder_that_becomes_readable_is_no_longer_skipped(make: Make, refusals: Refusals) -> None:
    a, b = make("a"), make("b")
    a.write("deep/x", "x")
    refusals.add(a.out / "deep")
    a.open(), b.open()
    meet(a, b)
    refusals.numbers.clear()
    assert alike(1, a, b) == []
    assert b.files() == {"deep/x": "x"}
    refusals.add(a.out / "deep")
    unreadable_now(a)
    assert b.files() == {"deep/x": "x"}


def test_files_of_others_are_not_put_into_a_skipped_folder(make: Make, refusals: Refusals) -> None:
    """They would count as removed there, and be removed on all nodes."""
    a, b = make("a"), make("b")
    a.write("deep/x", "x")
    (b.out / "deep").mkdir(parents=True)
    refusals.add(b.out / "deep")
    a.open(), b.open()
    meet(a, b)
    assert complaint("out/deep, which this user may not read. Let it read that folder", a, b)
    assert a.files() == {"deep/x": "x"}


def test_a_disk_that_fails_at_the_start_is_named(make: Make, refusals: Refusals) -> None:
    a = make("a")
    a.write("deep/x", "x")
    refusals.add(a.out / "deep", errno.EIO)
    with pytest.raises(CheckpointError, match=r"cannot read .*out/deep: Input/output error. Let this user read it"):
        a.open()


def test_the_others_say_why_they_do_not_get_a_file_that_may_not_be_read(make: Make, refusals: Refusals) -> None:
    a, b = make("a"), make("b")
    a.write("secret", "x")
    refusals.add(a.out / "secret")
    a.open(), b.open()
    meet(a, b)
    error = complaint("out/secret: node a cannot read it: Permission denied", a, b)
    assert "Let the user of its launcher read the file" in error


@pytest.mark.parametrize(("number", "writes"), [(errno.EMFILE, True), (errno.ENFILE, True), (errno.EACCES, False)])
def test_a_file_counts_as_written_to_while_there_is_no_descriptor_to_find_out(
    make: Make, refusals: Refusals, number: int, writes: bool
) -> None:
    a = make("a")
    a.write("x", "x")
    a.open()
    (stamp,) = a.tree.scan().files.values()
    refusals.add(a.out / "x", number)
    assert a.tree.in_use("0/x", stamp) is writes
