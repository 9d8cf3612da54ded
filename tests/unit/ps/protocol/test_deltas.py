"""Orders and memberships sent as differences are reassembled; the Master's cost of a change."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.ps.crowd import Crowd
from edl.job_records import Replication, Training
from ps.coordinator.machine import PlacementMachine
from ps.protocol import messages
from ps.protocol.deltas import counted, members_after, orders_after, orders_changed
from ps.spec import TableSpec
from tests.support.ps_cluster_fixture import Cluster
from tests.support.ps_fixture import Bench, Master

PLACEMENT = messages.PlacementMap(
    3, 1, (messages.PserverAddress(1, "a", "h", 1),), messages.pack([1] * 8), messages.pack([2] * 8)
)
A, B, C = (messages.TrainerMember(number, f"{name}/0", number) for number, name in enumerate("abc", 1))
BASE = messages.Orders(0, 0, PLACEMENT, 7, (A, B), Training(), (TableSpec("t", 4),), since="s", giver="g")
LATER: dict[str, dict[str, Any]] = {
    "nothing": {},
    "membership": {"epoch": 9, "members": (B, C)},
    "a member's step": {"epoch": 8, "members": (replace(A, step=5), B)},
    "owners": {"placement": replace(PLACEMENT, version=4, owner=messages.pack([2] * 8)), "since": "t", "giver": ""},
    "no tables": {"tables": ()},
    "rates": {"lr": (messages.LrHold(3, 0.5),)},
    "revoked": {"revoked": (4, 5), "training": Training(replication=Replication.NONE)},
}


@pytest.mark.parametrize("what", LATER)
def test_orders_come_out_as_they_went_in(what: str) -> None:
    now = replace(BASE, **{"placement": replace(PLACEMENT, version=4), **LATER[what]})
    own: dict[str, Any] = {"you": 5, "checkpoint": messages.CheckpointOrder(2, "mark"), "drain": True, "go": True}
    change = replace(orders_changed(BASE, now), **own)
    assert orders_after(replace(BASE, you=5), messages.decode(messages.encode(change))) == replace(now, **own)


def test_only_what_is_another_is_sent() -> None:
    """A placement map has thousands of buckets, and there may be a thousand trainers."""
    now = replace(BASE, members=(A, replace(B, step=5), C), placement=replace(PLACEMENT, version=4), epoch=8)
    change = orders_changed(BASE, now)
    assert (change.came, change.went, change.placement) == ((replace(B, step=5), C), (), None)
    assert (change.tables, change.training, change.lr, change.revoked) == (None, None, None, None)
    moved = orders_changed(BASE, replace(BASE, placement=LATER["owners"]["placement"], tables=()))
    assert (moved.came, moved.went, moved.placement, moved.tables) == ((), (), LATER["owners"]["placement"], ())


def test_a_membership_comes_out_as_it_went_in() -> None:
    drawn = random.Random(1)
    members: tuple[messages.TrainerMember, ...] = ()
    for epoch in range(1, 200):
        numbers = sorted(drawn.sample(range(1, 9), drawn.randint(0, 8)))
        now = tuple(messages.TrainerMember(one, f"n/{one}", drawn.choice((0, epoch))) for one in numbers)
        word = counted(0, epoch - 1, members, epoch, now)
        members = members_after(members, word.came, word.went)
        assert members == now


def spent(trainers: int, pservers: int = 4) -> tuple[int, int]:
    """Words and bytes that one more trainer costs, when there are so many."""
    crowd = Crowd(trainers + 1, pservers)
    crowd.begin(trainers)
    crowd.words = crowd.bytes = 0
    crowd.begin(1)
    return crowd.words, crowd.bytes


def test_a_change_costs_the_master_as_many_bytes_as_there_are_trainers() -> None:
    (few, small), (many, large) = spent(16), spent(128)
    assert many - few == 128 - 16, "one word for each trainer"
    assert large < 10 * small, "and it does not grow with their number"
    assert large < 40_000


def test_trainers_that_come_together_are_one_change() -> None:
    crowd = Crowd(64, 4, apart_s=0.0)
    crowd.begin(64)
    assert crowd.words <= 4 * (64 + 4), "not one change for each of them"
    assert len(crowd.machine.state.members()) == 64


def test_a_crowd_is_counted_once_the_gathering_is_over() -> None:
    crowd = Crowd(3, 2, apart_s=0.0)
    crowd.begin(2)
    kept = dict(crowd.kept)
    crowd.feed(crowd.said(2, messages.Begin(crowd.numbers[2])))
    assert crowd.kept == kept, "nothing is told before it is kept, and nothing is kept yet"
    crowd.settle()
    assert crowd.kept != kept
    fresh = PlacementMachine(crowd.training)
    fresh.load(crowd.kept, crowd.now_s)
    assert fresh.state.members() == crowd.machine.state.members()


def test_a_pserver_that_missed_orders_is_given_all_of_them() -> None:
    one = Cluster().started("p", "q")
    one.say("p", messages.GetOrders(0))
    one.world("a")
    sent: list[Any] = []
    one._orders = lambda name, orders: sent.append(orders)  # type: ignore[method-assign]
    one.trainer("a")
    assert {type(word) for word in sent} == {messages.OrdersChanged}
    sent.clear()
    one.say("p", messages.GetOrders(1))
    assert [type(word) for word in sent] == [messages.Orders]
    assert sent[0].members == one.machine.state.members()


def test_a_trainer_that_missed_a_message_requests_the_full_state() -> None:
    bench = Bench().start(1)
    try:
        master = Master(bench)
        client = bench.joined(master)
        master.tell(messages.MembersChanged(0, 1, 2, (messages.TrainerMember(8, "b/0", 0),), ()))
        assert [one.number for one in client.members] == [8]
        master.tell(messages.MembersChanged(0, 4, 5, (messages.TrainerMember(9, "c/0", 0),), ()))
        assert [one.number for one in client.members] == [8], "it goes on from another membership"
        assert master.expect(messages.GetPlacement).version == -1
        master.tell(messages.PlacementUpdate(0, bench.placement(), 5, (messages.TrainerMember(9, "c/0", 0),)))
        master.tell(messages.MembersChanged(0, 3, 4, (), (9,)))
        assert [one.number for one in client.members] == [9], "what is older than that is no news"
    finally:
        bench.stop()
