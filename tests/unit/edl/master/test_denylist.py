"""Slots on the denylist: dropped while an entry counts, whatever the job would prefer."""

from __future__ import annotations

import dataclasses

import pytest

from edl.config import NodeRange
from edl.master import events as ev
from edl.master.machine import take_over
from edl.master.policies.slots import KEPT
from edl.master.view import job_status
from edl.types import Incarnation, NodeId
from edl.wire.denylist import DenylistEntry
from edl.wire.json_messages import from_plain, to_plain
from edl.wire.records import NodeInfo
from edl.wire.scale_requests import Verdict
from tests.unit.edl.master.test_dropping import ALL, Slotted, failure, node_info

GPUS = ("G0", "G1", "G2", "G3")


def on(host: str, name: str, devices: tuple[str, ...] = (), life: int = 0) -> NodeInfo:
    return dataclasses.replace(node_info(name, devices=devices, life=life), host_id=host)


def entry(host: str = "", device: str = "", until_s: float = 0.0) -> DenylistEntry:
    return DenylistEntry(host, device, "ECC errors", "job other", "r1", 1.0, until_s)


def notes(rule: Slotted) -> list[str]:
    return [one.text for one in rule.effects if isinstance(one, ev.HistoryNote) and one.kind is ev.Kind.SLOT]


def test_a_device_is_not_used_and_comes_back() -> None:
    rule = Slotted()
    rule.feed(ev.DenylistChanged((entry("m9", "G2", 86400.0),)))
    rule.come(on("m1", "a", GPUS))
    assert rule.places == {"a": (0, 1, 3)}
    (one,) = job_status(rule.state, NodeId("a"), ()).dropped
    assert (one.by, one.host_id, one.device) == ("denylist", "m1", "G2")
    assert one.why == "device G2 is on the denylist until 1970-01-02 00:00 UTC, added by job other: ECC errors"
    rule.feed(ev.DenylistChanged(()))
    assert not rule.state.record.dropped
    assert any("slot 2 of a may take part again: it is no longer on the denylist" in text for text in notes(rule))


def test_a_host_is_not_used_even_if_the_job_then_waits() -> None:
    rule = Slotted(NodeRange(1, 2))
    rule.feed(ev.DenylistChanged((entry("m1"),)))
    rule.feed(ev.NodeRegistered(on("m1", "a")))
    assert notes(rule) == ["a takes no part: host m1 is on the denylist, added by job other: ECC errors"]
    rule.come(on("m1", "a"))
    assert rule.state.record.world is None
    assert "a on the denylist (edl denylist)" in rule.state.reason
    rule.come(on("m2", "b"))
    assert rule.places == {"b": ALL}


def test_a_running_world_gives_it_up() -> None:
    rule = Slotted()
    rule.come(on("m1", "a"), on("m2", "b"))
    assert set(rule.places) == {"a", "b"}
    rule.feed(ev.DenylistChanged((entry("m2"),)))
    for name in "ab":
        rule.free(on(f"m{'ab'.index(name) + 1}", name), 1)
    assert rule.places == {"a": ALL}


def test_uncordon_says_how_to_lift_it() -> None:
    rule = Slotted()
    rule.feed(ev.DenylistChanged((entry(device="G1"),)))
    rule.come(on("m1", "a", GPUS))
    verdict, text = rule.cordon("a", "1", cordoned=False)
    assert verdict is Verdict.REFUSED
    assert text.endswith("To lift it for all jobs: edl denylist remove")
    assert rule.places == {"a": (0, 2, 3)}


def test_who_comes_after_the_end_changes_nothing() -> None:
    rule = Slotted()
    rule.feed(ev.DenylistChanged((entry("m1"),)))
    rule.come(on("m2", "b"))
    rule.feed(ev.Failed("nothing is left to read"))
    rule.feed(ev.NodeRegistered(on("m1", "a")))
    assert (rule.state.record.dropped, notes(rule)) == ((), [])


def test_the_next_master_knows_before_its_companion_does() -> None:
    rule = Slotted()
    rule.feed(ev.DenylistChanged((entry(device="G1"),)))
    rule.come(on("m1", "a", GPUS))
    record = rule.state.record
    assert from_plain(type(record), to_plain(record)) == record
    assert [one.denied for one in record.dropped] == [True]


def test_the_cooldown_is_not_for_it() -> None:
    rule = Slotted(cooldown_s=10.0)
    rule.feed(ev.DenylistChanged((entry(device="G1"),)))
    rule.come(on("m1", "a", GPUS))
    rule.wait(100.0)
    assert rule.places == {"a": (0, 2, 3)}


def test_what_the_job_has_dropped_itself_stays_its_own() -> None:
    rule = Slotted(strikes=1)
    rule.come(on("m1", "a", GPUS))
    rule.breaks(failure())
    rule.feed(ev.DenylistChanged((entry(device="G1"),)))
    (one,) = job_status(rule.state, NodeId("a"), ()).dropped
    assert one.by == "job"


