"""Two or three nodes of which one is lost: what the others do with folders that may lack its files."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from edl.adapters.clock import wall_clock_ns
from edl.errors import CheckpointError
from edl.sync_dir.index import FileRecord, FileVersion
from edl.sync_dir.replica import NodeReplica
from edl.types import NodeId
from tests.support.synced_nodes import (
    LIMIT_S,
    NEVER,
    Make,
    SyncedNode,
    alike,
    make,
    meet,
    wait_until,
)

__all__ = ["make"]


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
    wait_until(b, lambda: "step-2/model" in b.files())
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
    wait_until(a, lambda: a.sync.total[0] == len(WHOLE) + 9)
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
        wait_until(c, lambda: c.sync.report({"node": "b", "life": "", "has": 0})[0]["alike"] == 3)
        over.set()
        for thread in threads:
            thread.join()
    assert alike(4, b, c) == []
    assert in_use(b) == in_use(c) == WHOLE


def test_who_shares_the_directory_may_have_renamed_a_folder_already(make: Make) -> None:
    a = make("a").open()
    a.tree.move_aside("0/step-2", "is gone")
    assert a.lines == []


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
