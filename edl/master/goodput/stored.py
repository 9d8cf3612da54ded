"""The accounts in the store, from which the next Master continues.

They are written with each change of the record and otherwise rarely: as long as nothing changes, the number of slots in
each use and the time since the write say everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edl.master.goodput.ledger import NS, Change, Ledger, Stint
from edl.master.goodput.progress import Progress
from edl.master.goodput.slot_use import SlotUse, use_of
from edl.master.state import MasterState, NodeEntry, NodeStatus

Pairs = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class StoredChange:
    """A ``Change`` that had been in progress for ``age_ns``."""

    age_ns: int
    before: Pairs
    slots: int
    hung_ns: int


@dataclass(frozen=True, slots=True)
class StoredLedger:
    """A ``Ledger``, independent of its Master's clock."""

    wall_s: float
    """Time of the write, in seconds since the Unix epoch."""
    spent: Pairs
    """Slot-nanoseconds by use until then."""
    slots: Pairs
    """Number of slots by use at that time."""
    progress: Progress
    trains: bool
    planned: bool
    spoilt: int
    change: StoredChange | None = None


def stored(ledger: Ledger, wall_s: float) -> StoredLedger:
    """The form in which a ledger is kept."""
    slots: dict[SlotUse, int] = {}
    for stint in ledger.stints.values():
        slots[stint.use] = slots.get(stint.use, 0) + stint.slots
    change = ledger.change
    return StoredLedger(
        wall_s=wall_s,
        spent=_pairs(ledger.amounts()),
        slots=_pairs(slots),
        progress=ledger.progress,
        trains=ledger.trains,
        planned=ledger.planned,
        spoilt=ledger.spoilt,
        change=None
        if change is None
        else StoredChange(ledger.at_ns - change.since_ns, _pairs(change.before), change.slots, change.hung_ns),
    )


def continued(found: StoredLedger, state: MasterState, now_s: float, wall_s: float) -> Ledger:
    """The ledger of a Master that takes over. The slots did what they had been doing, except those of nodes that are
    gone, whose time since the write is lost. ``state``: from the store, before this Master's first decision.

    A wall clock that was set back gives a gap of 0 seconds."""
    now_ns, gap_ns = round(now_s * NS), max(0, round((wall_s - found.wall_s) * NS))
    slots = _uses(found.slots)
    present = [entry for entry in state.nodes.values() if entry.registered]
    gone = max(0, sum(slots.values()) - sum(entry.info.slots for entry in present))
    spent, spoilt = _uses(found.spent), found.spoilt
    for use in (SlotUse.USEFUL, *(one for one in SlotUse if one is not SlotUse.USEFUL)):
        lost = min(gone, slots.get(use, 0))
        gone -= lost
        _add(spent, SlotUse.LOST, lost * gap_ns)
        _add(spent, use, (slots.get(use, 0) - lost) * gap_ns)
        spoilt += lost * gap_ns if use is SlotUse.USEFUL else 0
    change = found.change
    return Ledger(
        at_ns=now_ns,
        spent=spent,
        stints={entry.info.node: _stint(found, state, entry, now_ns) for entry in present},
        progress=found.progress.advance(gap_ns if found.trains else 0),
        trains=found.trains,
        planned=found.planned,
        change=None
        if change is None
        else Change(now_ns - gap_ns - change.age_ns, _uses(change.before), change.slots, change.hung_ns),
        spoilt=spoilt if found.trains else found.spoilt,
    )


def _stint(found: StoredLedger, state: MasterState, entry: NodeEntry, now_ns: int) -> Stint:
    """A node whose launcher has not attached to this Master yet: in a world that trains, its workers go on."""
    use = use_of(state, entry, planned=found.planned)
    if entry.status is NodeStatus.RUNNING and found.trains:
        use = SlotUse.USEFUL
    return Stint(entry.info.incarnation, entry.info.slots, use, now_ns)


def _pairs(amounts: Mapping[SlotUse, int]) -> Pairs:
    return tuple((use.value, amount) for use, amount in amounts.items() if amount)


def _uses(pairs: Sequence[tuple[str, int]]) -> dict[SlotUse, int]:
    """Inverse of ``_pairs``. A use that this version of edl does not know counts as idle."""
    known = {use.value: use for use in SlotUse}
    found: dict[SlotUse, int] = {}
    for name, amount in pairs:
        _add(found, known.get(name, SlotUse.IDLE), amount)
    return found


def _add(amounts: dict[SlotUse, int], use: SlotUse, amount: int) -> None:
    amounts[use] = amounts.get(use, 0) + amount
