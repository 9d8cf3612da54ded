"""Which members a start still waits for."""

from __future__ import annotations

from dataclasses import replace

from edl.sync_dir.barrier import PeerProgress, behind, lacking
from edl.sync_dir.messages import PeerReport
from edl.types import NodeId

A, B = NodeId("a"), NodeId("b")


def test_an_unknown_member_is_waited_for() -> None:
    assert lacking(3, [A, B], {B: PeerProgress(3, 3, 7, 7)}) == [A]
    assert behind(3, [A, B], {B: PeerProgress(3, 3, 7, 7)}) == [A]


def test_a_member_counts_once_its_old_workers_files_are_numbered_and_here() -> None:
    assert lacking(3, [A], {A: PeerProgress(settled=2, head=7, entered=7)}) == [A]
    assert lacking(3, [A], {A: PeerProgress(settled=3, head=7, entered=6)}) == [A]
    assert lacking(3, [A], {A: PeerProgress(settled=3, head=7, entered=7)}) == []
    assert lacking(3, [A], {A: PeerProgress(settled=4, head=7, entered=7)}) == []


def test_nobody_starts_before_all_have_the_files() -> None:
    assert behind(3, [A], {A: PeerProgress(settled=3, alike=2, head=7, entered=7)}) == [A]
    assert behind(3, [A], {A: PeerProgress(settled=3, alike=3, head=7, entered=7)}) == []


def test_nobody_starts_with_a_folder_that_another_member_has_set_aside() -> None:
    known = PeerProgress(settled=3, alike=2, head=7, entered=7, alike_head=5)
    aside = known.after(PeerReport("life", 8, settled=3, alike=3), 7)
    assert behind(3, [A], {A: aside}) == [A]
    assert behind(3, [A], {A: replace(aside, entered=8)}) == []
    later = aside.after(PeerReport("life", 99, settled=3, alike=3), 8)
    assert behind(3, [A], {A: later}) == []  # what its workers write now is not waited for
