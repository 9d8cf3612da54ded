"""What the Master that takes over knows of pservers and trainers."""

from __future__ import annotations

from ps.protocol import messages
from tests.support.ps_cluster_fixture import TABLE
from tests.unit.ps.coordinator.test_machine import cluster, halted


def test_the_next_master_knows_everything_that_was_told() -> None:
    one = cluster("p", "q", "r")
    one.world("a")
    number = one.trainer("a", "n")
    one.tell("a", messages.SetLr(number, messages.LrHold(5, 0.5)))
    before = one.machine
    after = one.new_machine()
    assert after.placement().owner == before.placement().owner
    assert after.placement().version == before.placement().version, "nothing has changed"
    assert after.state.people.trainers == before.state.people.trainers
    assert (after.state.lr, after.state.tables) == (before.state.lr, before.state.tables)
    one.tell("a", messages.Join("n", (TABLE,)))
    assert one.heard("a", messages.Joined)[-1].number == number


def test_pservers_that_died_without_a_master_are_missed() -> None:
    one = cluster("p", "q", "r")
    del one.bucket_machines["servers/q"]
    one.new_machine()
    one.pass_time(3.0)
    assert set(one.machine.state.servers) == {1, 3}
    assert 2 not in one.machine.state.grid.holders()


def test_a_checkpoint_does_not_outlive_its_master() -> None:
    one = cluster()
    one.world("a")
    one.trainer("a")
    one.tell("a", messages.Save(1))
    one.new_machine()
    halted(one, "a")
    assert one.heard("a", messages.GoOn) == [messages.GoOn(1)]
    one.tell("a", messages.Save(1))
    assert one.heard("a", messages.Halt)[-1] == messages.Halt(2)


def test_an_unreadable_state_ends_the_job() -> None:
    one = cluster()
    one.store["placement"] = b"{}"
    one.new_machine()
    assert "is unusable" in one.failed


# --- report ----------------------------------------------------------------------------------------------------------
