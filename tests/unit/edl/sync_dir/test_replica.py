"""Two or three nodes with real directories, and launchers' connections between them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from edl.errors import CheckpointError
from edl.sync_dir.index import FileRecord, FileVersion
from edl.sync_dir.replica import NodeReplica
from edl.types import NodeId
from tests.support.synced_nodes import (
    LIMIT_S,
    NEVER,
    Make,
    alike,
    complaint,
    make,
    meet,
)

__all__ = ["make"]


def test_all_have_what_any_had_and_then_what_any_writes(make: Make) -> None:
    a, b, c = make("a"), make("b"), make("c")
    a.write("deep/er/x", "x of a")
    b.write("y", "y of b")
    for node in (a, b, c):
        node.open()
    meet(a, b, c)
    assert alike(1, a, b, c) == []
    assert a.files() == b.files() == c.files() == {"deep/er/x": "x of a", "y": "y of b"}

    c.write("y", "y of c")
    (c.out / "deep/er/x").unlink()
    a.write("z", "z of a")
    assert alike(2, a, b, c) == []
    assert a.files() == b.files() == c.files() == {"y": "y of c", "z": "z of a"}
    assert not (a.out / "deep").exists()  # an empty folder would look like a checkpoint


def test_long_names_in_any_script_are_copied(make: Make) -> None:
    """Frames are JSON, in which each of these characters takes six."""
    a, b = make("a").open(), make("b").open()
    meet(a, b)
    name = "/".join(["训" * 80] * 10)
    a.write(name, "x")
    assert alike(1, a, b) == []
    assert b.files() == {name: "x"}


def test_times_and_modes_are_kept_and_nothing_comes_back_as_a_change(make: Make) -> None:
    a, b = make("a"), make("b")
    a.write("x", "x", mtime_s=1_000_000_000)
    (a.out / "x").chmod(0o640)
    a.open(), b.open()
    meet(a, b)
    assert alike(1, a, b) == []
    found = (b.out / "x").stat()
    assert (found.st_mtime_ns, found.st_mode & 0o777) == (10**18, 0o640)
    a.write("y", "y")
    assert alike(2, a, b) == []
    inodes = {node.name: (node.out / "x").stat().st_ino for node in (a, b)}
    assert alike(3, a, b) == []
    assert inodes == {node.name: (node.out / "x").stat().st_ino for node in (a, b)}
    (a.out / "x").chmod(0o755)
    assert alike(4, a, b) == []
    assert (b.out / "x").stat().st_mode & 0o777 == 0o755
    (b.out / "x").chmod(0o600)
    assert alike(5, a, b) == []
    assert (a.out / "x").stat().st_mode & 0o777 == 0o600
    assert inodes == {node.name: (node.out / "x").stat().st_ino for node in (a, b)}, "only the mode was copied"


def test_each_change_here_is_entered_once(make: Make) -> None:
    """A change that was entered again would go to all nodes again, for ever."""
    node = make("a")
    node.write("x", "x")
    node.tree.open()
    replica = NodeReplica(node.name, node.tree)
    replica.open()

    def changes() -> list[FileRecord]:
        """All that looking finds after this moment."""
        begin = replica.head
        while replica.look():
            pass
        for _ in range(3):
            replica.look()
        found = replica.since(begin)
        assert found.head == begin + len(found.records)
        return found.records

    changes()
    assert changes() == []
    node.write("x", "longer")
    (written,) = changes()
    assert written.version.counter > 0, "it is of the job, not older"
    assert changes() == []
    (node.out / "x").unlink()
    (gone,) = changes()
    assert gone.removed and gone.version > written.version
    assert changes() == []


def test_files_that_are_older_than_the_job_are_moved_aside(make: Make) -> None:
    a, b = make("a"), make("b")
    a.write("x", "newer", mtime_s=2_000_000_000)
    b.write("x", "older", mtime_s=1_000_000_000)
    a.open(), b.open()
    meet(a, b)
    assert alike(1, a, b) == []
    assert a.files() == {"x": "newer"}
    assert b.files() == {"x": "newer", "x.edl-before": "older"}
    assert any("x.edl-before" in line for line in b.lines)
    assert alike(2, a, b) == []
    assert "x.edl-before" not in a.files()


def test_what_the_workers_have_started_with_is_the_jobs(make: Make) -> None:
    """It is overwritten like any file of the job, and a newcomer's newer file of that name does not replace it."""
    a, b, c = make("a"), make("b"), make("c")
    for node in (a, b):
        node.write("x", "resumed", mtime_s=1_000_000_000)
        node.write("y", "resumed", mtime_s=1_000_000_000)
    c.write("y", "of another run", mtime_s=2_000_000_000)
    a.open(), b.open()
    meet(a, b)
    assert alike(1, a, b) == []
    a.write("x", "saved")
    assert alike(2, a, b) == []
    assert b.files() == {"x": "saved", "y": "resumed"}
    c.open()
    meet(a, b, c)
    assert alike(3, a, b, c) == []
    assert a.files() == b.files() == {"x": "saved", "y": "resumed"}
    assert c.files() == {"x": "saved", "y": "resumed", "y.edl-before": "of another run"}


