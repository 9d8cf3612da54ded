"""The accounts as a Master shows and stores them."""

from __future__ import annotations

from edl.master import events as ev
from edl.master.goodput.goodput import STORE_S, Goodput
from edl.wire.messages import Pace, WorkersDone
from tests.unit.edl.master.goodput.test_slot_times import Accounted, two_train

WALL_S = 1_800_000_000.0


def follow(account: Goodput, rule: Accounted, event: ev.Event) -> list[str]:
    """One decision; returns the texts of its notes."""
    before = rule.state
    rule.feed(event)
    decision = ev.Decision(rule.state, rule.effects, rule.reason)
    followed = account.follow(before, [event], decision, rule.now_s)
    return [effect.text for effect in followed.effects if isinstance(effect, ev.HistoryNote)]


def begun(rule: Accounted) -> Goodput:
    account = Goodput(lambda: WALL_S + rule.now_s)
    account.load(None, rule.state, rule.now_s, print)
    account.follow(None, (), ev.Decision(rule.state, (), ""), rule.now_s)
    return account


def said(rule: Accounted, name: str, message: object) -> ev.NodeSaid:
    entry = next(entry for node, entry in rule.state.nodes.items() if node == name)
    return ev.NodeSaid(entry.info.node, entry.info.incarnation, message)  # type: ignore[arg-type]


def test_the_end_of_a_job_says_its_goodput() -> None:
    rule = two_train()
    account = begun(rule)
    rule.now_s += 30.0
    follow(account, rule, said(rule, "a", WorkersDone(rule.state.record.round)))
    rule.now_s += 10.0
    (text,) = follow(account, rule, said(rule, "b", WorkersDone(rule.state.record.round)))
    assert text.endswith("; goodput 87.5% of 160 s of slot time (idle 20.0 s)")
    assert {one.name: one.value for one in account.counts(rule.now_s + 5.0) if one.value} == {
        "useful": 140.0,
        "idle": 20.0,
    }


def test_it_is_shown_up_to_this_moment() -> None:
    rule = two_train()
    account = begun(rule)
    assert account.counts(rule.now_s) == ()
    assert {one.name: one.value for one in account.counts(rule.now_s + 2.5) if one.value} == {"useful": 10.0}


def test_it_is_written_from_time_to_time_while_workers_report() -> None:
    rule = two_train()
    account = begun(rule)
    number = rule.state.record.round
    for commit in (1, 2):
        rule.now_s += STORE_S / 2
        assert not account.due
        follow(account, rule, said(rule, "a", Pace(number, commit, 1.0)))
    assert account.due
    account.stored()
    assert not account.due
    rule.now_s += 10 * STORE_S
    follow(account, rule, ev.Tick())
    assert not account.due


def test_the_next_master_goes_on_and_what_it_cannot_read_it_begins_again() -> None:
    rule = two_train()
    account = begun(rule)
    rule.now_s += 10.0
    follow(account, rule, ev.Tick())
    value = account.stored()

    later = Goodput(lambda: WALL_S + rule.now_s + 2.0)
    later.load(value, rule.state, 7.0, print)
    assert {one.name: one.value for one in later.counts(7.0) if one.value} == {"useful": 48.0}
    lines: list[str] = []
    later.load(b"{}", rule.state, 7.0, lines.append)
    assert later.counts(7.0) == ()
    assert "goodput is counted from now on" in lines[0]
