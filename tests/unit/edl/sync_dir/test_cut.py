"""Which folders are set aside when a node is lost."""

from __future__ import annotations

import pytest

from edl.sync_dir.cut import LastMoment, LostNode, incomplete
from edl.sync_dir.index import FileRecord, FileVersion
from edl.types import NodeId

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
LOST = LostNode(A, LastMoment(until_ns=100))
HERE = {A: 0, B: 0, C: 0}


def wrote(node: NodeId, path: str, at_ns: int) -> FileRecord:
    """``at_ns``: when it appeared. The time that the file shows may be any, as of a copy that keeps it."""
    return FileRecord(f"0/{path}", FileVersion(7, 0, node), 1, 1, 0o644, appeared_ns=at_ns)


def found(node: NodeId, path: str, at_ns: int) -> FileRecord:
    """A file that is older than its node's launcher."""
    return FileRecord(f"0/{path}", FileVersion(1, at_ns, node), 1, at_ns, 0o644)


def removed(node: NodeId, path: str, at_ns: int) -> FileRecord:
    return FileRecord(f"0/{path}", FileVersion(8, 0, node), 1, 1, 0o644, removed=True, appeared_ns=at_ns)


BOTH = [wrote(A, "step-1/model", 50), wrote(B, "step-1/rng", 50)]
"""A whole checkpoint, of two nodes."""


def test_a_folder_that_appeared_after_the_lost_nodes_last_moment_is_set_aside() -> None:
    assert incomplete([*BOTH, wrote(B, "step-2/rng", 101), wrote(C, "step-2/deep/rng", 102)], LOST, HERE) == [
        "0/step-2"
    ]


@pytest.mark.parametrize(
    "file",
    [
        wrote(B, "step-2/config", 100),
        wrote(A, "step-2/model", 99),
        wrote(A, "step-2/model", 105),  # from a node that had it before it got lost
        wrote(B, "step-2/model", 0),
        removed(B, "step-2/model", 50),
        wrote(NodeId("lost before"), "step-2/rng", 105),
        found(C, "step-2/old", 105),
    ],
)
def test_a_folder_that_was_there_at_that_moment_stays(file: FileRecord) -> None:
    assert incomplete([*BOTH, wrote(B, "step-2/rng", 101), file], LOST, HERE) == []


def test_clocks_of_other_nodes_are_corrected() -> None:
    files = [*BOTH, wrote(C, "step-2/rng", 130)]
    assert incomplete(files, LOST, {B: 0, C: 40}) == []
    assert incomplete(files, LOST, {B: 0, C: 30}) == []
    assert incomplete(files, LOST, {B: 0, C: 20}) == ["0/step-2"]


def test_of_two_nodes_that_are_lost_at_once_one_had_its_part_copied() -> None:
    files = [*BOTH, wrote(B, "step-2/rng", 101), wrote(C, "step-2/more", 102)]
    assert incomplete(files, LOST, HERE) == ["0/step-2"]
    assert incomplete(files, LostNode(C, LastMoment(until_ns=103)), HERE) == []


def test_files_of_the_directory_itself_stay() -> None:
    assert incomplete([wrote(B, "last.ckpt", 101)], LOST, HERE) == []


def test_of_folders_within_each_other_the_outermost_that_is_new() -> None:
    files = [wrote(A, "run/step-1/model", 50), wrote(B, "run/step-2/a/b/rng", 101)]
    assert incomplete(files, LOST, HERE) == ["0/run/step-2"]
    assert incomplete([*files, wrote(B, "test/step-1/model", 60)], LOST, HERE) == ["0/run/step-2"]


def test_a_shared_directory_has_lost_nothing() -> None:
    files = [*BOTH, wrote(B, "step-2/rng", 101)]
    assert incomplete(files, LostNode(A, LastMoment(100, shared=frozenset({0}))), HERE) == []
    assert incomplete(files, LostNode(A, LastMoment(100, shared=frozenset({1}))), HERE) == ["0/step-2"]


def test_a_node_that_did_not_take_part_last_time_does_not_now() -> None:
    """Only the node of rank 0 writes, and rank 0 has moved from a to b."""
    files = [wrote(A, "step-1/model", 50), wrote(B, "step-2/model", 60), wrote(B, "step-3/model", 101)]
    assert incomplete(files, LOST, HERE) == []
    assert incomplete(files, LostNode(A, LastMoment(100), since_ns=60), HERE) == []


