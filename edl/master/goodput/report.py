"""The accounts in words and numbers, for the status and the history."""

from __future__ import annotations

from edl.master.goodput.ledger import NS, Amounts, Cost, Ledger
from edl.master.goodput.slot_use import SlotUse
from edl.wire.status import Count

_NAMED = 4
"""Number of uses that a sentence names."""
_LEAST_S = 0.0005
"""Shorter times are not shown."""


def counts(ledger: Ledger) -> tuple[Count, ...]:
    """Slot-seconds by use, in the order of ``SlotUse``; nothing before the first slot."""
    amounts = ledger.amounts()
    return tuple(Count(use.value, amount / NS) for use, amount in amounts.items()) if any(amounts.values()) else ()


def cost_text(cost: Cost) -> str:
    """What a change of the world has cost, as part of a sentence."""
    total_s = sum(cost.amounts.values()) / NS
    redone_s = cost.amounts.get(SlotUse.REDONE, 0) / NS / max(1, cost.slots)
    redone = f"{_seconds(redone_s)} of training redone" if redone_s >= _LEAST_S else "no training redone"
    parts = _named(cost.amounts, without=SlotUse.REDONE)
    return f"the change took {_seconds(cost.took_s)} and cost {_seconds(total_s)} of slot time{parts}, {redone}"


def total_text(ledger: Ledger) -> str:
    """The job's goodput, as a sentence; empty: there was no slot."""
    amounts = ledger.amounts()
    whole = sum(amounts.values())
    if not whole:
        return ""
    parts = _named(amounts, without=SlotUse.USEFUL)
    return f"goodput {amounts[SlotUse.USEFUL] / whole:.1%} of {_seconds(whole / NS)} of slot time{parts}"


def _named(amounts: Amounts, *, without: SlotUse) -> str:
    """The largest amounts in parentheses; empty: there are none worth naming."""
    found = {use.value.replace("_", " "): amount / NS for use, amount in amounts.items() if use is not without}
    large = sorted((one for one in found.items() if one[1] >= _LEAST_S), key=lambda one: -one[1])[:_NAMED]
    return f" ({', '.join(f'{name} {_seconds(part_s)}' for name, part_s in large)})" if large else ""


def _seconds(amount: float) -> str:
    """A duration with about three significant digits, such as ``0.143 s`` or ``5,310 s``."""
    digits = 3 if amount < 1 else 2 if amount < 10 else 1 if amount < 100 else 0
    return f"{amount:,.{digits}f} s"