def test_what_a_running_job_wrote_or_removed_wins_over_a_newcomers_files(make: Make) -> None:
    a, b = make("a"), make("b")
    a.open()
    a.write("x", "of the job", mtime_s=1_000_000_000)
    a.write("gone", "soon")
    assert alike(1, a) == []
    (a.out / "gone").unlink()
    assert alike(2, a) == []
    b.write("x", "of another run", mtime_s=2_000_000_000)
    b.write("gone", "a file of that name")
    b.open()
    meet(a, b)
    b.sync.caught_up(LIMIT_S, NEVER)
    assert b.files() == {
        "x": "of the job",
        "x.edl-before": "of another run",
        "gone.edl-before": "a file of that name",
    }
    assert alike(3, a, b) == []
    assert a.files() == {"x": "of the job"}


def test_a_file_takes_the_name_of_a_folder_and_a_folder_that_of_a_file(make: Make) -> None:
    """As ``last.ckpt`` of a trainer whose strategy has changed."""
    first, second = make("a").open(), make("b").open()
    meet(first, second)
    first.write("last.ckpt/weights", "1")
    first.write("last.ckpt/more/optimizer", "2")
    first.write("best.ckpt", "3")
    assert alike(1, first, second) == []
    shutil.rmtree(first.out / "last.ckpt")
    first.write("last.ckpt", "4")
    (first.out / "best.ckpt").unlink()
    first.write("best.ckpt/weights", "5")
    assert alike(2, first, second) == []
    assert second.files() == first.files() == {"last.ckpt": "4", "best.ckpt/weights": "5"}


def test_a_file_that_is_open_for_writing_keeps_its_finished_version_elsewhere(make: Make) -> None:
    a, b = make("a"), make("b")
    a.write("x", "finished")
    a.open(), b.open()
    meet(a, b)
    assert alike(1, a, b) == []
    with (a.out / "x").open("w") as file:
        file.write("half")
        file.flush()
        a.write("y", "y")
        assert alike(2, a, b) == []
        assert b.files() == {"x": "finished", "y": "y"}
        file.write(" and half")
    assert alike(3, a, b) == []
    assert b.files() == {"x": "half and half", "y": "y"}


def test_a_lost_nodes_files_spread_from_whoever_has_them(make: Make) -> None:
    a, b, c = make("a"), make("b"), make("c")
    for node in (a, b, c):
        node.open()
    meet(a, b)
    a.write("x", "of a")
    assert alike(1, a, b) == []
    a.close()
    meet(b, c)
    assert alike(2, b, c) == []
    assert c.files() == {"x": "of a"}


def test_a_dead_launcher_that_the_store_still_lists_is_not_waited_for(make: Make) -> None:
    a, b = make("a"), make("b")
    a.open(), b.open()
    meet(a, b)
    assert alike(1, a, b) == []
    b.close()
    a.write("x", "x")
    a.sync.alike(2, [a.name], LIMIT_S, NEVER)
    assert a.sync.passed_on(LIMIT_S, NEVER) == ""