def test_a_node_that_joined_after_the_last_folder_may_take_part_in_the_next() -> None:
    files = [wrote(B, "step-1/model", 50), wrote(B, "step-2/model", 60), wrote(B, "step-3/model", 101)]
    assert incomplete(files, LostNode(A, LastMoment(100), since_ns=61), HERE) == ["0/step-3"]


def test_only_folders_with_the_same_name_but_for_numbers_tell_who_takes_part() -> None:
    """Rank 0 writes the logs alone, and has written there since the last checkpoint."""
    files = [*BOTH, wrote(B, "step-2/rng", 101), wrote(B, "runs/events-1", 60), wrote(B, "runs/events-2", 102)]
    assert incomplete(files, LOST, HERE) == ["0/step-2"]
    assert incomplete([*files, wrote(B, "step-1-5/model", 70)], LOST, HERE) == ["0/step-2"]
    assert incomplete([*files, wrote(B, "step-15/model", 70)], LOST, HERE) == []


def test_the_folder_before_is_the_one_with_the_newest_file() -> None:
    files = [wrote(B, "step-0/model", 60), wrote(A, "step-1/model", 70), wrote(B, "step-1/rng", 50)]
    assert incomplete([*files, wrote(B, "step-2/rng", 101)], LOST, HERE) == ["0/step-2"]


def test_what_was_written_later_to_an_older_folder_does_not_tell_who_takes_part() -> None:
    files = [*BOTH, wrote(B, "step-0/model", 40), wrote(B, "step-0/again", 103), wrote(C, "step-2/rng", 101)]
    assert incomplete(files, LOST, HERE) == ["0/step-2"]


def test_whoever_wrote_files_that_are_older_than_the_launchers_is_not_known() -> None:
    files = [found(B, "step-1/model", 50), wrote(B, "step-2/model", 101)]
    assert incomplete(files, LOST, HERE) == ["0/step-2"]


def test_the_first_folder_of_all_is_set_aside() -> None:
    """It may lack something, and a start without it works."""
    assert incomplete([wrote(B, "step-1/rng", 101)], LOST, HERE) == ["0/step-1"]


def test_the_only_one_stays_when_the_one_before_it_has_been_removed() -> None:
    files = [removed(B, "step-1/model", 50), removed(B, "step-1/rng", 50), wrote(B, "step-2/model", 101)]
    assert incomplete(files, LOST, HERE) == []
    assert incomplete([*files, wrote(A, "step-0/model", 40)], LOST, HERE) == ["0/step-2"]
    assert incomplete([*files, found(A, "step-0/model", 40)], LOST, HERE) == ["0/step-2"]


def test_a_folder_that_is_written_again_and_again_stays() -> None:
    """Else nothing would be left. Whether its files are of one step is not known."""
    overwritten, written_anew = (
        wrote(B, "last/model", 50),
        [removed(B, "last/part-7", 50), wrote(B, "last/part-8", 101)],
    )
    assert incomplete([overwritten], LOST, HERE) == []
    assert incomplete(written_anew, LOST, HERE) == []


def test_removed_files_make_no_folder() -> None:
    assert incomplete([*BOTH, removed(B, "tmp/x", 101)], LOST, HERE) == []


def test_a_file_that_came_and_went_since_is_as_if_it_had_never_been() -> None:
    files = [*BOTH, wrote(B, "step-2/rng", 102), removed(B, "step-2/rng.tmp", 101)]
    assert incomplete(files, LOST, HERE) == ["0/step-2"]
    assert incomplete([wrote(B, "step-2/rng", 102), removed(B, "step-1/x", 101)], LOST, HERE) == ["0/step-2"]


def test_what_has_been_set_aside_is_over() -> None:
    aside = FileRecord("0/step-2/", FileVersion(9, 0, B), 0, 0, 0, removed=True)
    assert incomplete([*BOTH, aside], LOST, HERE) == []
    assert incomplete([*BOTH, aside, wrote(B, "step-2/rng", 101)], LOST, HERE) == ["0/step-2"]
