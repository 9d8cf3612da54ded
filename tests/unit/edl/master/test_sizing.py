"""Decisions on requests for a new size."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from edl.config import NodeRange
from edl.errors import SettingError
from edl.master.policies.slots import DroppedBy, drop_of
from edl.master.sizing import (
    KEYS_KEPT,
    LONGEST_BY,
    LONGEST_KEY,
    LONGEST_REASON,
    NO_SIZING,
    Cordoned,
    Facts,
    Judged,
    SeenRequest,
    Sizing,
    judge,
    remember,
    shortened,
    within,
)
from edl.types import Incarnation, NodeId, Round
from edl.wire.records import NodeInfo
from edl.wire.scale_requests import Cordon, Drain, DrainMode, Resize, ScaleRequest, SetBounds, Suspend, Verdict

ALL = frozenset("abcd")
FACTS = Facts(NodeRange(2, 6, 2), ALL, ALL, held=7)
ACCEPTED, KNOWN, STALE, REFUSED, UNKNOWN = Verdict


def judged(request: ScaleRequest, sizing: Sizing = NO_SIZING, **facts: Any) -> Judged:
    return judge(sizing, request, dataclasses.replace(FACTS, **facts))


def sized(**changes: Any) -> Sizing:
    return dataclasses.replace(NO_SIZING, **changes)


STORED: dict[str, Any] = {"store_members": frozenset("ab"), "members": 3}
"""One of three members is on a node that is gone."""

CASES: dict[str, tuple[ScaleRequest, Sizing, dict[str, Any], Verdict, str]] = {
    "a size": (Resize(4, "me"), NO_SIZING, {}, ACCEPTED, "4 nodes requested"),
    "the same again": (Resize(4, "me"), sized(desired=4), {}, KNOWN, "already"),
    "none": (Resize(0, "me"), NO_SIZING, {}, REFUSED, "edl suspend"),
    "fewer than none": (Resize(-2, "me"), NO_SIZING, {}, REFUSED, "needs at least one"),
    "too many": (Resize(8, "me"), NO_SIZING, {}, REFUSED, "outside 2:6"),
    "too few": (Resize(1, "me"), NO_SIZING, {}, REFUSED, "outside 2:6"),
    "off the unit": (Resize(3, "me"), NO_SIZING, {}, REFUSED, "Ask for 2 or 4"),
    "off the unit at the low end": (Resize(3, "me"), NO_SIZING, {"spec": NodeRange(3, 6, 2)}, REFUSED, "Ask for 4"),
    "within bounds that were changed": (Resize(8, "me"), sized(minimum=2, maximum=8), {}, ACCEPTED, "8 nodes"),
    "an old revision": (Resize(4, "me", revision=6), sized(by="you"), {}, STALE, "changed by you since revision 6"),
    "an old revision of nobody's": (Resize(4, "me", revision=6), NO_SIZING, {}, STALE, "was changed since revision 6"),
    "the newest revision": (Resize(4, "me", revision=7), NO_SIZING, {}, ACCEPTED, "4 nodes"),
    "bounds by an old revision": (SetBounds(2, 8, "me", revision=6), NO_SIZING, {}, STALE, "it is 7 now"),
    "an ended job": (Resize(4, "me"), NO_SIZING, {"over": "the job has ended: done"}, REFUSED, "has ended"),
    "the end goes before staleness": (Resize(4, "me", revision=6), NO_SIZING, {"over": "ended"}, REFUSED, "ended"),
    "somebody else's size": (Resize(4, "me"), NO_SIZING, {"owner": "statefulset/t"}, REFUSED, "change it there"),
    "a key too long": (
        Resize(4, "me", key="k" * (LONGEST_KEY + 1)), NO_SIZING, {}, REFUSED, f"at most {LONGEST_KEY} are"
    ),
    "the longest key": (Resize(4, "me", key="k" * LONGEST_KEY), NO_SIZING, {}, ACCEPTED, "4 nodes"),
    "back to no policy": (Resize(0, "me", auto=True), sized(desired=4), {}, REFUSED, "need --autoscale=throughput"),
    "back to the policy": (Resize(0, "me", auto=True), sized(desired=4), {"scales": True}, ACCEPTED, "given back"),
    "the policy's already": (
        Resize(0, "me", auto=True), sized(desired=4, automatic=True), {"scales": True}, KNOWN, "policy decides already"
    ),
    "away from the policy": (Resize(4, "me"), sized(desired=4, automatic=True), {"scales": True}, ACCEPTED, "4 nodes"),
    "a fact": (Resize(4, "ss", external=True), NO_SIZING, {"owner": "ss"}, ACCEPTED, "4 nodes given"),
    "a fact outside": (Resize(9, "ss", external=True), NO_SIZING, {}, ACCEPTED, "6 nodes given (9 is not"),
    "a fact off the unit": (Resize(5, "ss", external=True), NO_SIZING, {}, ACCEPTED, "4 nodes given (5 is not"),
    "a fact below": (Resize(1, "ss", external=True), NO_SIZING, {}, ACCEPTED, "2 nodes given (1 is not"),
    "a fact of none": (Resize(0, "ss", external=True), NO_SIZING, {}, KNOWN, "ignored"),
    "a fact that holds": (Resize(4, "ss", external=True), sized(desired=4), {}, KNOWN, "nothing changes"),
    "bounds": (SetBounds(2, 8, "me"), NO_SIZING, {}, ACCEPTED, "bounds set to 2:8"),
    "the same bounds": (SetBounds(2, 6, "me"), NO_SIZING, {}, KNOWN, "already"),
    "bounds the wrong way round": (SetBounds(6, 2, "me"), NO_SIZING, {}, REFUSED, "below the minimum"),
    "bounds without a size": (SetBounds(3, 3, "me"), NO_SIZING, {}, REFUSED, "multiple of 2"),
    "bounds of none": (SetBounds(0, 3, "me"), NO_SIZING, {}, REFUSED, "at least 1"),
    "a drain": (Drain(("a", "b"), "me"), NO_SIZING, {}, ACCEPTED, "drain of a, b requested"),
    "a drain of nobody": (Drain((), "me"), NO_SIZING, {}, REFUSED, "no node named"),
    "a drain of the store": (Drain(("a",), "me"), NO_SIZING, STORED, REFUSED, "leaves 1 node with a member"),
    "a drain of half the store": (Drain(("b",), "me"), NO_SIZING, STORED, REFUSED, "2 of 3 are needed"),
    "a drain of less than half the store": (
        Drain(("a",), "me"), NO_SIZING, {"store_members": frozenset("abc"), "members": 3}, ACCEPTED, "drain of a"
    ),
    "a drain beside the store": (Drain(("c",), "me"), NO_SIZING, STORED, ACCEPTED, "drain of c requested"),
    "a drain of a stranger": (Drain(("a", "x"), "me"), NO_SIZING, {}, UNKNOWN, "no such node: x"),
    "a drain of a stranger among many": (
        Drain(("x",), "me"), NO_SIZING, {"nodes": frozenset("abcdefghij")}, UNKNOWN, "a, b, c, d, e, f, g, h and 2 more"
    ),
    "a drain where all are needed": (Drain(("a",), "me"), NO_SIZING, {"lowest": 4}, REFUSED, "at least 4 needed"),
    "a drain of too many": (Drain(("a", "b", "c"), "me"), NO_SIZING, {}, REFUSED, "leaves 1 node able"),
    "a drain of all": (Drain(tuple("abcd"), "me"), NO_SIZING, {}, REFUSED, "edl stop"),
    "a drain of one that takes no part": (Drain(("d",), "me"), NO_SIZING, {"able": frozenset("a")}, ACCEPTED, "d"),
    "a drain of a suspended job": (Drain(tuple("abc"), "me"), sized(suspended="me"), {}, ACCEPTED, "drain of a, b, c"),
    "a drain of a whole suspended job": (Drain(tuple("abcd"), "me"), sized(suspended="me"), {}, REFUSED, "edl stop"),
    "a drain with checkpoint": (Drain(("a",), "me", mode=DrainMode.MUST), NO_SIZING, {}, ACCEPTED, "drain of a"),
    "checkpoint without a directory": (
        Drain(("a",), "me", mode=DrainMode.MUST), NO_SIZING, {"saves": False}, REFUSED, "no --checkpoint-dir"
    ),
    "checkpoint without state": (
        Drain(("a",), "me", mode=DrainMode.MUST), NO_SIZING, {"aware": False}, REFUSED, "does not use edl.State"
    ),
    "trying without a directory": (Drain(("a",), "me"), NO_SIZING, {"saves": False}, ACCEPTED, "drain of a"),
    "a drain by no time": (Drain(("a",), "me", deadline_s=float("nan")), NO_SIZING, {}, REFUSED, "0 or more"),
    "a drain by the end of time": (Drain(("a",), "me", deadline_s=float("inf")), NO_SIZING, {}, REFUSED, "0 or more"),
    "a drain by a time past": (Drain(("a",), "me", deadline_s=-1.0), NO_SIZING, {}, REFUSED, "0 or more"),
    "a cordon": (Cordon("a", True, "me"), NO_SIZING, {}, ACCEPTED, "a cordoned"),
    "a cordon again": (
        Cordon("a", True, "me"), sized(cordoned=(Cordoned(NodeId("a"), ""),)), {}, KNOWN, "a is cordoned already"
    ),
    "a cordon of one that is needed": (
        Cordon("a", True, "me"), NO_SIZING, {"able": frozenset("ab")}, REFUSED, "at least 2 needed"
    ),
    "a cordon of a stranger": (Cordon("x", True, "me"), NO_SIZING, {}, UNKNOWN, "no such node: x"),
    "no cordon": (Cordon("a", False, "me"), NO_SIZING, {}, KNOWN, "a is not cordoned: nothing"),
    "the end of a cordon of one that has gone": (
        Cordon("x", False, "me"), sized(cordoned=(Cordoned(NodeId("x"), ""),)), {}, ACCEPTED, "no longer cordoned"
    ),
    "a suspension": (Suspend(True, "me"), NO_SIZING, {}, ACCEPTED, "job suspended"),
    "one of a plain script": (Suspend(True, "me"), NO_SIZING, {"aware": False}, ACCEPTED, "what it has not saved"),
    "one more": (Suspend(True, "me"), sized(suspended="you"), {}, KNOWN, "suspended already"),
    "its end": (Suspend(False, "me"), sized(suspended="you"), {}, ACCEPTED, "resumed"),
    "the end of one for which too few are there": (
        Suspend(False, "me"), sized(suspended="you"), {"able": frozenset("a")}, ACCEPTED, "1 more node, 1 of at least 2"
    ),
    "the end of one for which more are needed than the bounds say": (
        Suspend(False, "me"), sized(suspended="you"), {"lowest": 5}, ACCEPTED, "1 more node, 4 of at least 5"
    ),
    "the end of none": (Suspend(False, "me"), NO_SIZING, {}, KNOWN, "the job is not suspended: nothing"),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "sizing", "facts", "verdict", "words"), CASES.values(), ids=CASES)
def test_verdict(asked: ScaleRequest, sizing: Sizing, facts: dict[str, Any], verdict: Verdict, words: str) -> None:
    found = judged(asked, sizing, **facts)
    assert (found.verdict, words in found.text) == (verdict, True), found.text
    told = dataclasses.replace(found.sizing, fact=sizing.fact)
    assert (told != sizing) == (verdict is ACCEPTED)
    assert found.sizing.generation == sizing.generation + (verdict is ACCEPTED)


def test_an_accepted_request_changes_what_it_is_about_and_nothing_else() -> None:
    assert judged(Resize(4, "me")).sizing.desired == 4
    given = judged(Resize(5, "ss", external=True), sized(desired=2)).sizing
    assert (given.desired, given.fact) == (4, 5)
    assert judged(Resize(0, "me", auto=True), sized(desired=4), scales=True).sizing.automatic
    assert not judged(Resize(2, "me"), sized(desired=4, automatic=True)).sizing.automatic
    suspended = judged(Suspend(True, "me"), sized(desired=4)).sizing
    assert (suspended.suspended, suspended.desired) == ("me", 4)
    assert not judged(Suspend(False, "you"), suspended).sizing.suspended
    cordoned = sized(cordoned=(Cordoned(NodeId("b"), "you"),))
    both = judged(Cordon("a", True, "me", "noise"), cordoned).sizing
    assert both.cordoned == (*cordoned.cordoned, Cordoned(NodeId("a"), "me: noise"))
    assert judged(Cordon("a", False, "me"), both).sizing.cordoned == cordoned.cordoned


def test_a_cordon_of_a_node_without_a_slot_is_lifted_before_its_slots_take_part() -> None:
    info = NodeInfo(NodeId("a"), Incarnation(1), "a", 1, 1)
    drop = drop_of(info, 0, "failed", Round(1), DroppedBy.JOB)
    facts: dict[str, Any] = {"infos": {NodeId("a"): info}, "dropped": (drop,), "able": frozenset("bcd")}
    cordoned = judged(Cordon("a", True, "me"), **facts)
    assert (cordoned.verdict, cordoned.sizing.excludes("a")) == (ACCEPTED, True)
    lifted = judged(Cordon("a", False, "me"), cordoned.sizing, **facts)
    assert (lifted.sizing.excludes("a"), lifted.text) == (False, "a no longer cordoned")
    assert judged(Cordon("a", False, "me"), lifted.sizing, **facts).text == "slot 0 of a may take part again"


def test_requester_and_reason_are_kept_short_and_on_one_line() -> None:
    kept = shortened(Resize(4, "m\ne" * LONGEST_BY, "r\n" * LONGEST_REASON))
    assert len(kept.by) == LONGEST_BY and len(kept.reason) == LONGEST_REASON
    assert "\n" not in kept.by + kept.reason


def test_what_is_accepted_says_who_and_why_in_one_line() -> None:
    found = judged(Resize(4, "me", "cheap\n hours"))
    assert (found.sizing.by, found.sizing.reason) == ("me", "cheap hours")


def test_a_suspension_by_a_client_without_a_name_is_one() -> None:
    assert judged(Suspend(True, "")).sizing.suspended == "a client that gave no name"


def test_a_fact_outside_the_bounds_is_noted_once() -> None:
    first = judged(Resize(9, "ss", external=True), sized(desired=6))
    assert (first.verdict, bool(first.said)) == (KNOWN, True)
    again = judged(Resize(9, "ss", external=True), first.sizing)
    assert (again.verdict, again.said, again.sizing) == (KNOWN, "", first.sizing)
    nothing = judged(Resize(0, "ss", external=True), first.sizing)
    assert nothing.said.startswith("ss provides 0 nodes: ignored")
    assert not judged(Resize(0, "ss", external=True), nothing.sizing).said


def test_keys_are_remembered_with_their_answers_unless_refused() -> None:
    request = Resize(4, "me", key="k")
    found = judged(request)
    seen = remember((), request, found)
    assert seen == (SeenRequest("k", ACCEPTED, found.text),)
    again = judged(Resize(2, "you", key="k"), found.sizing, seen=seen)
    assert (again.verdict, again.text, again.sizing) == (ACCEPTED, found.text, found.sizing)
    assert remember(seen, request, again) == seen
    other = judged(Resize(2, "you", key="other"), found.sizing, seen=seen)
    assert (other.text, other.sizing.desired) == ("2 nodes requested", 2)
    keyless = Resize(2, "you")
    assert remember(seen, keyless, judged(keyless, found.sizing, seen=seen)) == seen
    assert remember(seen, Resize(8, "me", key="z"), judged(Resize(8, "me", key="z"))) == seen
    for number in range(KEYS_KEPT):
        seen = remember(seen, Resize(4, "me", key=f"{number}"), found)
    assert (len(seen), seen[0].key) == (KEYS_KEPT, "0")


def test_a_size_asked_for_is_cut_by_bounds_that_change_later_and_comes_back_with_them() -> None:
    sizing = judged(Resize(6, "me")).sizing
    narrow = judged(SetBounds(2, 4, "me"), sizing).sizing
    assert (narrow.requested(FACTS.spec), narrow.target(FACTS.spec)) == (4, 4)
    assert judged(SetBounds(2, 8, "me"), narrow).sizing.requested(FACTS.spec) == 6
    assert sized(minimum=4, maximum=8, desired=2).requested(FACTS.spec) == 4


def test_nobody_has_asked() -> None:
    assert (NO_SIZING.requested(FACTS.spec), NO_SIZING.target(NodeRange(1, 5, 2)), NO_SIZING.bounds(FACTS.spec)) == (
        0, 4, FACTS.spec,
    )  # fmt: skip


def test_the_size_next_to_one() -> None:
    assert [within(NodeRange(3, 8, 2), nodes) for nodes in (1, 3, 4, 5, 8, 99)] == [4, 4, 4, 4, 8, 8]


def test_bounds_are_checked_like_those_of_the_command_line() -> None:
    with pytest.raises(SettingError):
        NodeRange(6, 2)
    assert "bounds=6:2" in judged(SetBounds(6, 2, "me")).text
