"""Which nodes have to be checked, and which are kept out: what is remembered of nodes, their names and their hosts."""

from __future__ import annotations

import pytest

from edl.job_records import HealthMode, HealthRules
from edl.master.policies.health import KEPT, KnownHealth, sound, with_suspect, with_verdicts, without_expired
from edl.types import Incarnation, NodeId
from edl.wire.health_records import NO_HEALTH, Fitness, HealthRecord, HealthVerdict
from edl.wire.records import NodeInfo

OFF, JOIN, FAILURE = (HealthRules(mode) for mode in (HealthMode.OFF, HealthMode.JOIN, HealthMode.FAILURE))


def node(name: str, life: int = 1, host: str = "h", host_id: str = "") -> NodeInfo:
    incarnation = Incarnation(1000 * int.from_bytes(name.encode(), "big") + life)
    return NodeInfo(NodeId(name), incarnation, host, 1, 1, host_id=host_id)


def bad(info: NodeInfo, why: str = "wrong product") -> HealthVerdict:
    return HealthVerdict(
        info.node, info.host, info.incarnation, Fitness.FAULTY, why, excluded=True, host_id=info.host_id
    )


def known(*verdicts: HealthVerdict) -> KnownHealth:
    return KnownHealth(HealthRecord(verdicts=verdicts))


def due(found: KnownHealth, info: NodeInfo, rules: HealthRules = FAILURE, member: bool = False) -> str:
    return found.why_due(info, rules, member=member)


def present(*infos: NodeInfo) -> dict[NodeId, Incarnation]:
    return {info.node: info.incarnation for info in infos}


def about(record: HealthRecord) -> list[tuple[str, int]]:
    """Nodes with a verdict, and which of their launchers it is about."""
    return [(one.node, one.incarnation % 1000) for one in record.verdicts]


def suspects(record: HealthRecord) -> list[tuple[str, str]]:
    return [(one.node, one.why) for one in record.suspects]


class TestDue:
    def test_a_new_node_only_if_new_nodes_are_to_be_checked(self) -> None:
        assert due(known(), node("a"), JOIN) == "it is new"
        assert due(known(), node("a"), FAILURE) == due(known(), node("a"), OFF) == ""
        assert due(known(), node("a"), JOIN, member=True) == "", "it has trained"
        assert due(known(sound(node("a"), 1)), node("a"), JOIN) == "", "it has been checked"
        assert due(known(sound(node("a"), 1)), node("a", 2), JOIN) == "it is new", "that was another launcher"

    @pytest.mark.parametrize("rules", [OFF, JOIN, FAILURE])
    @pytest.mark.parametrize("member", [False, True])
    def test_a_suspect_always(self, rules: HealthRules, member: bool) -> None:
        found = KnownHealth(with_suspect(NO_HEALTH, node("a"), "an ECC error"))
        assert not found.empty
        assert due(found, node("a", 2), rules, member) == "an ECC error"

    @pytest.mark.parametrize(
        ("other", "same"),
        [
            (node("b", 2, "h1", "id1"), True),
            (node("b", 2, "h2", "id1"), True),
            (node("b", 2, "h1", "id2"), False),
            (node("a", 2, "h2", "id2"), True),
        ],
        ids=["same host", "same host at another address", "another host at that address", "same name elsewhere"],
    )
    def test_what_comes_after_a_node_that_was_kept_out(self, other: NodeInfo, same: bool) -> None:
        found = known(bad(node("a", 1, "h1", "id1")))
        assert (due(found, other) != "") == same
        assert due(found, other, OFF) == ""
        assert found.is_kept_out(node("a", 1, "h1", "id1")) and not found.is_kept_out(other)

    def test_a_host_without_a_name_of_its_own_goes_by_its_address(self) -> None:
        found = known(bad(node("a", 1, "h1")))
        assert due(found, node("b", 2, "h1")) == "a on this host was kept out: wrong product"
        assert due(found, node("b", 2, "h2")) == ""
        found = KnownHealth(with_suspect(NO_HEALTH, node("a", 1, "h1"), "an ECC error"))
        assert due(found, node("b", 2, "h1")) == "an ECC error", "the fault may be the host's"
        assert due(found, node("b", 2, "h2")) == ""

    def test_a_sound_node_casts_no_doubt_on_its_host(self) -> None:
        found = known(sound(node("a"), 1, "a little slow"))
        assert due(found, node("b", 2)) == ""
        assert not found.is_kept_out(node("a"))


