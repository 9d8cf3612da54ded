"""The accounts in the store, from which the next Master continues.

They are written with each change of the record and otherwise rarely: as long as nothing changes, the number of slots in
each use and the time since the write say everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edl.master.goodput.slot_times import NS, SlotTimes, Stint, WorldChange
from edl.master.goodput.slot_use import SlotUse, taking_part, use_of
from edl.master.goodput.training_clock import TrainingClock
from edl.master.state import MasterState, NodeEntry, NodeStatus

Pairs = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class StoredChange:
    """A ``WorldChange`` that had been in training for ``age_ns``."""

    age_ns: int
    before: Pairs
    slots: int
    hung_ns: int


@dataclass(frozen=True, slots=True)
class StoredSlotTimes:
    """A ``SlotTimes``, independent of its Master's clock."""

    wall_s: float
    """Time of the write, in seconds since the Unix epoch."""
    spent: Pairs
    """Slot-nanoseconds by use until then."""
    slots: Pairs
    """Number of slots by use at that time."""
    training: TrainingClock
    trains: bool
    planned: bool
    spoilt: int
    change: StoredChange | None = None


def stored(times: SlotTimes, wall_s: float) -> StoredSlotTimes:
    """The form in which slot times are kept."""
    slots: dict[SlotUse, int] = {}
    for stint in times.stints.values():
        slots[stint.use] = slots.get(stint.use, 0) + stint.slots
        slots[SlotUse.IDLE] = slots.get(SlotUse.IDLE, 0) + stint.idle
    change = times.change
    return StoredSlotTimes(
        wall_s=wall_s,
        spent=_pairs(times.amounts()),
        slots=_pairs(slots),
        training=times.training,
        trains=times.trains,
        planned=times.planned,
        spoilt=times.spoilt,
        change=None
        if change is None
        else StoredChange(times.at_ns - change.since_ns, _pairs(change.before), change.slots, change.hung_ns),
    )


def continued(found: StoredSlotTimes, state: MasterState, now_s: float, wall_s: float) -> SlotTimes:
    """The slot times of a Master that takes over. The slots did what they had been doing, except those of nodes that
    are gone: their time since the write is lost.

    ``state``: after this Master's take-over. A wall clock that was set back gives a gap of 0 seconds."""
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
    return SlotTimes(
        at_ns=now_ns,
        spent=spent,
        stints={entry.info.node: _stint(found, state, entry, now_ns) for entry in present},
        training=found.training.advance(gap_ns if found.trains else 0),
        trains=found.trains,
        planned=found.planned,
        change=None
        if change is None
        else WorldChange(now_ns - gap_ns - change.age_ns, _uses(change.before), change.slots, change.hung_ns),
        spoilt=spoilt if found.trains else found.spoilt,
    )


def _stint(found: StoredSlotTimes, state: MasterState, entry: NodeEntry, now_ns: int) -> Stint:
    """A node whose launcher has not attached to this Master yet: in a world that trains, its workers go on."""
    use = use_of(state, entry, planned=found.planned)
    if entry.status is NodeStatus.RUNNING and found.trains:
        use = SlotUse.USEFUL
    slots = taking_part(state, entry)
    return Stint(entry.info.incarnation, slots, entry.info.slots - slots, use, now_ns)


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
