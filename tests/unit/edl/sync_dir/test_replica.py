"""Two or three nodes with real directories, and launchers' connections between them."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from edl.adapters.clock import SystemClock, wall_clock_ns
from edl.adapters.copies import TcpCopies
from edl.adapters.copy_connection import CopyLimits
from edl.adapters.file_copies import TcpFileCopies
from edl.errors import CheckpointError
from edl.sync_dir.index import FileRecord, FileVersion
from edl.sync_dir.replica import NodeReplica
from edl.sync_dir.service import DirectorySync, PeerAddress
from edl.sync_dir.tree import SyncedTree
from edl.types import NodeId
from tests.support.copies_fixture import snapshot_pool

HOST = "127.0.0.1"
TOKEN = "token"
LIMIT_S = 60.0
NEVER = threading.Event()


class SyncedNode:
    """One node: its directory and the two ends of its connections."""

    def __init__(self, folder: Path, name: str, token: str = TOKEN) -> None:
        self.name = NodeId(name)
        self.out = folder / name / "out"
        self.lines: list[str] = []
        clock, limits = SystemClock(), CopyLimits()
        self.tree = SyncedTree([str(self.out)], self.name, f"life-{name}", wall_clock_ns, self.lines.append)
        copies = TcpFileCopies(lambda: token, clock, limits)
        self.sync = DirectorySync(self.name, f"life-{name}", self.tree, copies, clock, self.lines.append)
        self.server = TcpCopies(self.name, lambda: token, clock, limits, files=self.sync)

    def open(self) -> SyncedNode:
        self.sync.open()
        self.address = PeerAddress(self.name, HOST, self.server.start(snapshot_pool(), HOST))
        return self

    def close(self) -> None:
        self.sync.close()
        self.server.stop()

    def write(self, name: str, content: str, *, mtime_s: int = 0) -> None:
        path = self.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        if mtime_s:
            os.utime(path, (mtime_s, mtime_s))

    def files(self) -> dict[str, str]:
        """Contents by path, without what is edl's own."""
        found = (path for path in self.out.rglob("*") if path.is_file() and ".edl-sync" not in path.parts)
        return {str(path.relative_to(self.out)): path.read_text() for path in found}


Make = Callable[..., SyncedNode]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as cleanup:

        def one(name: str, **options: str) -> SyncedNode:
            node = SyncedNode(tmp_path, name, **options)
            cleanup.callback(node.close)
            return node

        yield one


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def meet(*nodes: SyncedNode) -> None:
    for node in nodes:
        node.sync.meet([other.address for other in nodes])


def alike(number: int, *nodes: SyncedNode, limit_s: float = LIMIT_S, writing: bool = False) -> list[BaseException]:
    """All nodes wait for the same round; returns what they have raised. ``writing``: workers run on on the first."""
    errors: list[BaseException] = []

    def wait(node: SyncedNode) -> None:
        try:
            members = [one.name for one in nodes]
            node.sync.alike(number, members, limit_s, NEVER, writing=writing and node is nodes[0])
        except CheckpointError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def complaint(text: str, *nodes: SyncedNode) -> str:
    """What a node says of a round that cannot end, with ``text`` in it. A busy machine needs a while to find out."""
    for limit_s in (0.3, 1.0, 5.0, LIMIT_S):
        for error in alike(1, *nodes, limit_s=limit_s):
            if text in str(error):
                return str(error)
    raise AssertionError(f"no node has said {text!r}")


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


def two_that_save(make: Make) -> tuple[SyncedNode, SyncedNode]:
    """Two nodes in round 2, each with its part of the first checkpoint."""
    a, b = make("a").open(), make("b").open()
    meet(a, b)
    assert alike(1, a, b) == []
    a.write("step-1/model", "of a")
    b.write("step-1/rng", "of b")
    assert alike(2, a, b) == []
    return a, b


WHOLE = {"step-1/model": "of a", "step-1/rng": "of b"}


def in_use(node: SyncedNode) -> dict[str, str]:
    """The files of the job. A node keeps those that were set aside only if it had fetched them."""
    return {name: content for name, content in node.files().items() if ".edl-before" not in name}