class TestSuspects:
    def test_the_newest_reason_counts(self) -> None:
        record = with_suspect(with_suspect(NO_HEALTH, node("a"), "first"), node("a"), "second")
        assert suspects(record) == [("a", "second")]

    def test_what_was_found_before_no_longer_holds(self) -> None:
        record = HealthRecord(verdicts=(sound(node("a"), 1), sound(node("b"), 1)))
        assert about(with_suspect(record, node("a"), "an ECC error")) == [("b", 1)]

    @pytest.mark.parametrize(
        ("here", "kept"),
        [
            (node("a", 2, "h1", "id1"), False),
            (node("a", 2, "h2", "id1"), False),
            (node("a", 2, "h1", "id2"), True),
        ],
        ids=["there", "there, at another address", "elsewhere"],
    )
    def test_a_bad_host_stays_known_if_the_name_is_used_elsewhere(self, here: NodeInfo, kept: bool) -> None:
        record = HealthRecord(verdicts=(bad(node("a", 1, "h1", "id1")),))
        assert about(with_suspect(record, here, "an ECC error")) == [("a", 1)] * kept
        record = HealthRecord(verdicts=(sound(node("a", 1, "h1", "id1"), 1),))
        assert about(with_suspect(record, here, "an ECC error")) == []

    def test_not_more_than_fit_into_the_record(self) -> None:
        record = NO_HEALTH
        for number in range(KEPT + 3):
            record = with_suspect(record, node(f"n{number}"), "x")
        assert [name for name, _ in suspects(record)] == [f"n{number}" for number in range(3, KEPT + 3)]


class TestVerdicts:
    def test_the_new_one_replaces_the_old_one_about_a_node(self) -> None:
        record = HealthRecord(verdicts=(bad(node("a")), sound(node("b", 1, "h2"), 1)))
        after = with_verdicts(record, [sound(node("a"), 2)], present(node("a"), node("b")))
        assert about(after) == [("b", 1), ("a", 1)]
        assert not KnownHealth(after).is_kept_out(node("a"))

    def test_of_two_nodes_on_a_host_each_has_its_own(self) -> None:
        record = HealthRecord(verdicts=(bad(node("a")),))
        after = with_verdicts(record, [sound(node("b"), 2)], present(node("a"), node("b")))
        assert KnownHealth(after).is_kept_out(node("a"))

    def test_a_sound_node_on_a_host_clears_it_of_one_that_is_gone(self) -> None:
        record = HealthRecord(verdicts=(bad(node("a")),))
        after = with_verdicts(record, [sound(node("b"), 2)], present(node("b")))
        assert about(after) == [("b", 1)]
        assert due(KnownHealth(after), node("c", 3)) == ""

    def test_a_bad_host_stays_known_if_its_nodes_name_is_sound_elsewhere(self) -> None:
        record = HealthRecord(verdicts=(bad(node("a", 1, "h1")),))
        here = node("a", 2, "h2")
        after = with_verdicts(record, [sound(here, 2)], present(here))
        assert about(after) == [("a", 1), ("a", 2)]
        assert due(KnownHealth(after), node("b", 3, "h1")) != ""
        assert due(KnownHealth(after), here) == ""

    def test_a_sound_one_of_an_earlier_launcher_is_forgotten(self) -> None:
        record = HealthRecord(verdicts=(sound(node("a", 1, "h1"), 1), sound(node("b", 1, "h3"), 1)))
        here = node("a", 2, "h2")
        assert about(with_verdicts(record, [sound(here, 2)], present(here))) == [("b", 1), ("a", 2)]

    def test_a_check_clears_suspicions_of_the_nodes_and_of_hosts_whose_nodes_are_gone(self) -> None:
        record = NO_HEALTH
        for name, host in (("a", "h1"), ("gone", "h1"), ("there", "h1"), ("far", "h2")):
            record = with_suspect(record, node(name, 1, host), "x")
        after = with_verdicts(record, [sound(node("a", 1, "h1"), 1)], present(node("a"), node("there"), node("far")))
        assert suspects(after) == [("there", "x"), ("far", "x")]

    def test_of_absent_nodes_the_newest_are_kept_and_of_present_ones_all(self) -> None:
        there = [node(f"p{number}", 1, f"hp{number}") for number in range(KEPT + 3)]
        gone = [node(f"g{number}", 1, f"hg{number}") for number in range(KEPT + 3)]
        record = with_verdicts(NO_HEALTH, [bad(info) for info in (*there, *gone)], present(*there))
        assert [name for name, _ in about(record)] == [info.node for info in (*there, *gone[3:])]


def test_who_was_kept_out_is_checked_again_once_that_time_is_over_if_it_is_still_there() -> None:
    infos = [node(name, number) for number, name in enumerate(("bad", "sound", "gone", "later", "back"), 1)]
    verdicts = [sound(info, 1) if info.node == "sound" else bad(info) for info in infos]
    record = HealthRecord(verdicts=tuple(verdicts))
    now = present(*(info for info in infos if info.node != "gone")) | present(node("back", 9))
    after = without_expired(record, {info.incarnation for info in infos if info.node != "later"}, now)
    assert about(after) == [("later", 4)]
    assert suspects(after) == [("bad", "the time for which it was kept out is over")]
