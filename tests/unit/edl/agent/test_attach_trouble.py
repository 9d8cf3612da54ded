"""A node that its Master is out of reach for says so, once."""

from __future__ import annotations

from edl.agent.attach_trouble import AttachTrouble
from edl.testing.clock import FakeClock

WHY = "unavailable: failed to connect to all addresses; last error: UNKNOWN: Failed to connect: Network is unreachable"


def test_what_lasts_is_said_once_and_so_is_its_end() -> None:
    clock, said = FakeClock(), list[str]()
    trouble = AttachTrouble(said.append, clock.now_s, 3.0)
    for _ in range(5):
        trouble.failed("fd00::5", 2000, "not yet")
        clock.advance(2.0)
    assert said == [], "elections take a while"
    for _ in range(5):
        trouble.failed("fd00::5", 2000, WHY)
        clock.advance(2.0)
    assert said == [
        f"cannot attach to the Master at [fd00::5]:2000 for 10 s: {WHY}. If its launcher runs, check that this host "
        "may connect to that port (firewalls, and --local-addr there). Trying again"
    ]
    trouble.attached()
    trouble.attached()
    assert said[1:] == ["attached to the Master"]


def test_each_master_is_waited_for() -> None:
    clock, said = FakeClock(), list[str]()
    trouble = AttachTrouble(said.append, clock.now_s, 3.0)
    for port in range(2000, 2010):
        trouble.failed("host", port, WHY)
        clock.advance(8.0)
    assert said == []
    trouble.attached()
    assert said == [], "nothing had been said"
