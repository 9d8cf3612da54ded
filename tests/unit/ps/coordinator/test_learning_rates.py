"""Whose learning rate a table has after a restore."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edl.job_records import Replication, Training
from ps.protocol import messages
from ps.spec import Optimizer, TableSpec, UpdateRule
from tests.support.ps_cluster_fixture import TABLE, Cluster


def with_lr(lr: float, rule: UpdateRule = UpdateRule.ADAGRAD) -> TableSpec:
    return replace(TABLE, optimizer=Optimizer(rule, lr))


def saved_with(table: TableSpec) -> messages.FoundCheckpoints:
    """A checkpoint with this table."""
    return messages.FoundCheckpoints(7, (messages.FoundCheckpoint("checkpoint-7", 7, 50, (table,), ""),))


@pytest.mark.parametrize("early", [True, False])
def test_a_restarted_script_brings_its_learning_rate(early: bool) -> None:
    """Whether it joins before the checkpoint has been found or after; the first script counts."""
    one = Cluster(Training(servers=(1, 4), replication=Replication.NONE))
    one.found = saved_with(with_lr(0.05))
    one.world("a", "b")
    join = messages.Join("a", (with_lr(0.01),))
    if early:
        one.tell("a", join)
        one.started("p", "q")
    else:
        one.started("p", "q")
        one.tell("a", join)
    one.trainer("b", tables=(with_lr(0.02),))
    for node in ("a", "b"):
        assert one.heard(node, messages.Joined)[-1].tables == (with_lr(0.01),)
    assert all(orders.tables == (with_lr(0.01),) for orders in one.orders.values())
    assert sum("the LR is the script's, 0.01, no longer 0.05" in note for note in one.notes) == 1
    one.kill("p")  # a rollback to the same checkpoint
    one.pass_time(5.0)
    one.trainer("a", "a2", tables=(with_lr(0.03),))
    assert one.heard("a", messages.Joined)[-1].tables == (with_lr(0.01),)


def test_a_lost_master_does_not_give_the_saved_learning_rate_back() -> None:
    """Whether it is lost before the first trainer of the restored job joins or after."""
    one = Cluster(Training(servers=(1, 4), replication=Replication.NONE))
    one.found = saved_with(with_lr(0.05))
    one.started("p", "q")
    one.new_machine()
    one.world("a", "b")
    one.trainer("a", tables=(with_lr(0.01),))
    assert one.heard("a", messages.Joined)[-1].tables == (with_lr(0.01),)
    one.new_machine()
    one.world("a", "b")
    one.trainer("b", tables=(with_lr(0.02),))
    assert one.heard("b", messages.Joined)[-1].tables == (with_lr(0.01),)


def test_the_state_of_ftrl_belongs_to_its_learning_rate() -> None:
    one = Cluster()
    one.found = saved_with(with_lr(0.1, UpdateRule.FTRL))
    one.started("p", "q")
    one.world("a")
    one.tell("a", messages.Join("a", (with_lr(0.2, UpdateRule.FTRL),)))
    assert "table users: optimizer.lr 0.2 here, 0.1 there" in one.heard("a", messages.RequestRefused)[-1].text
