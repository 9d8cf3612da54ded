"""How long workers may run without a renewal by their launcher."""

from __future__ import annotations

import pytest

from edl.agent.entitlement import LOOK_SHARE, Entitlement

LEASE_S = 10.0
LOOK_S = LEASE_S * LOOK_SHARE


def told(renewals: list[float], looks: list[float], lease_s: float = LEASE_S) -> dict[float, float]:
    """Deadlines sent to the fork server, by time, for a launcher that renews its lease and checks at these times."""
    one, said = Entitlement(lease_s, 0.0), {}
    for at_s in sorted({*renewals, *looks}):
        if at_s in renewals:
            one.leased(at_s)
        until_s = one.look(at_s)
        if until_s is not None:
            said[at_s] = until_s
    return said


def test_before_the_first_renewal_half_a_lease() -> None:
    assert Entitlement(LEASE_S, 100.0).until_s == 105.0


@pytest.mark.parametrize("frozen_s", [0.0, 0.1, 1.0, 3.2, 3.4, 6.6])
def test_a_healthy_launcher_never_promises_more_than_its_lease(frozen_s: float) -> None:
    """Wherever it freezes, its workers are dead before the store may end the lease."""
    renewals = [at_s for at_s in (0.0, 3.4, 6.7) if at_s <= frozen_s]
    looks = [tenth / 10 for tenth in range(70) if tenth / 10 <= frozen_s]
    assert max(told(renewals, looks).values()) < renewals[-1] + LEASE_S


def test_the_lease_counts_from_when_it_was_asked_for() -> None:
    one = Entitlement(LEASE_S, 100.0)
    one.leased(98.0)  # the answer took two seconds
    assert one.look(100.0) == 98.0 + 0.9 * LEASE_S
    one.leased(97.0)  # an older answer that comes later changes nothing
    assert one.look(100.1) is None


def test_a_store_that_is_away_stops_nobody_whose_launcher_lives() -> None:
    one = Entitlement(LEASE_S, 0.0)
    one.leased(0.0)
    until_s = one.look(0.0) or 0.0
    for look in range(1, 100):
        now_s = look * LOOK_S
        assert now_s < until_s
        until_s = one.look(now_s) or until_s
    # If the launcher freezes now, it is for half a lease at most.
    assert until_s <= 99 * LOOK_S + LEASE_S / 2


def test_a_launcher_that_was_held_up_needs_a_lease_before_it_may_train_again() -> None:
    one = Entitlement(LEASE_S, 0.0)
    one.leased(0.0)
    assert one.look(0.0) == 9.0
    assert one.look(25.0) is None  # it wakes up, and only knows that it lives
    one.leased(25.5)
    assert one.look(25.6) == 34.5


def test_an_ended_lease_is_not_made_up_for_until_the_agent_has_acted() -> None:
    one = Entitlement(LEASE_S, 0.0)
    one.leased(0.0)
    assert one.look(0.0) == 9.0
    one.lost()
    assert one.look(8.5) is None
    one.acted()  # the workers have been told to end, and have their time for it
    assert one.look(8.6) == 13.6


def test_a_new_launcher_may_train_before_the_store_has_answered() -> None:
    one = Entitlement(LEASE_S, 0.0)
    assert one.look(4.0) == 4.0 + LEASE_S / 2


def test_a_new_lease_makes_up_for_the_ended_one() -> None:
    one = Entitlement(LEASE_S, 0.0)
    one.lost()
    one.leased(1.0)
    assert one.look(1.0) == 10.0
    assert one.look(9.0) == 14.0, "the store is away, but the launcher lives"


def test_a_longer_lease_is_made_use_of() -> None:
    one = Entitlement(LEASE_S, 0.0)
    one.leased(0.0)
    one.lost()
    one.granted(20.0, 4 * LEASE_S)
    assert one.look(20.0) == 20.0 + 0.9 * 4 * LEASE_S
    assert one.look(45.0) == 45.0 + 4 * LEASE_S / 2, "the store is away for longer than the first lease lasted"


def test_a_shorter_lease_takes_back_the_deadline_of_the_longer_one() -> None:
    """Else its workers train on after a freeze, while the others form a world without this node."""
    one = Entitlement(24.0, 0.0)
    one.leased(0.0)
    assert one.look(0.0) == pytest.approx(21.6)
    one.lost()
    one.acted()
    one.granted(8.0, 3.0)
    assert one.look(8.0) == pytest.approx(10.7)
    assert one.look(8.1) is None


def test_workers_that_end_have_time_if_a_shorter_lease_was_long_in_coming() -> None:
    """A launcher that waits for its own name asks for a lease long before it gets it."""
    one = Entitlement(24.0, 0.0)
    one.leased(0.0)
    one.look(0.0)
    one.lost()
    one.acted()
    one.granted(8.0, 3.0)
    assert one.look(15.0) == 15.0 + 3.0 / 2, "as of any launcher that lives"


def test_a_launcher_that_comes_too_late_earns_nothing_by_a_shorter_lease_either() -> None:
    one = Entitlement(24.0, 0.0)
    one.leased(0.0)
    one.look(0.0)
    one.granted(8.0, 3.0)
    assert one.look(30.0) is None
