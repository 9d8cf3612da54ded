"""Files that join a data set in use: which epoch they join, and what the next Master knows of them and of orders."""

from __future__ import annotations

import pytest

from data_service.leases.machine import LeaseMachine
from data_service.manifest import Manifest
from data_service.protocol import add_request
from data_service.protocol.add_request import AddRequest
from data_service.protocol.file_list_messages import NEXT_EPOCH, NOW, AddFiles, Grow, Grown
from data_service.protocol.messages import INDEPENDENT, STEPS, DataRefused, Gone, NextEpoch, decode
from edl.master.service import Answered, Caller, Effect, Ordered, TellWorker
from tests.unit.data_service.leases.test_independent import NODE, Master, listed


@pytest.fixture
def master() -> Master:
    made = Master()
    made.begin()
    return made


def more() -> Manifest:
    """Six more shards, in another file."""
    return listed("more")


def grow(master: Master, when: str = NOW, manifest: Manifest | None = None, **fields: object) -> Grown:
    found = master.ask(0, Grow, manifest=(manifest or more()).encode(), when=when, **fields)
    assert isinstance(found, Grown)
    return found


def order(master: Master, dataset: str = "d") -> list[Effect]:
    body = add_request.encode(AddRequest(dataset, ("more/*",), NOW))
    effects = master.machine.step(Ordered(1, "me", body), master.now_s)
    master.store(effects)
    return list(effects)


def orders(effects: list[Effect]) -> list[tuple[Caller, AddFiles]]:
    told = [(one.caller, decode(one.body)) for one in effects if isinstance(one, TellWorker)]
    return [(caller, message) for caller, message in told if isinstance(message, AddFiles)]


def shards(machine: LeaseMachine) -> tuple[int, int]:
    """Of this epoch and of the whole list."""
    data = machine.sets["d"]
    return data.position.ledger.shards, len(data.known)


def finish(master: Master) -> None:
    while not master.machine.sets["d"].position.finished:
        master.consume(0, 1)


@pytest.mark.parametrize(("when", "now"), [(NOW, 12), (NEXT_EPOCH, 6)])
def test_files_join_this_epoch_or_the_next(master: Master, when: str, now: int) -> None:
    master.consume(0, 2)
    assert grow(master, when).added == 1
    for machine in (master.machine, Master(kept=master.kept).machine):
        assert shards(machine) == (now, 12)
    assert master.done == 2
    finish(master)
    assert master.done == now
    assert master.ask(0, NextEpoch, epoch=1).epoch == 1
    assert shards(master.machine) == (12, 12)


def test_files_do_not_join_an_epoch_that_is_over(master: Master) -> None:
    finish(master)
    assert "from epoch 1 on" in grow(master).text
    assert shards(master.machine) == (6, 12)


def test_files_that_are_listed_are_not_added_again(master: Master) -> None:
    assert grow(master).added == 1
    before = dict(master.kept)
    again = grow(master)
    assert (again.added, again.text) == (0, "nothing was added: 1 file already listed")
    assert shards(master.machine) == (12, 12) and master.kept == before


def test_a_list_that_replaces_another_takes_its_additions_away(master: Master) -> None:
    grow(master)
    assert any(name.startswith("grown/") for name in master.kept)
    for slot in (0, 1):
        master.ask(slot, Gone)
    master.manifest = listed("other")
    master.begin()
    assert shards(master.machine) == (6, 6)
    assert not any(name.startswith("grown/") for name in master.kept)


def test_what_cannot_be_added_is_refused_with_the_reason() -> None:
    master = Master()
    unknown = master.ask(0, Grow, manifest=more().encode())
    assert isinstance(unknown, DataRefused) and unknown.kind == "unknown"
    master.begin()
    refused = master.ask(0, Grow, error="no such file: more")
    assert isinstance(refused, DataRefused) and refused.text == "d: no such file: more"
    assert shards(master.machine) == (6, 6)


class TestOrders:
    def test_the_lowest_rank_scans_and_its_answer_settles_the_order(self, master: Master) -> None:
        effects = order(master)
        assert orders(effects) == [(Caller(NODE, 0), AddFiles("d", 1, ("more/*",), NOW))]
        (answer,) = [one for one in effects if isinstance(one, Answered)]
        assert (answer.ok, answer.text) == (True, "order 1 for data d: a worker will scan 1 pattern")
        assert grow(master, order=1).added == 1
        assert not master.machine.sets["d"].orders
        assert not Master(kept=master.kept).machine.sets["d"].orders

    def test_the_next_master_repeats_an_order_that_nobody_has_answered(self, master: Master) -> None:
        order(master)
        after = Master(kept=master.kept)
        assert [(one.number, one.by) for one in after.machine.sets["d"].orders.values()] == [(1, "me")]
        assert [message.order for _, message in orders(order(after))] == [], "no worker uses the data yet"
        after.open(1)
        assert after.machine.sets["d"].lister == Caller(NODE, 1)
        assert list(after.machine.sets["d"].orders) == [1, 2], "numbers go on"

    @pytest.mark.parametrize("mode", [INDEPENDENT, STEPS])
    def test_a_worker_that_has_closed_the_data_set_scans_nothing(self, mode: str) -> None:
        """Nor does it keep an order that it may not have heard."""
        master = Master(mode)
        master.begin()
        assert [caller.slot for caller, _ in orders(order(master))] == [0]
        master.ask(0, Gone)
        assert master.machine.sets["d"].lister == Caller(NODE, 1)
        assert orders(order(master)) == [
            (Caller(NODE, 1), AddFiles("d", number, ("more/*",), NOW)) for number in (1, 2)
        ]
        master.ask(1, Gone)
        assert orders(order(master)) == []
        master.open(0)
        assert master.machine.sets["d"].lister == Caller(NODE, 0)

    def test_an_order_that_fails_is_settled_too(self, master: Master) -> None:
        order(master)
        found = master.ask(0, Grow, order=1, error="no such file")
        assert isinstance(found, Grown)
        assert (found.added, found.text) == (0, "nothing was added: no such file")
        assert not master.machine.sets["d"].orders

    def test_an_order_for_data_that_the_job_has_not_is_refused(self, master: Master) -> None:
        (answer,) = [one for one in order(master, "other") if isinstance(one, Answered)]
        assert (answer.ok, answer.text) == (False, "the job has no data set named other; it has d")