def test_one_folder_seen_by_two_nodes_is_left_alone(tmp_path: Path, make: Make) -> None:
    a, b = make("a"), make("b")
    a.write("x", "x")
    b.out.parent.mkdir()
    b.out.symlink_to(a.out)
    a.open(), b.open()
    meet(a, b)
    assert alike(1, a, b) == []
    assert a.files() == {"x": "x"}
    assert any("is shared with node b" in line for line in a.lines)


def test_links_and_pipes_are_named_once_and_not_copied(make: Make) -> None:
    a, b = make("a"), make("b")
    a.write("x", "x")
    (a.out / "link").symlink_to("x")
    os.mkfifo(a.out / "pipe")
    a.open(), b.open()
    meet(a, b)
    assert alike(1, a, b) == []
    assert alike(2, a, b) == []
    assert b.files() == {"x": "x"}
    assert sorted(line.split("'")[1].rsplit("/")[-1] for line in a.lines if "not copied" in line) == ["link", "pipe"]


def test_a_member_that_cannot_be_reached_is_named_with_what_to_do(make: Make) -> None:
    a, b = make("a"), make("b", token="another job's")
    a.open(), b.open()
    a.sync.meet([b.address])
    error = complaint("does not know this job's token", a, b)
    assert "node b" in error
    assert "--sync-timeout" in error


def test_a_full_disk_is_named_and_the_wait_ends_with_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make("a"), make("b")
    a.write("x", "x" * 1000)
    a.open(), b.open()
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 10, 10, 10, 0, 255))
    monkeypatch.setattr("edl.sync_dir.tree.os.statvfs", lambda path: full)
    meet(a, b)
    assert complaint("no space for 1000 bytes", a, b)
    assert any("no space for 1000 bytes" in line for line in b.lines)
    assert b.files() == {}


@pytest.mark.parametrize("path", ["0/../x", "1/x", "x", "0/", "0//x", "0/a/./x", "0/.edl-sync/x", "0/away/x", "0/x\0"])
def test_a_path_that_leads_out_of_the_directory_is_refused(tmp_path: Path, make: Make, path: str) -> None:
    a = make("a").open()
    (a.out / "away").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="--sync-dir"):
        a.tree.locate(path)


def test_too_many_files_are_refused_with_the_limit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl.sync_dir.tree.MOST_FILES", 2)
    a = make("a")
    for name in "xyz":
        a.write(name, name)
    with pytest.raises(CheckpointError, match="more than 2 files"):
        a.open()


def test_nothing_of_edl_stays_in_the_directory(make: Make) -> None:
    a, b = make("a"), make("b")
    a.write("x", "x")
    a.open(), b.open()
    meet(a, b)
    assert alike(1, a, b) == []
    for node in (a, b):
        node.close()
    assert [path.name for node in (a, b) for path in node.out.iterdir()] == ["x", "x"]


# --- one replica -----------------------------------------------------------------------------------------------------


def test_what_has_just_been_written_here_is_not_overwritten_before_it_counts(make: Make) -> None:
    a = make("a")
    a.write("x", "known")
    a.tree.open()
    replica = NodeReplica(a.name, a.tree)
    replica.open()
    a.write("x", "written a moment ago")
    theirs = FileRecord("0/x", FileVersion(9, 0, NodeId("b")), 6, 10**18, 0o644)
    staged = a.tree.stage("0/x")
    Path(staged).write_text("theirs")
    assert "is being changed here" in replica.enter([theirs], {theirs: staged})
    assert a.files() == {"x": "written a moment ago"}
    assert [replica.look(), replica.look()] == [True, False]
    assert replica.enter([theirs], {theirs: staged}) == ""  # both count now, and theirs has the higher counter
    assert a.files()["x"] == "theirs"


def test_a_file_that_changes_while_it_is_sent_is_not_passed_off_as_its_version(make: Make) -> None:
    a = make("a")
    a.write("x", "first")
    a.tree.open()
    replica = NodeReplica(a.name, a.tree)
    replica.open()
    (record,) = replica.since(0).records
    with replica.opened(record) as lent:
        assert lent is not None
        assert lent.unchanged()
        with (a.out / "x").open("a") as file:
            file.write(" and more")
        assert not lent.unchanged()
    with replica.opened(record) as again:
        assert again is None
