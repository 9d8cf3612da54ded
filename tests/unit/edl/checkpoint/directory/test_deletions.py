"""Deleting checkpoints: those that cannot be deleted, links, and checkpoints that are gone already."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from edl.adapters.files import PlainFiles
from edl.checkpoint.directory.manifest import folder_name
from edl.errors import CheckpointError
from edl.wire.records import Version
from tests.support.checkpoint_tools import load, open_checkpoint_storage, save, state
from tests.unit.edl.checkpoint.directory.test_directory_disks import ONE, SmallDisk
from tests.unit.edl.checkpoint.directory.test_retention import commits


def folder_of(commit: int) -> str:
    return folder_name(Version(1, commit))


class StubbornDisk(SmallDisk):
    """Nothing can be deleted from some folders: they belong to another user."""

    def __init__(self, folder: Path, capacity: int = 1 << 30) -> None:
        super().__init__(folder, capacity)
        self.stuck: set[str] = set()

    def remove(self, name: str) -> None:
        if name.partition("/")[0] in self.stuck:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self.path(name))
        super().remove(name)


def test_one_that_cannot_be_deleted_keeps_no_other_and_is_named_once(tmp_path: Path) -> None:
    disk, said = StubbornDisk(tmp_path), list[str]()
    checkpoint_storage = open_checkpoint_storage(disk, keep=2, said=said)
    save(checkpoint_storage, 1)
    disk.stuck.add(folder_of(1))
    for commit in (2, 3, 4, 5):
        save(checkpoint_storage, commit)
    assert commits(tmp_path) == [1, 4, 5]
    (line,) = said
    assert f"cannot delete the checkpoint {tmp_path / folder_of(1)}: Permission denied" in line
    disk.stuck.clear()
    save(checkpoint_storage, 6)
    assert commits(tmp_path) == [5, 6]


def test_on_a_full_disk_the_others_make_room(tmp_path: Path) -> None:
    disk = StubbornDisk(tmp_path, 4 * ONE + 500)
    checkpoint_storage = open_checkpoint_storage(disk, keep=4)
    for commit in (1, 2, 3, 4):
        save(checkpoint_storage, commit)
    disk.stuck.add(folder_of(1))
    save(checkpoint_storage, 5)
    assert commits(tmp_path) == [1, 3, 4, 5]
    assert load(checkpoint_storage)[0] == Version(1, 5)


def test_one_that_an_earlier_run_left_keeps_no_other(tmp_path: Path) -> None:
    disk, said = StubbornDisk(tmp_path), list[str]()
    open_checkpoint_storage(disk, "run-1").check()
    for commit in (5, 6):
        (tmp_path / folder_of(commit)).mkdir()
        (tmp_path / folder_of(commit) / "state.safetensors").write_bytes(b"half")
    disk.stuck.add(folder_of(5))
    open_checkpoint_storage(disk, "run-2", said=said).check()
    assert commits(tmp_path) == [5]
    assert [folder_of(5) in line for line in said] == [True]


def test_checkpoints_that_are_gone_do_not_count_as_those_to_keep(tmp_path: Path) -> None:
    """An operator has moved the newest ones away: the others are the last ones."""
    place = tmp_path / "place"
    disk = SmallDisk(place, 1 << 30)
    checkpoint_storage = open_checkpoint_storage(disk, keep=4)
    for commit in (1, 2, 3, 4):
        save(checkpoint_storage, commit)
    for commit in (3, 4):
        (place / folder_of(commit)).rename(tmp_path / folder_of(commit))
    disk.capacity = disk.used() + 10
    with pytest.raises(CheckpointError, match="no space is left"):
        save(checkpoint_storage, 5)
    assert commits(place) == [1, 2]
    assert load(checkpoint_storage)[0] == Version(1, 2)


# --- links -----------------------------------------------------------------------------------------------------------


def test_what_a_link_in_a_checkpoint_leads_to_stays(tmp_path: Path) -> None:
    place, archive = tmp_path / "place", tmp_path / "archive"
    checkpoint_storage = open_checkpoint_storage(PlainFiles(place), keep=2)
    save(checkpoint_storage, 1)
    (archive / "deep").mkdir(parents=True)
    (archive / "deep" / "file").write_text("precious")
    (place / folder_of(1) / "extra").symlink_to(archive)
    (place / folder_of(1) / "file").symlink_to(archive / "deep" / "file")
    (place / folder_of(1) / "nowhere").symlink_to(archive / "missing")
    for commit in (2, 3):
        save(checkpoint_storage, commit)
    assert commits(place) == [2, 3]
    assert (archive / "deep" / "file").read_text() == "precious"


def test_of_a_checkpoint_that_was_moved_only_the_link_goes(tmp_path: Path) -> None:
    place, archive = tmp_path / "place", tmp_path / "archive"
    checkpoint_storage = open_checkpoint_storage(PlainFiles(place), keep=2)
    save(checkpoint_storage, 1)
    (place / folder_of(1)).rename(archive)
    (place / folder_of(1)).symlink_to(archive)
    assert load(open_checkpoint_storage(PlainFiles(place)))[1] == state(1)
    for commit in (2, 3):
        save(checkpoint_storage, commit)
    assert commits(place) == [2, 3]
    assert sorted(path.name for path in archive.iterdir()) == ["DONE", "state.safetensors"]


def test_of_a_link_that_an_earlier_run_left_only_the_link_goes(tmp_path: Path) -> None:
    place, archive = tmp_path / "place", tmp_path / "archive"
    open_checkpoint_storage(PlainFiles(place), "run-1").check()
    archive.mkdir()
    (archive / "file").write_text("precious")
    (place / folder_of(5)).symlink_to(archive)
    open_checkpoint_storage(PlainFiles(place), "run-2").check()
    assert commits(place) == []
    assert (archive / "file").read_text() == "precious"
