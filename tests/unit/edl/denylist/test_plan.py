"""What a job adds to the denylist, and what it takes back."""

from __future__ import annotations

import dataclasses
import random

from edl.denylist.plan import Author, Plan, Sightings, counting, plan
from edl.wire.denylist import DenylistEntry
from edl.wire.health import HealthView
from edl.wire.status import DroppedSlot, JobStatus, NodeView

ME = Author("digits", "run1", 100.0)
NOW_S = 1000.0


def dropped(node: str = "a", slot: int = 0, device: str = "", by: str = "job", host: str = "m1") -> DroppedSlot:
    return DroppedSlot(node, node, slot, device, "failed by itself 2 times", 3, host, by)


def entry(host: str = "m1", device: str = "", run: str = "run1", until_s: float = 0.0) -> DenylistEntry:
    return DenylistEntry(host, device, "why", "job digits", run, 1.0, until_s)


def node(name: str = "a", slots: int = 1, spare: int = 0) -> NodeView:
    return NodeView(name, name, slots, "running", True, 0, 0, spare_slots=spare)


def status(*slots: DroppedSlot, nodes: tuple[NodeView, ...] = (), phase: str = "running") -> JobStatus:
    return JobStatus("digits", phase, 1, 1, "", "1:1", "elastic", 0, 1, "a", nodes, (), (), dropped=slots)


def names(found: Plan) -> tuple[list[str], list[str]]:
    return [one.name for one in found.add], list(found.remove)


def test_a_device_is_added_until_it_expires() -> None:
    (one,) = plan(status(dropped(device="G7,G8")), (), (), ME, NOW_S).add[:1]
    assert one == DenylistEntry("m1", "G7", "failed by itself 2 times", "job digits", "run1", NOW_S, NOW_S + 100)
    assert names(plan(status(dropped(device="G7,G8")), (), (), ME, NOW_S))[0] == ["device/G7", "device/G8"]
    forever = Author("digits", "run1", 0.0)
    assert plan(status(dropped(device="G7")), (), (), forever, NOW_S).add[0].until_s == 0.0


def test_what_was_dropped_for_another_reason_is_not_added() -> None:
    for by in ("hand", "denylist"):
        assert plan(status(dropped(device="G7", by=by)), (), (), ME, NOW_S) == Plan()


def test_a_host_is_added_once_all_its_slots_are_bad() -> None:
    one, two = dropped(slot=0), dropped(slot=1)
    assert plan(status(one, nodes=(node(slots=2),)), (), (), ME, NOW_S) == Plan()
    assert names(plan(status(one, two, nodes=(node(slots=2),)), (), (), ME, NOW_S)) == (["host/m1"], [])
    assert plan(status(one, two, nodes=(node(slots=2, spare=1),)), (), (), ME, NOW_S) == Plan()
    assert plan(status(one, two), (), (), ME, NOW_S) == Plan(), "the number of slots of an absent node is unknown"
    nameless = dropped(host="")
    assert plan(status(nameless, nodes=(node(),)), (), (), ME, NOW_S) == Plan()


def test_slots_of_a_node_that_has_moved_count_for_their_own_host() -> None:
    before, after = dropped(slot=0, host="m1"), dropped(slot=1, host="m2")
    assert plan(status(before, after, nodes=(node(slots=2),)), (), (), ME, NOW_S) == Plan()
    all_of_m2 = (dropped(slot=0, host="m2"), after)
    assert names(plan(status(before, *all_of_m2, nodes=(node(slots=2),)), (), (), ME, NOW_S))[0] == ["host/m2"]


def test_a_host_that_a_health_check_found_faulty_is_added_until_it_is_good() -> None:
    view = HealthView("a", "10.0.0.1", "faulty", "wrong numbers", excluded=True, host_id="m1")
    (one,) = plan(dataclasses.replace(status(), health=(view,)), (), (), ME, NOW_S).add
    assert (one.name, one.reason) == ("host/m1", "wrong numbers")
    assert plan(dataclasses.replace(status(), health=(view,)), (one,), {one.name}, ME, NOW_S) == Plan()
    good = dataclasses.replace(view, state="good", excluded=False)
    assert names(plan(dataclasses.replace(status(), health=(good,)), (one,), {one.name}, ME, NOW_S)) == (
        [],
        ["host/m1"],
    )
    slow = dataclasses.replace(view, state="slow")
    assert plan(dataclasses.replace(status(), health=(slow,)), (), (), ME, NOW_S) == Plan(), "no other job's concern"


