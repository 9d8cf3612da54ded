"""Alarms: each raised once, cleared once, and never cleared by a watchdog that is blind."""

from __future__ import annotations

import random

import pytest

from edl.watch import raising
from edl.watch.raising import COOLDOWN_S, Raised, update
from edl.watch.readings import Reading, Sight

FULL = Reading("disk-space", "/c", Sight.FIRED, "1.0 GiB free", True)
FINE = Reading("disk-space", "/c", Sight.CLEAR)
BLIND = Reading("disk-space", "/c", Sight.BLIND, "Stale file handle")


def names(raised: Raised) -> list[str]:
    return [alarm.name for alarm in raised.sorted]


def test_an_alarm_keeps_its_first_text_until_it_is_cleared() -> None:
    first = update(Raised(), [FULL], 0.0)
    second = update(first, [Reading("disk-space", "/c", Sight.FIRED, "0.9 GiB free", True)], 30.0)
    assert second.sorted == first.sorted
    (alarm,) = first.sorted
    assert (alarm.severity, alarm.text, alarm.shared) == ("critical", "1.0 GiB free", True)
    assert update(second, [FINE], 60.0).sorted == ()


def test_a_blind_watchdog_keeps_its_alarm_and_raises_another() -> None:
    raised = update(update(Raised(), [FULL], 0.0), [BLIND], 30.0)
    assert names(raised) == ["blind", "disk-space"]
    assert raised.sorted[0].text == "disk-space cannot look: Stale file handle. Until then they say nothing"
    assert names(update(raised, [FULL], 60.0)) == ["disk-space"]


def test_an_unsure_watchdog_keeps_its_alarm_and_raises_none() -> None:
    unsure = Reading("disk-space", "/c", Sight.UNSURE)
    assert names(update(update(Raised(), [FULL], 0.0), [unsure], 30.0)) == ["disk-space"]
    assert names(update(Raised(), [unsure], 30.0)) == []


def test_it_is_not_raised_again_within_the_cooldown() -> None:
    cleared = update(update(Raised(), [FULL], 0.0), [FINE], 10.0)
    assert names(update(cleared, [FULL], 10.0 + COOLDOWN_S - 1)) == []
    assert names(update(cleared, [FULL], 10.0 + COOLDOWN_S)) == ["disk-space"]


def test_the_next_observer_continues() -> None:
    before = update(Raised(), [FULL], 0.0)
    assert raising.resumed(before.sorted).sorted == before.sorted
    assert update(raising.resumed(before.sorted), [FINE], 0.0).sorted == ()


@pytest.mark.parametrize("seed", range(100))
def test_raised_and_cleared_alternate_with_a_pause(seed: int) -> None:
    random_, raised, now_s = random.Random(seed), Raised(), 0.0
    cleared_s, on = -COOLDOWN_S, False
    for _ in range(200):
        now_s += random_.choice([1.0, 100.0, 400.0])
        reading = random_.choice([FULL, FINE, BLIND])
        raised = update(raised, [reading], now_s)
        if reading is FINE and on:
            on, cleared_s = False, now_s
        elif reading is FULL and not on and now_s - cleared_s >= COOLDOWN_S:
            on = True
        assert ("disk-space" in names(raised)) == on
        assert all(key in raised.alarms or now_s - at_s < COOLDOWN_S for key, at_s in raised.cleared_s.items())
