"""Slots: who is struck, what is dropped, and what comes back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from edl.config import FaultTolerance, NodeRange, Replicas, SlotRules
from edl.job_records import Training
from edl.master import events as ev
from edl.master.incidents import MAX_FAILURES_KEPT
from edl.master.machine import take_over
from edl.master.policies import slots
from edl.master.state import Phase
from edl.master.view import job_status
from edl.rendezvous.ranks import ReadyNode, order
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.json_messages import from_plain, to_plain
from edl.wire.messages import Attach, Leaving, Ready, StartRound, StopRound, UseSlots, WorkerFailed, WorkersDone
from edl.wire.purpose import Purpose
from edl.wire.records import Failure, NodeInfo
from edl.wire.scale_requests import Cordon, Drain, Verdict
from tests.unit.edl.master.test_resizing import Resizable

ALL = (0, 1, 2, 3)
ONE = Replicas()
UP_TO_TWO = NodeRange(1, 2)


def node_info(
    name: str = "a", count: int = 4, spare: int = 0, devices: tuple[str, ...] = (), life: int = 0
) -> NodeInfo:
    incarnation = Incarnation(ord(name) - 96 + 100 * life)
    return NodeInfo(NodeId(name), incarnation, name, 1, count, spare_slots=spare, devices=devices)


def failure(name: str = "a", slot: int = 1, *, peer_loss: bool = False, round: int = 1) -> Failure:
    what = "ended with exit status 3"
    return Failure(NodeId(name), Round(round), Rank(slot), slot, 3, what, "OSError: no", peer_loss=peer_loss, slot=slot)


class Slotted(Resizable):
    """A Master of nodes with four slots."""

    def __init__(self, bounds: NodeRange = UP_TO_TWO, restarts: int = 5, **rules: Any) -> None:
        super().__init__(bounds, FaultTolerance.ELASTIC, restarts)
        self.spec = dataclasses.replace(self.spec, slots=SlotRules(**rules))
        self.state = dataclasses.replace(self.state, spec=self.spec)

    def come(self, *infos: NodeInfo, aware: bool = False) -> None:
        for who in infos:
            self.feed(ev.NodeRegistered(who))
            self.feed(ev.NodeAttached(Attach(who, Round(0), Round(0), False)))
        for who in infos:
            self.free(who, 0, aware)
        self.wait(1.0)

    def free(self, who: NodeInfo, seen: int, aware: bool = False) -> None:
        ports = tuple(range(9000 + 10 * seen, 9001 + 10 * seen + who.slots))
        self.feed(ev.NodeSaid(who.node, who.incarnation, Ready(Round(seen), ports, aware)))

    def breaks(self, *failures: Failure) -> None:
        """An incident, and the next world."""
        number = self.state.record.round
        for one in failures:
            incarnation = self.state.nodes[one.node].info.incarnation
            told = WorkerFailed(dataclasses.replace(one, round=number))
            self.feed(ev.NodeSaid(one.node, incarnation, told))
        for entry in list(self.state.nodes.values()):
            if self.state.record.world is not None and self.state.record.world.member(entry.info.node):
                self.free(entry.info, number)

    @property
    def places(self) -> dict[str, tuple[int, ...]]:
        world = self.state.record.world
        assert world is not None and self.state.record.phase is Phase.RUNNING
        return {member.node: member.used for member in world.members}

    def cordon(self, name: str, device: str, *, cordoned: bool = True) -> tuple[Verdict, str]:
        self.feed(ev.ScaleRequested(Cordon(name, cordoned, "me", "noise", device)))
        (grant,) = [effect for effect in self.effects if isinstance(effect, ev.Grant)]
        return grant.verdict, grant.text


class TestStrikes:
    def test_two_of_its_own_drop_it(self) -> None:
        rule = Slotted()
        rule.come(node_info())
        rule.breaks(failure())
        assert rule.places == {"a": ALL}
        rule.breaks(failure())
        assert rule.places == {"a": (0, 2, 3)}
        (one,) = job_status(rule.state, NodeId("a"), ()).dropped
        assert (one.node, one.host, one.slot, one.round) == ("a", "a", 1, 2)
        assert one.why == "failed by itself 2 times, last: ended with exit status 3: OSError: no"
        world = rule.state.record.world
        assert world is not None and (world.size, world.members[0].slots) == (3, 3)
        told = rule.told()["a"]
        assert isinstance(told, StartRound) and "slot 1 of a dropped: failed by itself 2 times" in told.reason
        assert not rule.state.record.strikes, "they go with the slot"
        rule.breaks(failure(slot=2))
        told = rule.told()["a"]
        assert isinstance(told, StartRound) and "slot 1 of a dropped" not in told.reason, "that was news before"

    def test_an_incident_strikes_once_however_long_the_next_world_takes(self) -> None:
        rule = Slotted(strikes=9)
        rule.spec = dataclasses.replace(rule.spec, timeouts=dataclasses.replace(rule.spec.timeouts, restart_s=60.0))
        rule.state = dataclasses.replace(rule.state, spec=rule.spec)
        rule.come(node_info())
        for incidents in (1, 2):
            rule.breaks(failure())
            for _ in range(3):
                rule.wait(0.1)
            assert [(one.slot, one.count) for one in rule.state.record.strikes] == [(1, incidents)]
        assert rule.state.record.phase is Phase.FORMING, "it pauses, as the last two worlds failed at once"

    def test_a_failed_node_that_is_gone_is_not_struck(self) -> None:
        rule = Slotted(strikes=1)
        rule.come(node_info("a"), node_info("b"))
        rule.feed(ev.NodeSaid(NodeId("a"), Incarnation(1), WorkerFailed(failure())))
        rule.feed(ev.NodeSaid(NodeId("a"), Incarnation(1), Leaving("preempted")))
        rule.lose("a")
        rule.free(node_info("b"), 1)
        assert rule.places == {"b": ALL} and not rule.state.record.dropped

    @pytest.mark.parametrize(("strikes", "after"), [(1, 1), (2, 2), (3, 3), (0, 0)])
    def test_as_many_as_the_job_says(self, strikes: int, after: int) -> None:
        rule = Slotted(strikes=strikes)
        rule.come(node_info())
        for number in range(1, 4):
            rule.breaks(failure())
            assert rule.places == {"a": (0, 2, 3) if 0 < after <= number else ALL}
            if after == number:
                return

    @pytest.mark.parametrize(
        "incident",
        [
            (failure(slot=1), failure(slot=2)),
            (failure(slot=1, peer_loss=True),),
            (failure("a", 1), failure("b", 1)),
        ],
    )
    def test_the_script_and_lost_peers_strike_nobody(self, incident: tuple[Failure, ...]) -> None:
        rule = Slotted()
        rule.come(node_info("a"), node_info("b"))
        for _ in range(4):
            rule.breaks(*incident)
        assert rule.places == {"a": ALL, "b": ALL} and not rule.state.record.strikes

    def test_those_that_complain_of_it_do_not_clear_it(self) -> None:
        rule = Slotted()
        rule.come(node_info())
        for _ in range(2):
            rule.breaks(failure(slot=0, peer_loss=True), failure(slot=1), failure(slot=2, peer_loss=True))
        assert rule.places == {"a": (0, 2, 3)}

    def test_the_cause_is_kept_of_a_large_incident(self) -> None:
        rule = Slotted()
        rule.come(node_info(count=30))
        others = [failure(slot=slot, peer_loss=True) for slot in range(2, 30)]
        rule.breaks(*others, failure(slot=1))
        assert len(rule.state.record.failures) == MAX_FAILURES_KEPT
        assert [(one.slot, one.count) for one in rule.state.record.strikes] == [(1, 1)]

    def test_the_death_of_a_node_strikes_nobody(self) -> None:
        rule = Slotted()
        rule.come(node_info("a"), node_info("b"))
        rule.feed(ev.NodeSaid(NodeId("a"), Incarnation(1), WorkerFailed(failure())))
        rule.lose("b")
        rule.free(node_info("a"), 1)
        assert rule.places == {"a": ALL} and not rule.state.record.strikes

    def test_long_training_starts_it_afresh(self) -> None:
        rule = Slotted()
        rule.come(node_info())
        rule.breaks(failure())
        rule.wait(slots.AFRESH_S + 1)
        rule.breaks(failure())
        assert rule.places == {"a": ALL}
        rule.wait(slots.AFRESH_S / 2)
        rule.breaks(failure(slot=2))
        rule.wait(slots.AFRESH_S / 2 + 1)
        rule.breaks(failure())
        assert rule.places == {"a": ALL}, "the time of several worlds counts together"
        rule.breaks(failure())
        assert rule.places == {"a": (0, 2, 3)}


class TestDrops:
    def test_a_spare_slot_takes_the_place(self) -> None:
        rule = Slotted(strikes=1)
        rule.come(node_info(spare=1))
        assert rule.places == {"a": ALL}
        rule.breaks(failure(slot=0))
        assert rule.places == {"a": (1, 2, 3, 4)}
        rule.breaks(failure(slot=2))
        assert rule.places == {"a": (1, 3, 4)}

    def test_a_whole_node_takes_the_place_of_an_impaired_one(self) -> None:
        rule = Slotted(NodeRange(1, 1), strikes=1)
        rule.come(node_info("a"), node_info("b"))
        assert rule.places == {"a": ALL}
        rule.breaks(failure(slot=0))
        assert rule.places == {"b": ALL}

    def test_the_last_slot_stays_where_the_job_needs_the_node(self) -> None:
        rule = Slotted(NodeRange(1, 2), strikes=1)
        rule.come(node_info("a", 2))
        rule.breaks(failure(slot=0))
        rule.breaks(failure(slot=1))
        assert rule.places == {"a": (1,)}
        assert any("the last one of its node" in one.text for one in rule.effects if isinstance(one, ev.HistoryNote))

    @pytest.mark.parametrize("other", ["cordoned", "drained", "leaving"])
    def test_a_node_that_cannot_take_part_is_no_reason_to_drop_the_last_slot(self, other: str) -> None:
        rule = Slotted(NodeRange(1, 2), strikes=1)
        rule.come(node_info("a", 1), node_info("b", 1))
        match other:
            case "cordoned":
                rule.submit(Cordon("b", True, "me"))
            case "drained":
                rule.submit(Drain(("b",), "me"))
            case "leaving":
                rule.feed(ev.NodeSaid(NodeId("b"), Incarnation(2), Leaving("preempted")))
        rule.feed(ev.Unfit(NodeId("a"), Incarnation(1), 0, "fails its memory test"))
        assert not rule.state.record.dropped
        notes = [one.text for one in rule.effects if isinstance(one, ev.HistoryNote) and one.kind is ev.Kind.SLOT]
        assert any("it stays: it is the last one of its node" in text for text in notes)

    @pytest.mark.parametrize("underway", [True, False])
    def test_a_ready_whole_node_replaces_an_impaired_one_unless_that_costs_steps(self, underway: bool) -> None:
        rule = Slotted(NodeRange(2, 2), strikes=1)
        rule.come(node_info("a"), node_info("b"), aware=underway)
        rule.breaks(failure())
        for name in "ab":
            rule.free(node_info(name), 1, aware=underway)
        assert rule.places == {"a": (0, 2, 3), "b": ALL}
        if underway:
            rule.underway("a", "b")
        rule.come(node_info("c"), aware=underway)
        assert rule.state.record.phase is Phase.RUNNING
        assert (rule.state.agreement is not None) is underway
        if underway:
            rule.boundary()
            for name in "ab":
                rule.free(node_info(name), 2, aware=True)
            assert rule.places == {"c": ALL, "b": ALL}

    @pytest.mark.parametrize("others_end", [True, False])
    def test_the_slot_of_the_last_independent_worker_stays(self, others_end: bool) -> None:
        """Else the job would end well, with what that worker still had to do undone."""
        rule = Slotted(NodeRange(3, 3), strikes=1)
        rule.spec = dataclasses.replace(rule.spec, servers=Training())
        rule.state = dataclasses.replace(rule.state, spec=rule.spec)
        rule.come(node_info("a", 2), node_info("b", 1), node_info("c", 1))
        for number, name in ((2, "b"), (3, "c"))[: 1 + others_end]:
            rule.feed(ev.NodeSaid(NodeId(name), Incarnation(number), WorkersDone(Round(1))))
        rule.breaks(failure())
        assert rule.places == {"a": (0, 1) if others_end else (0,), "b": (0,), "c": (0,)}
        notes = [one.text for one in rule.effects if isinstance(one, ev.HistoryNote)]
        assert any("it stays: the workers of all other nodes have ended" in text for text in notes) is others_end

    def test_nothing_is_said_of_a_lone_slot(self) -> None:
        rule = Slotted(NodeRange(1, 2), strikes=1)
        rule.come(node_info("a", 1))
        rule.breaks(failure(slot=0))
        assert rule.places == {"a": (0,)}
        assert not any(one.kind is ev.Kind.SLOT for one in rule.effects if isinstance(one, ev.HistoryNote))

    def test_else_the_node_is_out_as_if_it_was_cordoned(self) -> None:
        rule = Slotted(NodeRange(1, 2), strikes=1)
        rule.come(node_info("a", 1), node_info("b", 1))
        rule.breaks(failure(slot=0))
        assert rule.places == {"b": (0,)}
        states = {node.node: node.state for node in job_status(rule.state, NodeId("a"), ()).nodes}
        assert states["a"] == "cordoned"
        assert rule.cordon("a", "", cordoned=False)[0] is Verdict.ACCEPTED
        assert not rule.state.record.dropped

    def test_a_check_may_name_one(self) -> None:
        rule = Slotted()
        rule.come(node_info())
        rule.feed(ev.Unfit(NodeId("a"), Incarnation(1), 2, "fails its memory test"))
        assert any(isinstance(message, StopRound) for message in rule.sent("a"))
        notes = [one.text for one in rule.effects if isinstance(one, ev.HistoryNote) and one.kind is ev.Kind.SLOT]
        assert notes == ["slot 2 of a dropped: fails its memory test"]
        rule.free(node_info(), 1)
        assert rule.places == {"a": (0, 1, 3)}
        before = rule.state
        rule.feed(ev.Unfit(NodeId("a"), Incarnation(1), 2, "again"))
        rule.feed(ev.Unfit(NodeId("a"), Incarnation(1), 9, "there is none"))
        rule.feed(ev.Unfit(NodeId("a"), Incarnation(7), 1, "of an earlier life"))
        assert rule.state.record == before.record

    def test_the_next_master_and_the_store_keep_them(self) -> None:
        rule = Slotted(strikes=1)
        rule.come(node_info())
        rule.breaks(failure())
        record = rule.state.record
        assert from_plain(type(record), to_plain(record)) == record
        assert "places" in to_plain(record)["world"]["members"][0]
        state = take_over(rule.spec, record, [node_info()], 0.0).state
        assert [one.slot for one in job_status(state, NodeId("a"), ()).dropped] == [1]

    def test_the_end_of_the_job_says_that_it_did_without(self) -> None:
        rule = Slotted(strikes=1)
        rule.come(node_info())
        rule.breaks(failure(slot=3))
        rule.cordon("a", "0")
        rule.free(node_info(), rule.state.record.round)
        assert rule.places == {"a": (1, 2)}
        rule.feed(ev.NodeSaid(NodeId("a"), Incarnation(1), WorkersDone(rule.state.record.round)))
        why = "slot 3 of a was dropped: failed by itself 1 time, last: ended with exit status 3: OSError: no"
        assert rule.state.record.reason.endswith(f" ended with status 0; {why}")

    def test_it_comes_back_once_more_and_not_at_the_price_of_the_job(self) -> None:
        rule = Slotted(restarts=3, cooldown_s=50.0)
        rule.come(node_info())
        rule.breaks(failure())
        rule.breaks(failure())
        assert rule.places == {"a": (0, 2, 3)}
        assert 150.0 in [round(e.at_s - 1) for e in rule.effects if isinstance(e, ev.WakeAt)]
        rule.wait(50.0)
        rule.free(node_info(), rule.state.record.round)
        assert rule.places == {"a": ALL}
        rule.breaks(failure())
        assert rule.places == {"a": (0, 2, 3)} and rule.state.record.restarts == 3
        rule.wait(500.0)
        assert rule.places == {"a": (0, 2, 3)}

    def test_what_came_back_is_dropped_at_its_next_failure_however_many_the_job_allows(self) -> None:
        rule = Slotted(restarts=9, strikes=3, cooldown_s=50.0)
        rule.come(node_info())
        for _ in range(3):
            rule.breaks(failure())
        assert rule.places == {"a": (0, 2, 3)}
        rule.wait(50.0)
        rule.free(node_info(), rule.state.record.round)
        assert rule.places == {"a": ALL}
        rule.breaks(failure())
        assert rule.places == {"a": (0, 2, 3)}

    def test_the_next_master_begins_the_cool_down_again(self) -> None:
        rule = Slotted(strikes=1, cooldown_s=50.0)
        rule.come(node_info())
        rule.breaks(failure())
        record = rule.state.record
        rule.state = take_over(rule.spec, record, [node_info()], rule.now_s).state
        rule.feed(ev.NodeAttached(Attach(node_info(), record.round, record.round, False)))
        assert ev.WakeAt(rule.now_s + 50.0) in rule.effects
        rule.wait(49.0)
        assert rule.state.record.dropped
        rule.wait(1.0)
        assert not rule.state.record.dropped

    def test_of_returning_nodes_the_device_counts(self) -> None:
        cards = ("GPU-0", "GPU-1", "GPU-2", "GPU-3")
        dropped = [slots.Dropped(NodeId("a"), "a", 1, "GPU-1", "", Round(1))]
        assert slots.places(dropped, node_info(devices=cards), ONE) == (0, 2, 3)
        assert slots.places(dropped, node_info("b", devices=cards[::-1]), ONE) == (0, 1, 3), "moved to another host"
        assert slots.places(dropped, node_info(devices=("GPU-0", "GPU-9", "GPU-2", "GPU-3")), ONE) == ALL
        assert slots.places(dropped, node_info(), ONE) == (0, 2, 3), "nobody can tell any more"
        assert slots.places(dropped, node_info("b"), ONE) == ALL


class TestReplicas:
    """Nodes with four slots; a dropped slot takes the other workers of its replica with it."""

    def rule(self, size: int, bounds: NodeRange = UP_TO_TWO) -> Slotted:
        rule = Slotted(bounds)
        rule.spec = dataclasses.replace(rule.spec, replicas=Replicas(size, 4))
        rule.state = dataclasses.replace(rule.state, spec=rule.spec)
        return rule

    def test_a_node_runs_whole_replicas(self) -> None:
        rule = self.rule(2)
        rule.come(node_info())
        for _ in range(2):
            rule.breaks(failure())
        assert rule.places == {"a": (0, 2)}

    def test_a_spare_slot_completes_the_replica(self) -> None:
        rule = self.rule(2)
        rule.come(node_info(spare=1))
        for _ in range(2):
            rule.breaks(failure())
        assert rule.places == {"a": (0, 2, 3, 4)}

    def test_a_node_that_shares_a_replica_is_out_without_a_slot(self) -> None:
        rule = self.rule(8, NodeRange(2, 4, 2))
        rule.come(*(node_info(name) for name in "abc"))
        assert rule.places == {"a": ALL, "b": ALL}
        for _ in range(2):
            rule.breaks(failure())
        assert rule.places == {"c": ALL, "b": ALL}

    def test_a_slot_that_the_last_replica_needs_stays(self) -> None:
        rule = self.rule(4, NodeRange(1, 1))
        rule.come(node_info())
        for _ in range(2):
            rule.breaks(failure())
        assert rule.places == {"a": ALL}
        assert rule.cordon("a", "1") == (
            Verdict.REFUSED,
            "slot 1 of a is needed: no whole replica is left without. Cordon the node instead: edl cordon a",
        )


class TestByHand:
    def test_at_one_boundary_and_back(self) -> None:
        rule = Slotted()
        rule.come(node_info(), aware=True)
        rule.underway("a")
        assert rule.cordon("a", "1") == (Verdict.ACCEPTED, "slot 1 of a dropped")
        assert rule.state.agreement is not None and rule.state.agreement.purpose is Purpose.SWITCH
        assert UseSlots((0, 2, 3), "slots of this node are dropped or take part again") in rule.sent("a")
        assert rule.scale.waiting == "slot 1 of a dropped: by hand (me: noise)"
        rule.boundary()
        rule.free(node_info(), 1, aware=True)
        assert rule.places == {"a": (0, 2, 3)} and rule.state.record.restarts == 0
        rule.underway("a")
        assert rule.scale.observed == rule.scale.generation == 1
        assert rule.cordon("a", "1", cordoned=False)[0] is Verdict.ACCEPTED
        assert rule.scale.waiting == "slot 1 of a takes part"
        rule.boundary(19)
        rule.free(node_info(), 2, aware=True)
        assert rule.places == {"a": ALL}

    def test_a_spare_slot_gives_its_place_back(self) -> None:
        rule = Slotted()
        rule.come(node_info(spare=1), aware=True)
        rule.cordon("a", "1")
        rule.free(node_info(spare=1), 1, aware=True)
        assert rule.places == {"a": (0, 2, 3, 4)}
        rule.underway("a")
        rule.cordon("a", "1", cordoned=False)
        assert rule.scale.waiting == "slot 4 of a no longer needed; slot 1 of a takes part"

    def test_its_failure_before_the_boundary_leaves_it_dropped_by_hand(self) -> None:
        """Else it would take part again after the cool-down."""
        rule = Slotted(strikes=1, cooldown_s=50.0)
        rule.come(node_info(), aware=True)
        rule.underway("a")
        rule.cordon("a", "1")
        rule.feed(ev.NodeSaid(NodeId("a"), Incarnation(1), WorkerFailed(failure())))
        rule.wait(5.0)
        rule.free(node_info(), 1, aware=True)
        assert rule.places == {"a": (0, 2, 3)}
        assert [(one.slot, one.by) for one in rule.state.record.dropped] == [(1, slots.DroppedBy.HAND)]
        rule.wait(60.0)
        assert rule.places == {"a": (0, 2, 3)}

    @pytest.mark.parametrize(
        ("device", "cordoned", "verdict", "text"),
        [
            ("4", True, Verdict.UNKNOWN, "a has no slot or device 4: it has slots 0 to 3 (GPU-0"),
            ("GPU-7", True, Verdict.UNKNOWN, "no slot or device GPU-7"),
            ("gpu-2", True, Verdict.ACCEPTED, "slot 2 of a dropped"),
            ("-1", True, Verdict.UNKNOWN, "no slot or device -1"),
            ("1", False, Verdict.KNOWN, "slot 1 of a is not dropped: nothing changes"),
            ("7", False, Verdict.UNKNOWN, "no slot or device 7"),
        ],
    )
    def test_what_is_said(self, device: str, cordoned: bool, verdict: Verdict, text: str) -> None:
        rule = Slotted()
        rule.come(node_info(devices=("GPU-0", "GPU-1", "GPU-2", "GPU-3")))
        found = rule.cordon("a", device, cordoned=cordoned)
        assert found[0] is verdict and text in found[1]

    def test_the_last_one_is_refused_and_strangers_are_unknown(self) -> None:
        rule = Slotted()
        rule.come(node_info("a", 2), node_info("b", 2))
        assert rule.cordon("a", "0")[0] is Verdict.ACCEPTED
        assert rule.cordon("a", "0")[0] is Verdict.KNOWN
        verdict, text = rule.cordon("a", "1")
        assert verdict is Verdict.REFUSED and "Cordon the node instead: edl cordon a" in text
        assert rule.cordon("z", "0") == (Verdict.UNKNOWN, "no such node: z. Existing nodes: a, b")
        assert rule.cordon("z", "0", cordoned=False)[0] is Verdict.UNKNOWN
        rule.lose("a")
        assert rule.cordon("a", "0", cordoned=False)[0] is Verdict.ACCEPTED, "its node may be gone"

    def test_who_attaches_hears_it_again_where_it_does_not_know(self) -> None:
        rule = Slotted()
        rule.come(node_info())
        rule.cordon("a", "3")
        who = node_info()
        for uses, told in (((), True), ((0, 1, 2), False)):
            rule.feed(ev.NodeAttached(Attach(who, Round(1), Round(0), False, uses=uses)))
            assert any(isinstance(message, UseSlots) for message in rule.sent("a")) == told


def test_impaired_nodes_give_way_but_to_those_that_will_be_taken_away() -> None:
    a, b, c = (NodeId(name) for name in "abc")
    survivors = (ReadyNode(a, 0, impaired=True), ReadyNode(b, 1))
    assert order([a, b], [*survivors, ReadyNode(c, 2)], 2) == (c, b)
    assert order([a, b], [*survivors, ReadyNode(c, 2, impaired=True)], 2) == (a, b)
    assert order([a, b], [*survivors, ReadyNode(c, 2, index=5)], 2, wanted=2) == (a, b)


class TestBlame:
    """A fault that follows the rank is not the slot's."""

    @staticmethod
    def at(name: str, slot: int, rank: int) -> Failure:
        return dataclasses.replace(failure(name, slot), rank=Rank(rank))

    def test_a_rank_that_fails_elsewhere_too_clears_the_slot(self) -> None:
        rule = Slotted()
        rule.come(node_info())
        rule.breaks(self.at("a", 1, 1))
        rule.breaks(self.at("a", 1, 1))
        assert rule.places == {"a": (0, 2, 3)}
        rule.breaks(self.at("a", 2, 1))
        assert rule.places == {"a": ALL}
        notes = [one.text for one in rule.effects if isinstance(one, ev.HistoryNote)]
        assert not rule.state.record.dropped, notes
        rule.breaks(self.at("a", 2, 1))
        assert rule.places == {"a": ALL}, "its second failure is excused by those of slot 1"

    def test_the_reason_names_the_rank(self) -> None:
        rule = Slotted(strikes=1)
        rule.come(node_info())
        rule.breaks(self.at("a", 1, 1))
        number = rule.state.record.round
        rule.feed(
            ev.NodeSaid(
                NodeId("a"), Incarnation(1), WorkerFailed(dataclasses.replace(self.at("a", 2, 1), round=number))
            )
        )
        rule.free(node_info(), number)
        (text,) = [one.text for one in rule.effects if isinstance(one, ev.HistoryNote) and one.kind is ev.Kind.SLOT]
        assert text.startswith("slot 1 of a may take part again: rank 1, which failed there, has failed in slot 2 of a")

    def test_another_rank_clears_nothing(self) -> None:
        rule = Slotted()
        rule.come(node_info())
        for _ in range(2):
            rule.breaks(self.at("a", 1, 1))
        for _ in range(2):
            rule.breaks(self.at("a", 3, 2))
        assert rule.places == {"a": (0, 2)}

    def test_a_bad_slot_is_found_beside_a_failure_by_chance(self) -> None:
        rule = Slotted()
        rule.come(node_info())
        rule.breaks(self.at("a", 2, 1))
        for _ in range(2):
            rule.breaks(self.at("a", 1, 1))
            assert rule.places == {"a": ALL}
        rule.breaks(self.at("a", 1, 1))
        assert rule.places == {"a": (0, 2, 3)}

    def test_a_device_that_was_moved_does_not_excuse_itself(self) -> None:
        here, there = (
            slots.Strike(NodeId("a"), 0, "GPU-1", 2, ranks=(Rank(0),)),
            slots.Strike(NodeId("b"), 3, "GPU-1", 1, ranks=(Rank(0),)),
        )
        assert slots.against(here, [here, there]) == 2

    def test_what_a_check_found_is_not_cleared(self) -> None:
        rule = Slotted()
        rule.come(node_info())
        rule.feed(ev.Unfit(NodeId("a"), Incarnation(1), 1, "fails its memory test"))
        rule.free(node_info(), 1)
        for _ in range(2):
            rule.breaks(self.at("a", 2, 1))
        assert rule.places == {"a": (0, 3)}
