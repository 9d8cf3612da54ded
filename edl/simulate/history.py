"""The result of a simulation: when which world trained, and what the slots did meanwhile."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from edl.master.goodput.slot_use import SlotUse


class RestoredFrom(enum.Enum):
    """Where a world's state came from."""

    SCRATCH = "scratch"
    MEMORY = "memory"
    STORAGE = "storage"


@dataclass(frozen=True, slots=True)
class TrainingSpell:
    """A world in training, from the first step of all its members until the Master ends it. Times are in nanoseconds
    from the beginning."""

    begin_ns: int
    end_ns: int
    halted_ns: int
    """When the last step was made: before ``end_ns`` if a fault was not noticed at once."""
    slots: int
    """Slots that train, in the Master's count (one a node)."""
    restored: RestoredFrom
    planned: bool = False
    """It ended at a step boundary, so nothing of it is lost."""
    spoilt_ns: int = 0
    """Slot-nanoseconds of members that were silent: not training, but lost."""
    paces: tuple[tuple[int, float], ...] = ()
    """From when on which factor by which steps are slower than usual; none: as usual."""


@dataclass(frozen=True, slots=True)
class SlowWindow:
    """A time in which storage is slower."""

    begin_ns: int
    end_ns: int
    factor: float


@dataclass(frozen=True, slots=True)
class SimulatedHistory:
    """What happened in a simulated job. Slot times are the Master's own accounts, in slot-nanoseconds of its slots."""

    duration_ns: int
    nodes: int
    uses: Mapping[SlotUse, int]
    repair_ns: int
    """Node-nanoseconds out of the job: removed by the Master, and not back yet."""
    spells: tuple[TrainingSpell, ...]
    slow_storage: tuple[SlowWindow, ...] = ()
    faults: Mapping[str, int] = field(default_factory=dict)
    """Faults that hit something, by kind."""
    waiting_ns: int = 0
    """Time without a world, because too few nodes were ready."""
    longest_wait_ns: int = 0
    waits: int = 0
    worlds: int = 0
    decisions: int = 0
    """Steps of the Master's machine."""
    ended: str = ""
    """Why the job ended before its time; empty: it did not."""

    @property
    def training_ns(self) -> int:
        """Slot-nanoseconds that the Master counted as training, whether the result counted or not."""
        return self.uses.get(SlotUse.USEFUL, 0) + self.uses.get(SlotUse.REDONE, 0)


def slowness(windows: tuple[SlowWindow, ...], at_ns: int) -> float:
    """How many times slower than usual storage is at this time."""
    return max((one.factor for one in windows if one.begin_ns <= at_ns < one.end_ns), default=1.0)
