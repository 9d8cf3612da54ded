"""Pservers to which the Master has no line, and whose ports refuse nothing: frozen ones, or out of reach."""

from __future__ import annotations

import pytest

from edl.job_records import Replication, Training
from edl.master import service as sv
from ps.coordinator.servers import ORPHANS_S
from ps.coordinator.state import CoordinatorLimits
from ps.protocol import messages
from tests.support.ps_cluster_fixture import Cluster

SILENT_S, RETURNS_S = CoordinatorLimits().silent_s, CoordinatorLimits().returns_s


def cluster(*names: str, training: Training | None = None) -> Cluster:
    return Cluster(training).started(*(names or ("p", "q")))


def test_who_is_silent_is_not_waited_for_where_others_have_all_it_has() -> None:
    one = cluster()
    one.feed(sv.LineDown("servers/p", False))
    one.pass_time(SILENT_S - 0.5)
    assert set(one.machine.state.servers) == {1, 2}
    one.pass_time(1.0)
    assert set(one.machine.state.servers) == {2}
    assert set(one.machine.state.grid.owner) == {2}
    assert one.machine.state.history == 1


def test_a_line_that_is_made_again_in_time_changes_nothing() -> None:
    one = cluster()
    one.feed(sv.LineDown("servers/p", False))
    one.pass_time(SILENT_S - 0.5)
    one.say("p", one.bucket_machines["servers/p"].hello())
    one.pass_time(10 * SILENT_S)
    assert set(one.machine.state.servers) == {1, 2}


def test_a_master_that_reaches_nobody_buries_nobody() -> None:
    one = cluster()
    for name in ("servers/p", "servers/q"):
        one.feed(sv.LineDown(name, False))
    one.pass_time(10 * SILENT_S)
    assert set(one.machine.state.servers) == {1, 2}


def test_who_has_what_nobody_else_has_is_waited_for() -> None:
    one = cluster(training=Training(replication=Replication.NONE))
    one.feed(sv.LineDown("servers/p", False))
    one.pass_time(10 * SILENT_S)
    assert set(one.machine.state.servers) == {1, 2}


@pytest.mark.parametrize("replication", [Replication.NONE, Replication.SYNC])
def test_leases_that_end_in_a_frozen_store_take_no_rows_along(replication: Replication) -> None:
    """One pserver after the other loses its key, and gets it back."""
    one = cluster(training=Training(servers=(1, 4), replication=replication))
    one.world("a")
    one.trainer("a")
    for name in ("p", "q"):
        one.lose_key(name)
    one.pass_time(ORPHANS_S - 0.5)
    for name in ("p", "q"):
        one.register_again(name)
    one.pass_time(10 * ORPHANS_S)
    assert one.machine.state.history == 1 and one.heard("a", messages.RequestRefused) == []
    assert len(one.machine.state.servers) == 2 and one.machine.state.whole


def test_a_lease_that_ends_as_a_master_takes_over_takes_no_rows_along() -> None:
    """It ends with that of the last Master. The new one has no line to the pserver yet."""
    one = cluster(training=Training(servers=(1, 4), replication=Replication.NONE))
    one.world("a")
    one.trainer("a")
    one.new_machine_without_keys()
    for name in ("p", "q"):
        one.feed(sv.KeyPut(f"servers/{name}", one._value(f"servers/{name}")))
        one.lose_key(name)
    one.pass_time(ORPHANS_S - 0.5)
    for name in ("p", "q"):
        one.register_again(name)
    one.pass_time(10 * ORPHANS_S)
    assert one.machine.state.history == 1 and set(one.machine.state.servers) == {1, 2}


@pytest.mark.parametrize("back", [True, False])
def test_a_new_master_waits_longer_for_what_only_a_missing_one_holds(back: bool) -> None:
    """The leases of all ended with that of the last Master, and their launchers take a moment to notice."""
    one = cluster(training=Training(servers=(1, 4), replication=Replication.SYNC))
    one.world("a")
    one.trainer("a")
    one.new_machine_without_keys()
    one.pass_time(ORPHANS_S + RETURNS_S - 0.5)
    assert set(one.machine.state.servers) == {2}, "what the first one holds, the second one holds as well"
    assert "pserver p (number 1) is lost: it died while there was no Master" in one.notes
    if back:
        one.register_again("q")
    one.pass_time(10 * RETURNS_S)
    assert one.machine.state.history == (1 if back else 2)


def test_who_does_not_come_back_is_dead() -> None:
    one = cluster("p", "q", training=Training(servers=(1, 4), replication=Replication.NONE))
    one.world("a")
    one.trainer("a")
    del one.bucket_machines["servers/p"]
    one.lose_key("p")
    one.pass_time(RETURNS_S - 0.5)
    assert one.machine.state.history == 1
    one.pass_time(1.0)
    assert one.machine.state.history == 2 and set(one.machine.state.servers) == {2}
    assert "pserver p (number 1) is lost: its lease has ended" in one.notes


def test_it_comes_back_empty_and_what_it_says_of_trainers_is_old() -> None:
    one = cluster()
    one.world("a")
    number = one.trainer("a")
    one.feed(sv.LineDown("servers/p", False))
    one.pass_time(2 * SILENT_S)
    for word in (
        one.bucket_machines["servers/p"].hello(),
        messages.TrainerLost(number),
    ):  # before it can have had its orders
        one.machine.step(sv.HelperSaid("servers/p", messages.encode(word)), one.now_s)
    assert set(one.machine.state.servers) == {2, 3}
    assert [member.number for member in one.machine.state.members()] == [number]
