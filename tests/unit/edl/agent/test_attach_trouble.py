"""A node that its Master is out of reach for says so, once."""

from __future__ import annotations

from edl.agent.attach_trouble import AttachTrouble
from edl.testing.clock import FakeClock
from edl.wire.messages import NOT_THE_MASTER

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


def test_an_answer_is_no_trouble_of_the_network() -> None:
    clock, said = FakeClock(), list[str]()
    trouble = AttachTrouble(said.append, clock.now_s, 3.0)
    for _ in range(2):
        trouble.failed("host", 2000, f"unavailable: {NOT_THE_MASTER}")
        clock.advance(10.0)
    assert "It has stepped down, or cannot take office because the store is slow or full" in said[0]
    assert "firewalls" not in said[0]


def test_each_master_is_waited_for() -> None:
    clock, said = FakeClock(), list[str]()
    trouble = AttachTrouble(said.append, clock.now_s, 3.0)
    for port in range(2000, 2010):
        trouble.failed("host", port, WHY)
        clock.advance(8.0)
    assert said == []
    trouble.attached()
    assert said == [], "nothing had been said"
