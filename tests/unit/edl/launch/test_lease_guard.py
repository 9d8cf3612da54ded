"""A launcher whose event loop is busy keeps its lease; one whose loop is dead, or whose process is frozen, does not."""

from __future__ import annotations

import asyncio
import threading

import pytest

from edl.agent.entitlement import LEASE_SHARE
from edl.launch.lease_guard import LeaseCheck, LeaseGuard, is_due

TTL_S = 3.0
SHORT_S, SEVERAL = 2.0, 3
"""The loop counts as dead after two lease times, in which the thread has to get the processor several times."""


@pytest.mark.parametrize(
    ("seen", "due"),
    [
        (LeaseCheck(11.6, 10.0, asked_s=None), False),  # the loop answers: it is the store that does not
        (LeaseCheck(11.1, 10.0, asked_s=11.0), False),  # busy, and time enough left
        (LeaseCheck(11.3, 10.0, asked_s=11.0), True),
        (LeaseCheck(17.0, 15.5, asked_s=11.0), True),
        (LeaseCheck(17.1, 15.5, asked_s=11.0), False),  # for two leases: the loop counts as dead
    ],
)
def test_when_it_renews(seen: LeaseCheck, due: bool) -> None:
    assert is_due(seen, TTL_S) is due


class Kept:
    """External effects of a guard."""

    def __init__(self, *, answers: bool = True) -> None:
        self.answers = answers
        self.closed = False
        self.asked: list[int] = []
        self.called = threading.Event()
        self.entitled: list[float] = []
        self.renewed: list[float] = []

    def renew(self, lease: int) -> bool:
        self.asked.append(lease)
        if not self.answers:
            self.called.set()
        return self.answers

    def close(self) -> None:
        self.closed = True

    def entitle(self, until_s: float) -> None:
        self.entitled.append(until_s)
        if len(self.entitled) >= SEVERAL:
            self.called.set()


def busy(kept: Kept, lease: int) -> None:
    """Have an event loop do nothing but wait until the guard has acted, or (without a lease) for a while."""

    async def scenario() -> None:
        guard = LeaseGuard(SHORT_S, kept, kept.entitle, kept.renewed.append, lambda text: None)
        guard.holds(lease, 0.0, SHORT_S)
        try:
            assert kept.called.wait(30 if lease else SHORT_S) is bool(lease)
            guard.end()
            await asyncio.sleep(0)  # what the thread has left for the loop comes before this goes on
        finally:
            guard.end()

    asyncio.run(scenario())


def test_a_busy_loop_loses_no_lease_and_its_workers_no_right_to_run() -> None:
    kept = Kept()
    busy(kept, 7)
    assert set(kept.asked) == {7}
    assert len(kept.entitled) >= SEVERAL
    allowed = [at_s + LEASE_SHARE * SHORT_S for at_s in kept.renewed]
    assert min(allowed) >= kept.entitled[SEVERAL - 1], "told of a renewal after which others were made"


def test_a_longer_lease_is_renewed_later() -> None:
    kept = Kept()

    async def scenario() -> None:
        guard = LeaseGuard(SHORT_S, kept, kept.entitle, kept.renewed.append, lambda text: None)
        guard.holds(7, guard._clock.now_s(), 1000.0)
        try:
            assert not kept.called.wait(SHORT_S)  # the loop is busy for all of a short lease
        finally:
            guard.end()

    asyncio.run(scenario())
    assert kept.asked == []


def test_a_renewal_that_fails_entitles_nobody() -> None:
    kept = Kept(answers=False)
    busy(kept, 7)
    assert (kept.entitled, kept.renewed) == ([], [])


def test_without_a_lease_there_is_nothing_to_renew() -> None:
    kept = Kept()
    busy(kept, 0)
    assert kept.asked == []


def test_its_thread_ends_with_the_event_loop() -> None:
    """Of whose end nobody may have told it."""
    kept = Kept()

    async def scenario() -> None:
        LeaseGuard(0.1, kept, kept.entitle, kept.renewed.append, lambda text: None)

    asyncio.run(scenario())
    for thread in threading.enumerate():
        if thread.name == "edl-lease":
            thread.join(60)
            assert not thread.is_alive()
    assert kept.closed