def test_what_the_job_would_use_again_stays_out_while_it_is_on_the_denylist() -> None:
    """Also if the job dropped it first, by itself or by hand, before it was put there."""
    rule = Slotted(strikes=1, cooldown_s=10.0)
    rule.come(on("m1", "a", GPUS))
    rule.breaks(failure())
    rule.cordon("a", "2")
    rule.free(on("m1", "a", GPUS), 2)
    rule.feed(ev.DenylistChanged((entry(device="G1"), entry(device="G2", until_s=86400.0))))
    assert rule.places == {"a": (0, 3)}
    rule.wait(10.0)
    verdict, text = rule.cordon("a", "2", cordoned=False)
    assert verdict is Verdict.ACCEPTED
    assert "may take part again, except slot 2: device G2 is on the denylist until 1970-01-02 00:00 UTC" in text
    assert text.endswith("To lift it for all jobs: edl denylist remove")
    assert rule.places == {"a": (0, 3)}
    assert {one.slot: one.denied for one in rule.state.record.dropped} == {1: True, 2: True}
    rule.feed(ev.DenylistChanged(()))
    rule.free(on("m1", "a", GPUS), 3)
    assert rule.places == {"a": ALL}


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_name_that_moves_to_another_host_leaves_the_denylist_behind(taken_over: bool) -> None:
    """As that of a pod of a StatefulSet does. Without known devices, slots are known by the names of their nodes."""
    rule = Slotted()
    rule.feed(ev.DenylistChanged((entry("m1"),)))
    rule.come(on("m1", "a"), on("m2", "b"))
    assert rule.places == {"b": ALL}
    rule.lose("a")
    if taken_over:
        rule.state = take_over(rule.spec, rule.state.record, [on("m2", "b")], rule.now_s).state
    rule.come(on("m3", "a", life=1))
    assert rule.state.record.dropped == ()
    rule.lose("b")
    assert rule.places == {"a": ALL}


def test_to_uncordon_a_node_lifts_nothing_from_the_denylist() -> None:
    """Also while a new Master has not read it yet."""
    rule = Slotted()
    rule.come(on("m1", "a", GPUS), on("m2", "b"))
    rule.feed(ev.DenylistChanged((entry(device="G1"),)))
    rule.cordon("a", "")
    rule.cordon("a", "2")
    nodes = [one.info for one in rule.state.nodes.values()]
    rule.state = take_over(rule.spec, rule.state.record, nodes, rule.now_s).state
    assert rule.cordon("a", "", cordoned=False)[0] is Verdict.ACCEPTED
    assert [(one.slot, one.denied) for one in rule.state.record.dropped] == [(1, True)]


def test_replacements_with_names_of_their_own_do_not_fill_the_record() -> None:
    """A pod on a bad host may be replaced by another one there again and again."""
    rule = Slotted()
    rule.feed(ev.DenylistChanged((entry("m1"),)))
    here = on("m1", "a")
    for number in range(200):
        pod = dataclasses.replace(here, node=NodeId(f"pod-{number}"), incarnation=Incarnation(1000 + number))
        rule.feed(ev.NodeRegistered(pod))
        assert [one.slot for one in rule.state.record.dropped if one.node == pod.node] == [*ALL]
        if number:
            rule.feed(ev.NodeRefused(pod.node, pod.incarnation))
    assert len(rule.state.record.dropped) <= KEPT + 2 * len(ALL)
    assert [one.slot for one in rule.state.record.dropped if one.node == "pod-0"] == [*ALL], "it is still there"


def test_a_device_is_known_in_another_node() -> None:
    rule = Slotted(NodeRange(1, 1))
    rule.feed(ev.DenylistChanged((entry(device="G3"),)))
    rule.come(on("m1", "a", GPUS))
    rule.lose("a")
    rule.come(on("m2", "b", ("G3", "G4", "G5", "G6")))
    assert rule.places == {"b": (1, 2, 3)}


@pytest.mark.parametrize("until_s", [1e12, 1.8e18, -1e18, 1e300])
def test_whatever_stands_in_an_entry_the_job_goes_on(until_s: float) -> None:
    """Entries come from outside: milliseconds instead of seconds, or the output of a program as the reason."""
    rule = Slotted(NodeRange(1, 2))
    rule.come(on("m1", "a"), on("m2", "b"))
    long = dataclasses.replace(entry("m1", until_s=until_s), reason="x" * 60_000)
    rule.feed(ev.DenylistChanged((long,)))
    (one, *_) = job_status(rule.state, NodeId("a"), ()).dropped
    assert one.why.startswith(f"host m1 is on the denylist until {'1970-01-01' if until_s < 0 else '9999-12-31'} ")
    assert len(one.why) <= 400
