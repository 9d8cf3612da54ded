"""Pservers to which the Master has no line, and whose ports refuse nothing: frozen ones, or out of reach."""

from __future__ import annotations

from edl.job_records import Replication, Training
from edl.master import service as sv
from ps.coordinator.state import CoordinatorLimits
from ps.protocol import messages
from tests.support.ps_cluster_fixture import Cluster

SILENT_S = CoordinatorLimits().silent_s


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
