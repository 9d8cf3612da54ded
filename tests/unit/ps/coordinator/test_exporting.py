"""Tables whose evicted rows are to be exported, and pservers without a checkpoint directory."""

from __future__ import annotations

import pytest

from ps.protocol import messages
from ps.spec import Eviction, TableSpec
from tests.support.ps_cluster_fixture import TABLE, Cluster

EXPORTING = TableSpec("words", 8, eviction=Eviction(most_rows=9, export=True))


@pytest.mark.parametrize("early", [False, True])
def test_rows_that_are_to_be_exported_need_a_checkpoint_directory(early: bool) -> None:
    """Also if the table is defined before the pservers are known."""
    one = Cluster()
    one.key_content = {"saves": False}
    if not early:
        one.started("p", "q")
    one.world("a", "b")
    one.tell("a", messages.Join("a", (TABLE, EXPORTING)))
    if early:
        one.started("p", "q")
    (refused,) = one.heard("a", messages.RequestRefused)
    assert refused.kind == "table" and "table words: Eviction(export=True)" in refused.text
    assert "pservers p and q have none: they would be lost" in refused.text and "--checkpoint-dir" in refused.text
    assert not one.heard("a", messages.Joined)
    assert one.trainer("b", "b", (TABLE, TableSpec("never", 8, eviction=Eviction(export=True))))


def test_a_pserver_that_cannot_export_rows_and_comes_later_is_reported() -> None:
    one = Cluster().started("p", "q")
    one.world("a")
    one.trainer("a", tables=(EXPORTING,))
    one.key_content = {"saves": False}
    one.add("r")
    assert [note for note in one.notes if "pserver r has none: they would be lost" in note]
    one.tell("a", messages.Join("a", (EXPORTING,)))
    assert not one.heard("a", messages.RequestRefused), "the job goes on"