def test_a_faulty_host_stays_until_a_check_finds_it_good() -> None:
    """A verdict is forgotten when its node goes silent, when it expires, and when the node's name moves to another
    host. None of that says anything for the host."""
    view = HealthView("a", "10.0.0.1", "faulty", "wrong numbers", excluded=True, host_id="m1")
    (one,) = plan(dataclasses.replace(status(), health=(view,)), (), (), ME, NOW_S).add
    elsewhere = HealthView("a", "10.0.0.2", "good", "", excluded=False, host_id="m2")
    due = HealthView("a", "10.0.0.1", "due", "it went silent", excluded=True)
    for health in ((), (elsewhere,), (due,)):
        assert plan(dataclasses.replace(status(), health=health), (one,), (), ME, NOW_S) == Plan(), health
    good = HealthView("b", "10.0.0.3", "good", "", excluded=False, host_id="m1")
    assert names(plan(dataclasses.replace(status(), health=(good,)), (one,), (), ME, NOW_S)) == ([], ["host/m1"])


def test_what_somebody_has_removed_is_not_added_again() -> None:
    assert plan(status(dropped(device="G7")), (), {"device/G7"}, ME, NOW_S) == Plan()


def test_an_own_entry_goes_when_its_slot_is_used_again() -> None:
    mine, foreign = entry(device="G7"), entry(device="G8", run="run2")
    assert names(plan(status(), (mine, foreign), (), ME, NOW_S)) == ([], ["device/G7"])
    assert plan(status(dropped(device="G7")), (mine, foreign), (), ME, NOW_S) == Plan()
    assert plan(status(phase="ended"), (mine,), (), ME, NOW_S) == Plan(), "an ended job uses nothing again"


def test_an_own_host_stays_while_one_of_its_slots_is_bad() -> None:
    """Also when its node is gone, and it is not known how many slots it had."""
    assert plan(status(dropped()), (entry(),), {"host/m1"}, ME, NOW_S) == Plan()


def test_expired_entries_go_and_do_not_count() -> None:
    old, new = entry(device="G1", run="run2", until_s=999.0), entry(device="G2", run="run2", until_s=1001.0)
    assert names(plan(status(), (old, new), (), ME, NOW_S, {old.name, new.name})) == ([], ["device/G1"])
    assert counting((old, new), ME, NOW_S) == (new,)
    again = plan(status(dropped(device="G1")), (old,), (), ME, NOW_S)
    assert names(again) == (["device/G1"], []), "it is replaced"


def test_a_wrong_clock_deletes_nothing_before_its_time() -> None:
    """This Master's clock is a year ahead. Others go by their own, so it deletes only what it has seen long enough."""
    week_s, year_s = 7 * 86400.0, 365 * 86400.0
    one, forever = entry(device="G1", run="run2", until_s=1.0 + week_s), entry(device="G2", run="run2")
    sightings = Sightings()
    for now_s, gone in ((5000.0, []), (4999.0 + week_s, []), (5000.0 + week_s, ["device/G1"])):
        outlived = sightings.outlived((one, forever), now_s)
        assert counting((one,), ME, NOW_S + year_s) == ()
        assert names(plan(status(), (one, forever), (), ME, NOW_S + year_s, outlived)) == ([], gone)


def test_an_entry_that_is_renewed_begins_its_time_again() -> None:
    sightings, one = Sightings(), entry(device="G1", until_s=101.0)
    assert sightings.outlived((one,), 0.0) == frozenset()
    renewed = dataclasses.replace(one, since_s=51.0, until_s=151.0)
    assert sightings.outlived((renewed,), 100.0) == frozenset()
    assert sightings.outlived((renewed,), 200.0) == {"device/G1"}


def test_own_entries_do_not_keep_slots_out() -> None:
    assert counting((entry(), entry("m2", run=""), entry("m3", run="run2")), ME, NOW_S) == (
        entry("m2", run=""),
        entry("m3", run="run2"),
    )


def test_it_settles() -> None:
    """Applying the plan leaves nothing to do, whatever the slots and entries are."""
    for seed in range(2000):
        drawn = random.Random(seed)
        devices = ["", "G1", "G2", "G1,G2"]
        slots = [
            dropped(name, slot, drawn.choice(devices), drawn.choice(["job", "hand", "denylist"]), f"m-{name}")
            for name in "ab"
            for slot in range(2)
            if drawn.random() < 0.5
        ]
        nodes = tuple(node(name, drawn.randint(1, 2)) for name in "ab" if drawn.random() < 0.8)
        now = status(*slots, nodes=nodes)
        before = {
            one.name: one
            for one in (
                entry(drawn.choice(["m-a", "m-b"]), drawn.choice(["", "G1", "G3"]), drawn.choice(["run1", "run2"]),
                      drawn.choice([0.0, 1.0, 2000.0]))
                for _ in range(drawn.randint(0, 4))
            )
        }  # fmt: skip
        todo = plan(now, tuple(before.values()), (), ME, NOW_S, tuple(before))
        after = {name: one for name, one in before.items() if name not in todo.remove}
        after |= {one.name: one for one in todo.add}
        added = {one.name for one in todo.add}
        assert plan(now, tuple(after.values()), added, ME, NOW_S, tuple(after)) == Plan(), seed
        assert not any(one.expired(NOW_S) for one in after.values()), seed
        bad = {device for slot in slots if slot.by == "job" for device in slot.device.split(",") if device}
        assert bad <= {one.device for one in after.values()}, seed
