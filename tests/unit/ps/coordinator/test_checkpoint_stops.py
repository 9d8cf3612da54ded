"""Stops for checkpoints: who is released, and what abandons a checkpoint."""

from __future__ import annotations

from ps.protocol import messages
from tests.support.ps_cluster_fixture import Cluster
from tests.unit.ps.coordinator.test_machine import halted


def test_one_that_rests_while_the_others_stop_is_released_as_well() -> None:
    """It has received the order to stop, and stops when it is no member any more."""
    one = Cluster().started("p", "q")
    one.world("a", "b")
    one.trainer("a")
    b = one.trainer("b")
    one.tell("a", messages.Save(1))
    halted(one, "a")
    one.tell("b", messages.LeaveMembership(b))
    assert one.machine.checkpoints.phase == "name"
    halted(one, "b")
    one.tell("a", messages.DataNamed(1, ()))
    assert one.heard("b", messages.GoOn) == [messages.GoOn(1)]


def test_a_checkpoint_without_data_positions_is_abandoned() -> None:
    one = Cluster().started("p", "q")
    one.world("a")
    one.trainer("a")
    one.tell("a", messages.Save(1))
    halted(one, "a")
    one.tell("a", messages.DataNamed(1, (), "no ledger"))
    assert one.machine.checkpoints.phase == ""
    assert one.heard("a", messages.GoOn) == [messages.GoOn(1)]
    refused = one.heard("a", messages.RequestRefused)[-1].text
    assert "trainer a/0 could not name the data positions: no ledger" in refused
