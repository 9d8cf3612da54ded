"""Which folders are set aside when a node is lost."""

from __future__ import annotations

import pytest

from edl.sync_dir.cut import LostNode, incomplete
from edl.sync_dir.index import FileRecord, FileVersion
from edl.types import NodeId

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
LOST = LostNode(A, until_ns=100)
HERE = {B: 0, C: 0}


def wrote(node: NodeId, path: str, at_ns: int) -> FileRecord:
    return FileRecord(f"0/{path}", FileVersion(7, 0, node), 1, at_ns, 0o644)


def found(node: NodeId, path: str, at_ns: int) -> FileRecord:
    """A file that is older than its node's launcher."""
    return FileRecord(f"0/{path}", FileVersion(1, at_ns, node), 1, at_ns, 0o644)


def removed(node: NodeId, path: str, at_ns: int) -> FileRecord:
    return FileRecord(f"0/{path}", FileVersion(8, 0, node), 1, at_ns, 0o644, removed=True)


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
        wrote(NodeId("lost before"), "step-2/rng", 105),
        found(C, "step-2/old", 105),
    ],
)
def test_a_folder_that_was_there_at_that_moment_stays(file: FileRecord) -> None:
    assert incomplete([*BOTH, wrote(B, "step-2/rng", 101), file], LOST, HERE) == []


def test_clocks_of_other_nodes_are_corrected() -> None:
    files = [*BOTH, wrote(C, "step-2/rng", 130)]
    assert incomplete(files, LOST, {B: 0, C: 40}) == []
    assert incomplete(files, LOST, {B: 0, C: 20}) == ["0/step-2"]


def test_files_of_the_directory_itself_stay() -> None:
    assert incomplete([wrote(B, "last.ckpt", 101)], LOST, HERE) == []


def test_of_folders_within_each_other_the_outermost_that_is_new() -> None:
    files = [wrote(A, "run/step-1/model", 50), wrote(B, "run/step-2/a/b/rng", 101)]
    assert incomplete(files, LOST, HERE) == ["0/run/step-2"]


def test_a_shared_directory_has_lost_nothing() -> None:
    files = [*BOTH, wrote(B, "step-2/rng", 101)]
    assert incomplete(files, LostNode(A, 100, frozenset({0})), HERE) == []
    assert incomplete(files, LostNode(A, 100, frozenset({1})), HERE) == ["0/step-2"]


def test_a_node_that_did_not_take_part_last_time_does_not_now() -> None:
    """Only the node of rank 0 writes, and rank 0 has moved from a to b."""
    files = [wrote(A, "step-1/model", 50), wrote(B, "step-2/model", 60), wrote(B, "step-3/model", 101)]
    assert incomplete(files, LOST, HERE) == []


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


def test_removed_files_make_no_folder() -> None:
    assert incomplete([*BOTH, removed(B, "tmp/x", 101)], LOST, HERE) == []


def test_what_has_been_set_aside_is_over() -> None:
    aside = FileRecord("0/step-2/", FileVersion(9, 0, B), 0, 0, 0, removed=True)
    assert incomplete([*BOTH, aside], LOST, HERE) == []
