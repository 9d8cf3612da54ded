"""Orders that were lost with a stream, or that were about a launcher that is gone, are repeated."""

from __future__ import annotations

import dataclasses

from edl.config import NodeRange
from edl.master import events as ev
from edl.master.state import Phase
from edl.types import NodeId, Round
from edl.wire.messages import Attach, KeepWith, LoadState, Preparing, Prestart, Ready, StartRound, Underway
from edl.wire.records import Version
from tests.unit.edl.master.test_machine import info
from tests.unit.edl.master.test_planning import Aware, trained


def reconnect(rule: Aware, name: str, *, running: bool = False) -> None:
    """The node's stream breaks, and it opens another one."""
    number = rule.state.record.round
    rule.feed(ev.NodeDetached(NodeId(name), info(name).incarnation))
    rule.feed(ev.NodeAttached(Attach(info(name), number, number if running else Round(0), False, underway=running)))


class TestCopies:
    def test_they_go_to_the_node_that_has_returned_under_its_name(self) -> None:
        rule = Aware(NodeRange(2, 2))
        rule.join("a", "b")
        rule.underway("a")
        assert rule.sent("a") == [KeepWith(NodeId("b"), "b", 0)]
        rule.underway("b")
        rule.lose("b")
        rule.parked("a", (1, 5))
        moved = dataclasses.replace(info("b", 1), host="elsewhere", state_port=77)
        rule.feed(ev.NodeRegistered(moved))
        rule.feed(ev.NodeAttached(Attach(moved, Round(0), Round(0), False)))
        rule.say("b", Ready(Round(0), (9100, 1, 2), True), life=1)
        assert (rule.members, rule.state.record.round) == ("ab", 2)
        rule.underway("a")
        assert rule.sent("a") == [KeepWith(NodeId("b"), "elsewhere", 77)]
        rule.say("b", Underway(Round(2), "in process"), life=1)
        assert rule.sent("b") == [], "the order is still in force"

    def test_the_order_is_repeated_on_the_next_stream(self) -> None:
        rule = trained()
        reconnect(rule, "a", running=True)
        assert rule.sent("a") == [KeepWith(NodeId("b"), "b", 0)]
        rule.wait(1.0)
        assert not rule.sent("a")

    def test_so_is_the_order_to_send_none(self) -> None:
        rule = Aware(NodeRange(1, 1))
        rule.join("a", "b")
        rule.underway("a")
        assert rule.sent("a") == [KeepWith(NodeId("b"), "b", 0)]
        rule.lose("b")
        assert rule.sent("a") == [KeepWith(NodeId(""))]
        reconnect(rule, "a", running=True)
        assert rule.sent("a") == [KeepWith(NodeId(""))]


def test_a_checkpoint_is_read_although_the_order_was_lost() -> None:
    rule = Aware(NodeRange(1, 1))
    rule.feed(ev.NodeRegistered(info("a")))
    rule.attach("a")
    for _ in range(2):
        rule.parked("a", stored=Version(2, 30), seen=0)
        assert [type(message) for message in rule.sent("a")] == [LoadState]
        reconnect(rule, "a")
    rule.parked("a", stored=Version(2, 30), seen=0)
    rule.parked("a", (2, 30), stored=Version(2, 30), seen=0)
    order = rule.told()["a"]
    assert isinstance(order, StartRound)
    assert order.world.restore == Version(2, 30)


class TestWorkersStartedAhead:
    def test_they_are_although_the_order_was_lost(self) -> None:
        rule = trained()
        rule.feed(ev.NodeRegistered(info("c")))
        rule.attach("c")
        rule.ready("c")
        assert isinstance(rule.told()["c"], Prestart)
        rule.feed(ev.NodeDetached(NodeId("c"), info("c").incarnation))
        rule.attach("c")
        rule.ready("c")
        assert isinstance(rule.told()["c"], Prestart)

    def test_they_are_new_processes_on_the_next_stream_too(self) -> None:
        """All members restart their workers, so that nobody is left behind for the sake of a kept process."""
        rule = trained()
        rule.fail("b")
        for name in "ab":
            rule.say(name, Preparing(Round(1), "starting"))
        rule.parked("a", (1, 5))
        reconnect(rule, "a")
        rule.parked("a", (1, 5))
        assert rule.phase is Phase.FORMING
        rule.parked("b", (1, 5))
        assert rule.members == "ab"