def test_a_folder_that_a_lost_node_may_have_written_too_is_set_aside(make: Make) -> None:
    """As a checkpoint with a file of each node: scripts that take the newest one would fail at each start."""
    a, b = two_that_save(make)
    a.close()
    a.write("step-2/model", "nobody has got it")
    b.write("step-2/rng", "of b")
    c = make("c").open()
    meet(b, c)
    assert alike(3, b, c) == []
    assert in_use(c) == WHOLE
    assert b.files() == {**WHOLE, "step-2.edl-before/rng": "of b"}
    assert any("step-2 appeared after the last known files of a lost node" in line for line in b.lines)

    again = make("a").open()  # with all that it had
    assert "step-2/model" in again.files()
    meet(again, b, c)
    assert alike(4, again, b, c) == []
    assert again.files() == {**WHOLE, "step-2.edl-before/model": "nobody has got it"}
    assert in_use(c) == WHOLE
    b.write("step-2/rng", "again")
    assert alike(5, again, b, c) == []
    assert in_use(c) == {**WHOLE, "step-2/rng": "again"}


def test_survivors_set_the_same_folders_aside(make: Make) -> None:
    a, b, c = make("a").open(), make("b").open(), make("c").open()
    meet(a, b, c)
    assert alike(1, a, b, c) == []
    a.close()
    for node in (b, c):
        node.write(f"step-1/{node.name}", "part")
    meet(b, c)
    assert alike(2, b, c) == []
    for node in (b, c):
        kept = {name.partition("/")[0] for name in node.files()}
        assert kept == {"step-1.edl-before"}, node.files()


def test_what_a_lost_node_finished_before_its_last_moment_stays(make: Make) -> None:
    a, b = two_that_save(make)
    b.write("step-2/rng", "of b")
    a.write("step-2/model", "of a")
    wait_until(lambda: "step-2/model" in b.files())
    a.close()
    meet(b)
    assert alike(3, b) == []
    assert b.files() == {**WHOLE, "step-2/rng": "of b", "step-2/model": "of a"}


def test_a_node_leaves_when_the_others_have_heard_it(make: Make) -> None:
    """Not when it has answered: the answer may not arrive, and the node would be taken for lost."""
    a, b = two_that_save(make)
    b.sync.meet([])  # this test asks for it
    request = {"node": "b", "life": "life-a", "has": 99}
    for _ in range(2):
        a.sync.report(request)
        assert a.sync.passed_on(0.3, NEVER) == "b"
    a.sync.report({**request, "ends": True})
    assert a.sync.passed_on(LIMIT_S, NEVER) == ""


def test_nothing_is_set_aside_for_a_node_that_has_left_or_stays_outside(make: Make) -> None:
    a, b = two_that_save(make)
    assert a.sync.passed_on(LIMIT_S, NEVER) == ""
    a.close()
    b.write("step-2/rng", "of b")
    meet(b)
    assert alike(3, b) == []
    assert b.files() == {**WHOLE, "step-2/rng": "of b"}

    c = make("c").open()
    meet(b, c)
    assert alike(4, b, c) == []
    b.write("step-3/rng", "of b")
    assert alike(5, b) == []  # c lives, and would have had its part
    assert "step-3/rng" in b.files()


def test_nothing_is_taken_from_workers_that_run_on(make: Make) -> None:
    a, b, c = make("a").open(), make("b").open(), make("c").open()
    meet(a, b, c)
    assert alike(1, a, b, c) == []
    a.close()
    b.write("step-1/b", "part")
    meet(b, c)
    assert alike(2, b, c, writing=True) == []
    assert b.files() == c.files() == {"step-1/b": "part"}


def test_a_newcomer_does_not_judge_what_was_written_without_it(make: Make) -> None:
    a, b = two_that_save(make)
    c = make("c").open()
    meet(a, b, c)
    assert alike(3, b) == []  # without a, which lives
    assert alike(4, b, c) == []
    a.close()
    meet(b, c)
    b.write("step-2/rng", "of b")
    assert alike(5, b, c) == []
    assert b.files() == c.files() == {**WHOLE, "step-2/rng": "of b"}


