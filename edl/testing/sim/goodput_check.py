"""Checks that a simulated job's goodput adds up: exactly under one Master, and never losing time to a change of it."""

from __future__ import annotations

from edl.master.goodput.slot_times import SlotTimes
from edl.master.goodput.stored import StoredSlotTimes
from edl.master.state import MasterState, Phase


class GoodputCheck:
    """Counts the slots' time of one Master again, from the states that its times went through."""

    def __init__(self) -> None:
        self._whole_ns: int | None = None
        self._at_ns = 0
        self._slots = 0

    def trouble(self, times: SlotTimes, state: MasterState, stored_ns: int) -> str:
        """What is wrong with a times that has followed the Master up to this state; empty: nothing. ``stored_ns``:
        slot-nanoseconds in the accounts in the store."""
        amounts = times.amounts()
        found_ns, before_ns = sum(amounts.values()), self._whole_ns
        if before_ns is None:
            self._whole_ns = found_ns
            wrong = f"has {found_ns} slot-ns, and the store {stored_ns}" if found_ns < stored_ns else ""
        else:
            self._whole_ns = before_ns + self._slots * (times.at_ns - self._at_ns)
            wrong = f"adds up to {found_ns} slot-ns of {self._whole_ns}" if found_ns != self._whole_ns else ""
        ended = state.record.phase is Phase.ENDED
        self._at_ns = times.at_ns
        self._slots = 0 if ended else sum(one.info.slots for one in state.nodes.values() if one.registered)
        negative = [use.value for use, amount in amounts.items() if amount < 0]
        return wrong or (f"has a negative amount for {', '.join(negative)}" if negative else "")


def amount_ns(accounts: StoredSlotTimes) -> int:
    """Slot-nanoseconds in the accounts of a Master that wrote them."""
    return sum(amount for _, amount in accounts.spent)
