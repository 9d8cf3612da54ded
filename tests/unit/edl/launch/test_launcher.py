"""What a launcher makes of the renewals of its lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from edl.launch.launcher import Launcher, LauncherDeps, LeaseRenewer
from edl.launch.settings import LeaveSettings
from edl.testing.clock import FakeClock

LEASE_S = 3.0


class Begun(Exception):
    """The launcher has started its guard."""


def test_a_renewal_by_the_guard_is_an_answer_of_the_store() -> None:
    """The event loop was blocked for long, and its own first call fails: the Master need not step down."""
    clock, leased, out_of_touch = FakeClock(100.0), list[float](), list[float]()
    reports: list[Callable[[float], None]] = []

    def guard(renewed: Callable[[float], None]) -> LeaseRenewer:
        reports.append(renewed)
        raise Begun

    parts = SimpleNamespace(
        clock=clock,
        guard=guard,
        leave=LeaveSettings(),
        log=lambda text: None,
        agent=SimpleNamespace(leased=leased.append, forward=lambda number: None),
        local_job=SimpleNamespace(write=lambda: None),
        candidate=SimpleNamespace(out_of_touch=lambda: out_of_touch.append(clock.now_s())),
        registration=SimpleNamespace(lease_s=LEASE_S),
    )
    launcher = Launcher(cast(LauncherDeps, parts))

    async def scenario() -> None:
        with pytest.raises(Begun):
            await launcher.run()

    asyncio.run(scenario())
    reports[0](99.0)
    launcher._missed()
    assert (leased, out_of_touch, launcher.lease_age_s) == ([99.0], [], 1.0)
    reports[0](98.0)  # an older one that comes later changes nothing
    clock.advance(LEASE_S - 1.0)
    launcher._missed()
    assert out_of_touch == [102.0]