def test_a_node_that_was_outside_does_not_judge_by_the_world_that_it_knew(make: Make) -> None:
    a, b, c = make("a").open(), make("b").open(), make("c").open()
    meet(a, b, c)
    assert alike(1, a, b, c) == []
    for node in (a, b, c):
        node.write(f"step-1/{node.name}", "part")
    assert alike(2, a, b, c) == []
    a.close()
    meet(b, c)
    assert alike(3, b) == []
    b.write("step-2/b", "whole")
    assert alike(4, b, c) == []
    assert in_use(b) == in_use(c) == {"step-1/a": "part", "step-1/b": "part", "step-1/c": "part", "step-2/b": "whole"}


def an_hour_ahead() -> int:
    return wall_clock_ns() + 3600 * 10**9


def test_the_last_moment_of_a_lost_node_is_not_taken_by_its_clock(make: Make) -> None:
    a, b = two_that_save(make)
    a.tree.now_ns = an_hour_ahead
    for _ in range(3):
        b.sync.caught_up(LIMIT_S, NEVER)
    a.close()
    b.write("step-2/rng", "of b")
    meet(b)
    assert alike(3, b) == []
    assert in_use(b) == WHOLE


def test_a_folder_did_not_appear_later_because_of_its_writers_clock(make: Make) -> None:
    a, b = two_that_save(make)
    c = make("c")
    c.tree.now_ns = an_hour_ahead
    meet(a, b, c.open())
    assert alike(3, a, b, c) == []
    c.write("step-2/more", "of c")
    assert alike(4, a, b, c) == []
    a.close()
    meet(b, c)
    assert alike(5, b, c) == []
    assert in_use(b) == in_use(c) == {**WHOLE, "step-2/more": "of c"}


def test_a_folder_is_set_aside_whatever_times_its_files_show(make: Make) -> None:
    a, b = two_that_save(make)
    a.close()
    b.write("step-2/config", "copied with its time", mtime_s=1_000_000_000)
    meet(b)
    assert alike(3, b) == []
    assert b.files() == {**WHOLE, "step-2.edl-before/config": "copied with its time"}


def test_a_node_that_was_cut_off_comes_back_with_what_it_wrote_meanwhile(make: Make) -> None:
    a, b = two_that_save(make)
    for node in (a, b):
        meet(node)  # nobody else
    b.write("step-2/rng", "of b")
    assert alike(3, b) == []
    for number in range(9):
        a.write(f"step-2/model-{number}", "nobody has got it")
    wait_until(lambda: a.sync.total[0] == len(WHOLE) + 9)
    meet(a, b)
    assert alike(4, a, b) == []
    assert b.files() == {**WHOLE, "step-2.edl-before/rng": "of b"}
    assert {name.partition("/")[0] for name in a.files()} == {"step-1", "step-2.edl-before"}


def test_a_node_that_has_joined_since_the_last_checkpoint_takes_part_in_the_next(make: Make) -> None:
    a, b = two_that_save(make)
    c = make("c").open()
    meet(a, b, c)
    assert alike(3, a, b, c) == []
    c.close()
    a.write("step-2/model", "of a")
    b.write("step-2/rng", "of b")
    meet(a, b)
    assert alike(4, a, b) == []
    assert in_use(a) == in_use(b) == WHOLE


def test_a_node_that_has_not_taken_part_so_far_is_not_waited_for(make: Make) -> None:
    a, b = two_that_save(make)
    c = make("c").open()
    meet(a, b, c)
    assert alike(3, a, b, c) == []
    a.write("step-2/model", "of a")
    b.write("step-2/rng", "of b")
    assert alike(4, a, b, c) == []
    c.close()
    b.write("step-3/rng", "of b")
    meet(a, b)
    assert alike(5, a, b) == []
    assert a.files() == b.files() == {**WHOLE, "step-2/model": "of a", "step-2/rng": "of b", "step-3/rng": "of b"}


def test_a_folder_that_cannot_be_renamed_is_tried_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(13, "Permission denied", source)

    _, b = two_that_save(make)
    meet(b)
    b.write("step-2/rng", "of b")
    with monkeypatch.context() as patch:
        patch.setattr("edl.sync_dir.tree.os.rename", refuse)
        (error,) = alike(3, b)
        assert "cannot rename" in str(error) and "step-2: Permission denied" in str(error)
    assert alike(4, b) == []
    assert b.files() == {**WHOLE, "step-2.edl-before/rng": "of b"}


