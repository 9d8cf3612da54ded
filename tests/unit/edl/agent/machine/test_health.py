"""Probes, as the agent's machine orders them."""

from __future__ import annotations

from edl.agent.machine import events as ev
from edl.wire.health import CheckHealth, HealthChecked
from edl.wire.messages import Attach, StartRound
from edl.wire.process_events import ForkServerLost
from tests.unit.edl.agent.machine.test_machine import Node, world


def order(number: int = 1, stage: int = 1) -> CheckHealth:
    return CheckHealth(number, stage, 9, (), 64, 10.0, "it is new")


def idle() -> Node:
    return Node().feed(ev.ForkServerReady(), ev.Connected())


def said(node: Node) -> list[object]:
    return [effect.message for effect in node.effects if isinstance(effect, ev.Say)]


def test_a_probe_runs_and_its_result_is_sent() -> None:
    node = idle().feed(ev.MasterSaid(order()))
    assert ev.ProbeHealth(order()) in node.effects
    found = HealthChecked(1, 1, "cpu", 1.0)
    node.feed(ev.HealthProbed(1, 1, found))
    assert said(node) == [found]


def test_the_same_order_again_starts_nothing() -> None:
    node = idle().feed(ev.MasterSaid(order())).feed(ev.MasterSaid(order()))
    assert not node.effects


def test_the_same_order_after_its_answer_is_answered_again() -> None:
    found = HealthChecked(1, 1)
    node = idle().feed(ev.MasterSaid(order()), ev.HealthProbed(1, 1, found)).feed(ev.MasterSaid(order()))
    assert said(node) == [found]


def test_a_newer_order_replaces_an_older_one() -> None:
    node = idle().feed(ev.MasterSaid(order())).feed(ev.MasterSaid(order(stage=2)))
    assert ev.ProbeHealth(order(stage=2)) in node.effects
    node.feed(ev.HealthProbed(1, 1, HealthChecked(1, 1)))
    assert not said(node), "the first one was stopped"


def test_workers_that_start_end_a_probe() -> None:
    node = idle().feed(ev.MasterSaid(order())).feed(ev.MasterSaid(StartRound(world(1), "test")))
    assert ev.StopProbe() in node.effects
    node.feed(ev.HealthProbed(1, 1, HealthChecked(1, 1)))
    assert not said(node)


def test_no_probe_runs_beside_workers() -> None:
    node = idle().feed(ev.MasterSaid(StartRound(world(1), "test"))).feed(ev.MasterSaid(order()))
    assert not node.effects


def test_a_master_that_is_new_gets_the_last_result() -> None:
    found = HealthChecked(1, 1)
    node = idle().feed(ev.MasterSaid(order()), ev.HealthProbed(1, 1, found), ev.Disconnected()).feed(ev.Connected())
    assert isinstance(said(node)[0], Attach) and found in said(node)


def test_a_probe_that_could_not_start_is_tried_again_on_the_next_order() -> None:
    node = idle().feed(ev.MasterSaid(order()), ev.HealthProbed(1, 1, None))
    assert not said(node)
    node.feed(ev.MasterSaid(order()))
    assert ev.ProbeHealth(order()) in node.effects


def test_so_is_one_that_was_lost_with_the_fork_server() -> None:
    node = idle().feed(ev.MasterSaid(order()), ForkServerLost("killed"))
    node.feed(ev.MasterSaid(order()))
    assert not [effect for effect in node.effects if isinstance(effect, ev.ProbeHealth)], "no fork server yet"
    node.feed(ev.ForkServerReady())
    node.feed(ev.MasterSaid(order()))
    assert ev.ProbeHealth(order()) in node.effects
