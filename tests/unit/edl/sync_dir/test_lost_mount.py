"""Synchronised directories on file systems that are unmounted while the job runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.errors import CheckpointError
from edl.sync_dir import tree as tree_module
from tests.support.synced_nodes import LIMIT_S, NEVER, Make, SyncedNode, alike, complaint, make, meet

__all__ = ["make"]


class Mounts:
    """The file system that each directory is on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.below: set[str] = set()
        """Mount points without their file system."""
        found = tree_module.device_of
        monkeypatch.setattr(tree_module, "device_of", lambda root: found(root) + (root in self.below))

    def unmount(self, node: SyncedNode) -> Path:
        """Returns where its files can be mounted from again."""
        away = node.out.rename(node.out.with_name("away"))
        node.out.mkdir()
        self.below.add(str(node.out))
        return away


@pytest.fixture
def mounts(monkeypatch: pytest.MonkeyPatch) -> Mounts:
    return Mounts(monkeypatch)


def test_files_of_a_lost_mount_do_not_count_as_removed(make: Make, mounts: Mounts) -> None:
    a, b = make("a"), make("b")
    a.write("x", "x")
    a.open(), b.open()
    meet(a, b)
    assert alike(1, a, b) == []
    away = mounts.unmount(a)
    with pytest.raises(CheckpointError, match="another file system is there now"):
        a.sync.alike(2, [a.name], LIMIT_S, NEVER)
    assert b.files() == {"x": "x"}
    a.out.rmdir()
    away.rename(a.out)  # under another number, as that of NFS
    assert alike(3, a, b) == []
    assert a.files() == b.files() == {"x": "x"}


def test_nothing_is_put_on_the_disk_below_a_lost_mount(make: Make, mounts: Mounts) -> None:
    a, b = make("a").open(), make("b").open()
    meet(a, b)
    assert alike(1, a, b) == []
    mounts.unmount(a)
    b.write("y", "y")
    assert complaint("another file system is there now", a, b)
    assert list(a.out.iterdir()) == []


def test_a_directory_that_is_gone_is_not_made_again(make: Make) -> None:
    """As one in a file system that is not mounted any more: an empty one would remove the files on all nodes."""
    a = make("a").open()
    a.out.rename(a.out.with_name("away"))
    with pytest.raises(FileNotFoundError):
        a.tree.stage("0/x")
    assert not a.out.exists()


def test_a_directory_that_a_script_makes_anew_is_the_same_one(make: Make) -> None:
    a = make("a")
    a.write("x", "x")
    a.open()
    a.out.rename(a.out.with_name("away"))
    a.write("y", "y")
    assert list(a.tree.scan().files) == ["0/y"]