def test_a_round_that_ends_before_all_were_alike_has_judged_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newcomer cannot know what was lost before it came, and has not heard from the one that can."""
    a, b = two_that_save(make)
    a.close()
    b.write("step-2/rng", "of b")
    c = make("c").open()
    meet(b, c)
    over = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(b.sync, "_set_aside", lambda others: over.wait(LIMIT_S))
        threads = [threading.Thread(target=one.sync.alike, args=(3, [b.name, c.name], LIMIT_S, over)) for one in (b, c)]
        for thread in threads:
            thread.start()
        wait_until(lambda: c.sync.report({"node": "b", "life": "", "has": 0})[0]["alike"] == 3)
        over.set()
        for thread in threads:
            thread.join()
    assert alike(4, b, c) == []
    assert in_use(b) == in_use(c) == WHOLE


def test_who_shares_the_directory_may_have_renamed_a_folder_already(make: Make) -> None:
    a = make("a").open()
    a.tree.move_aside("0/step-2", "is gone")
    assert a.lines == []


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


B = NodeId("b")


def theirs(path: str, counter: int, *, removed: bool = False) -> FileRecord:
    """A file of six bytes, or a folder, in another node's version."""
    return FileRecord(path, FileVersion(counter, 0, B), 0 if removed else 6, 0 if removed else 10**18, 0o644, removed)


def replica_with(node: SyncedNode, *records: FileRecord) -> NodeReplica:
    """Holds these files of another node."""
    node.tree.open()
    replica = NodeReplica(node.name, node.tree)
    replica.open()
    enter(node, replica, *records)
    return replica


def enter(node: SyncedNode, replica: NodeReplica, *records: FileRecord) -> None:
    staged = {}
    for record in replica.missing(records):
        staged[record] = node.tree.stage(record.path)
        Path(staged[record]).write_text("theirs")
    assert replica.enter(records, staged) == ""


def test_a_folder_is_set_aside_and_written_anew_at_once(make: Make) -> None:
    a = make("a")
    replica = replica_with(a, theirs("0/x/y/f", 5))
    enter(a, replica, theirs("0/x/", 6, removed=True), theirs("0/x/y/f", 7))
    assert a.files() == {"x.edl-before/y/f": "theirs", "x/y/f": "theirs"}
    assert replica.total() == (1, 6)
    replica.look()
    assert not replica.look()
    assert replica.total() == (1, 6)


def test_of_a_folder_only_what_is_older_is_set_aside(make: Make) -> None:
    a = make("a")
    replica = replica_with(a, theirs("0/x/old", 5), theirs("0/x/new", 7))
    enter(a, replica, theirs("0/x/", 6, removed=True))
    assert a.files() == {"x/old.edl-before": "theirs", "x/new": "theirs"}


def test_files_that_were_removed_before_are_not_set_aside(make: Make) -> None:
    a = make("a")
    replica = replica_with(a, theirs("0/x/f", 5), theirs("0/x/g", 5))
    enter(a, replica, theirs("0/x/f", 6, removed=True))
    enter(a, replica, theirs("0/x/", 7, removed=True))
    assert a.files() == {"x.edl-before/g": "theirs"}


def test_a_file_with_the_name_of_a_folder_that_was_set_aside_stays(make: Make) -> None:
    a = make("a")
    replica = replica_with(a, theirs("0/x", 5))
    enter(a, replica, theirs("0/x/", 6, removed=True))
    assert a.files() == {"x": "theirs"}


def test_a_folder_whose_files_change_here_is_set_aside_later(make: Make) -> None:
    a = make("a")
    replica = replica_with(a, theirs("0/x/f", 5))
    a.write("x/f", "a moment ago")
    assert "is being changed here" in replica.enter([theirs("0/x/", 6, removed=True)], {})
    assert a.files() == {"x/f": "a moment ago"}


@pytest.mark.parametrize("path", ["7/x/", "0/../", "0/.edl-sync/"])
def test_a_folder_that_leads_out_of_the_directory_is_refused(make: Make, path: str) -> None:
    a = make("a")
    replica = replica_with(a, theirs("0/f", 5))
    head = replica.head
    with pytest.raises(CheckpointError, match="is not a path in a synchronised directory"):
        replica.enter([theirs(path, 6, removed=True)], {})
    assert replica.head == head
