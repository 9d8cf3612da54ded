"""The accounts in words and numbers, for the status and the history."""

from __future__ import annotations

from edl.master.goodput.slot_times import NS, Cost, SlotTimes
from edl.master.goodput.slot_use import SlotUse
from edl.rendezvous.phrases import LEAST_S, goodput, largest, measured
from edl.wire.status import Count


def counts(times: SlotTimes) -> tuple[Count, ...]:
    """Slot-seconds by use, in the order of ``SlotUse``; nothing before the first slot."""
    amounts = times.amounts()
    return tuple(Count(use.value, amount / NS) for use, amount in amounts.items()) if any(amounts.values()) else ()


def cost_text(cost: Cost) -> str:
    """What a change of the world has cost, as part of a sentence."""
    total_s = sum(cost.amounts.values()) / NS
    redone_s = cost.amounts.get(SlotUse.REDONE, 0) / NS / max(1, cost.slots)
    redone = f"{measured(redone_s)} of training redone" if redone_s >= LEAST_S else "no training redone"
    parts = {use.value: amount / NS for use, amount in cost.amounts.items() if use is not SlotUse.REDONE}
    return (
        f"the change took {measured(cost.took_s)} and cost {measured(total_s)} of slot time{largest(parts)}, {redone}"
    )


def total_text(times: SlotTimes) -> str:
    """The job's goodput, as part of a sentence; empty: there was no slot."""
    found = goodput({one.name: one.value for one in counts(times)})
    return f"goodput {found}" if found else ""
