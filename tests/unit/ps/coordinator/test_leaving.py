"""Pservers that leave while a checkpoint is being made: it is completed all the same."""

from __future__ import annotations

import pytest

from ps.coordinator.checkpoints import COMPLETE, MARK, WRITE
from ps.protocol import messages
from tests.support.ps_cluster_fixture import Cluster
from tests.unit.ps.coordinator.test_machine import halted


def saving(*names: str) -> Cluster:
    """A job with pservers p, q and r that marks its rows. ``names``: pservers that leave before."""
    one = Cluster().started("p", "q", "r")
    one.world("a")
    one.trainer("a")
    one.checkpoints = False
    for name in names:
        one.drain(name)
    one.tell("a", messages.Save(1))
    halted(one, "a")
    one.tell("a", messages.DataNamed(1, ()))
    assert one.machine.checkpoints.phase == MARK
    return one


def done(one: Cluster, names: str, phase: str) -> None:
    """Pservers finish a phase."""
    assert one.machine.checkpoints.phase == phase
    for name in names:
        one.say(name, messages.CheckpointPhaseDone(1, phase, report='{"run": "checkpoint-1"}'))


def may_go(one: Cluster) -> str:
    """The pservers whose orders let them exit."""
    return "".join(name for name in "pqr" if one.orders[f"servers/{name}"].go)


def test_a_pserver_that_leaves_writes_its_part_first() -> None:
    one = saving()
    one.drain("r")
    assert may_go(one) == ""
    done(one, "pqr", MARK)
    assert 3 not in one.machine.state.grid.holders() and may_go(one) == ""
    done(one, "r", WRITE)
    assert may_go(one) == "r"
    one.kill("r")
    done(one, "pq", WRITE)
    order = one.orders["servers/p"].checkpoint
    assert order is not None and order.phase == COMPLETE and len(order.parts) == 3
    done(one, "p", COMPLETE)
    assert one.heard("a", messages.CheckpointSaved) == [messages.CheckpointSaved(1, 1, "checkpoint-1")]


def test_the_pserver_that_completes_the_checkpoint_stays_until_then() -> None:
    one = saving()
    done(one, "pqr", MARK)
    one.drain("p")
    one.drain("q")
    done(one, "pqr", WRITE)
    assert may_go(one) == "q", "r is the only one that stays"
    one.kill("q")
    done(one, "p", COMPLETE)
    assert may_go(one) == "pq"
    assert one.heard("a", messages.CheckpointSaved)


@pytest.mark.parametrize(("name", "lost"), [("q", False), ("p", True)])
def test_only_the_death_of_the_one_that_completes_it_abandons_a_written_checkpoint(name: str, lost: bool) -> None:
    one = saving()
    done(one, "pqr", MARK)
    done(one, "pqr", WRITE)
    one.kill(name)
    assert one.machine.checkpoints.phase == ("" if lost else COMPLETE)


def test_who_has_been_allowed_to_go_takes_no_part() -> None:
    one = saving("r")
    assert may_go(one) == "r" and one.orders["servers/r"].checkpoint is None
    one.kill("r")
    done(one, "pq", MARK)
    done(one, "pq", WRITE)
    done(one, "p", COMPLETE)
    assert one.heard("a", messages.CheckpointSaved)
