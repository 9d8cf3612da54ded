"""Faults as values: which unit fails when, and for how long. Drawn from a seed, the same seed gives the same faults."""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from edl.errors import SettingError
from edl.simulate.shape import ClusterShape


class FaultType(enum.Enum):
    """What fails."""

    WORKER = "worker"
    """A worker of a node ends; its node stays."""
    NODE = "node"
    """A node falls silent, and is repaired."""
    RACK = "rack"
    """All nodes of a rack fall silent together."""
    SWITCH = "switch"
    """All nodes behind a switch fall silent together."""
    DRAIN = "drain"
    """A node is taken away with notice, such as for maintenance, and comes back."""
    MASTER = "master"
    """The Master's process ends; another launcher takes over."""
    STORE = "store"
    """etcd does not answer: nothing is decided until it does."""
    STRAGGLER = "straggler"
    """A node is slower than the others, who wait for it in each step."""
    SLOW_STORAGE = "slow-storage"
    """The checkpoint directory is slower than usual."""


class FaultUnit(enum.Enum):
    """What a fault hits as a whole."""

    NODE = enum.auto()
    RACK = enum.auto()
    SWITCH = enum.auto()
    JOB = enum.auto()


class FaultDuration(enum.Enum):
    """Whether a fault lasts for a time of its own."""

    NONE = enum.auto()
    """It is over as soon as the job has recovered."""
    OPTIONAL = enum.auto()
    """Without one, what has failed is back at once."""
    REQUIRED = enum.auto()
    """Without one, nothing would happen."""


@dataclass(frozen=True, slots=True)
class FaultTraits:
    """What faults of one kind have in common. ``slows``: whether they have a factor."""

    unit: FaultUnit
    duration: FaultDuration
    slows: bool = False

    @property
    def factor(self) -> float:
        """The factor of a fault that is given none."""
        return 2.0 if self.slows else 1.0


TRAITS: Mapping[FaultType, FaultTraits] = MappingProxyType(
    {
        FaultType.WORKER: FaultTraits(FaultUnit.NODE, FaultDuration.NONE),
        FaultType.NODE: FaultTraits(FaultUnit.NODE, FaultDuration.OPTIONAL),
        FaultType.RACK: FaultTraits(FaultUnit.RACK, FaultDuration.OPTIONAL),
        FaultType.SWITCH: FaultTraits(FaultUnit.SWITCH, FaultDuration.OPTIONAL),
        FaultType.DRAIN: FaultTraits(FaultUnit.NODE, FaultDuration.OPTIONAL),
        FaultType.MASTER: FaultTraits(FaultUnit.JOB, FaultDuration.NONE),
        FaultType.STORE: FaultTraits(FaultUnit.JOB, FaultDuration.REQUIRED),
        FaultType.STRAGGLER: FaultTraits(FaultUnit.NODE, FaultDuration.REQUIRED, slows=True),
        FaultType.SLOW_STORAGE: FaultTraits(FaultUnit.JOB, FaultDuration.REQUIRED, slows=True),
    }
)


@dataclass(frozen=True, slots=True)
class TimedFault:
    """One fault. ``unit``: number of the node, rack or switch, from 0; 0 where there is only one. ``factor``: how many
    times slower, for those that slow something down."""

    at_s: float
    unit: int
    kind: FaultType
    lasts_s: float = 0.0
    factor: float = 1.0

    def __lt__(self, other: TimedFault) -> bool:
        return (self.at_s, self.kind.value, self.unit) < (other.at_s, other.kind.value, other.unit)


KINDS = {kind.value: kind for kind in FaultType}
"""Kinds of faults by their names."""


def useless(kind: FaultType, lasts_s: float, factor: float) -> tuple[str, str]:
    """The value that does nothing in a fault of this kind, ``lasts`` or ``factor``, and why; both empty: none."""
    traits = TRAITS[kind]
    if lasts_s and traits.duration is FaultDuration.NONE:
        return "lasts", f"a {kind.value} fault has no duration: it is over as soon as the job has recovered"
    if not lasts_s and traits.duration is FaultDuration.REQUIRED:
        return "lasts", f"a {kind.value} fault that does not last changes nothing"
    if factor != 1 and not traits.slows:
        return "factor", f"a {kind.value} fault has no factor: it does not slow anything down"
    return "", ""


@dataclass(frozen=True, slots=True)
class FaultProcess:
    """Faults of one kind that come by chance. Each unit fails on its own; a unit under repair does not fail."""

    kind: FaultType
    every_s: float
    """Mean time of one unit from the end of a fault to the next: a node (of its workers too), a rack, a switch, the
    job's only Master."""
    shape: float = 1.0
    """Weibull's shape: 1 is exponential, below 1 faults come in clusters, above 1 with age."""
    lasts_s: float = 0.0
    """Mean duration, such as the time of a repair."""
    factor: float | None = None
    """How many times slower a straggler or the storage is. None: as ``FaultTraits`` says."""
    varies: bool = False
    """Whether durations are exponential. Otherwise all are the mean."""

    def __post_init__(self) -> None:
        name = f"--fault {self.kind.value}"
        if not 1e-3 <= self.every_s < math.inf:
            raise SettingError(f"{name}:every", f"{self.every_s:g}", "must be a time above 0", "For example every=30d")
        if not 0.1 <= self.shape <= 20:
            raise SettingError(f"{name}:shape", f"{self.shape:g}", "must be from 0.1 to 20", "1 is exponential")
        if not 0 <= self.lasts_s < math.inf:
            raise SettingError(f"{name}:lasts", f"{self.lasts_s:g}", "must be 0 or more")
        if not 1 <= self.slowdown < 1e6:
            raise SettingError(f"{name}:factor", f"{self.slowdown:g}", "must be from 1 to 1e6", "2 is twice as slow")
        setting, why = useless(self.kind, self.lasts_s, self.slowdown)
        if setting:
            value = self.lasts_s if setting == "lasts" else self.slowdown
            advice = f"Leave out {setting}=" if value else f"Add {setting}=, for example {setting}=1h"
            raise SettingError(f"{name}:{setting}", f"{value:g}", why, advice)

    @property
    def slowdown(self) -> float:
        """The factor of each fault."""
        return TRAITS[self.kind].factor if self.factor is None else self.factor


def units(kind: FaultType, cluster: ClusterShape) -> int:
    """How many units of this kind can fail. Raises ``SettingError`` if the cluster has none."""
    if TRAITS[kind].unit is FaultUnit.JOB:
        return 1
    size = _nodes(kind, cluster)
    if not size:
        option = f"--{kind.value}-nodes"
        raise SettingError(f"--fault {kind.value}", None, f"needs {option}", f"Say how many nodes a {kind.value} has")
    return -(-cluster.nodes // size)


def affected(fault: TimedFault, cluster: ClusterShape) -> range:
    """The nodes that a fault hits. Of a fault of the job as a whole, the first one."""
    size = _nodes(fault.kind, cluster)
    return range(fault.unit * size, min(cluster.nodes, (fault.unit + 1) * size))


def _nodes(kind: FaultType, cluster: ClusterShape) -> int:
    """Nodes in a unit of this kind; 0: the cluster has no such units."""
    sizes = {FaultUnit.RACK: cluster.rack_nodes, FaultUnit.SWITCH: cluster.switch_nodes}
    return sizes.get(TRAITS[kind].unit, 1)


def draw(processes: Iterable[FaultProcess], cluster: ClusterShape, horizon_s: float, seed: int) -> list[TimedFault]:
    """All faults before ``horizon_s``, in order. Each unit has random numbers of its own, so another spare, or another
    kind of fault, changes nothing about the faults of the others."""
    found: list[TimedFault] = []
    for number, process in enumerate(processes):
        scale_s = process.every_s / math.gamma(1 + 1 / process.shape)
        for unit in range(units(process.kind, cluster)):
            chance = random.Random(f"{seed}/{process.kind.value}/{number}/{unit}")
            at_s = _first_s(chance, scale_s, process.shape)
            while at_s < horizon_s:
                lasts_s = chance.expovariate(1 / process.lasts_s) if process.varies and process.lasts_s else 0.0
                lasts_s = lasts_s or process.lasts_s
                found.append(TimedFault(at_s, unit, process.kind, lasts_s, process.slowdown))
                at_s += lasts_s + chance.weibullvariate(scale_s, process.shape)
    return sorted(found)


def _first_s(chance: random.Random, scale_s: float, shape: float) -> float:
    """The time to a unit's first fault. The job begins at a moment in the unit's life that has nothing to do with its
    faults, so it begins within a gap that is drawn in proportion to its length, and anywhere in that gap: the forward
    recurrence time of a stationary renewal process. If all units were new, a horizon shorter than the mean gap would
    have too many faults with a shape below 1, and too few with one above. Exponential gaps have no memory, so their
    first one is like the others."""
    if shape == 1:
        return chance.weibullvariate(scale_s, shape)
    # (gap / scale) ** shape of a Weibull gap is exponential, and so Gamma(1 + 1 / shape) with the weight of the gap.
    gap_s: float = scale_s * chance.gammavariate(1 + 1 / shape, 1) ** (1 / shape)
    return chance.random() * gap_s


def check(faults: Sequence[TimedFault], cluster: ClusterShape) -> None:
    """Raises ``SettingError`` for a fault of a unit that the cluster does not have."""
    for fault in faults:
        most = units(fault.kind, cluster)
        if not 0 <= fault.unit < most:
            raise SettingError(f"unit of a {fault.kind.value} fault", fault.unit, f"must be from 0 to {most - 1}")
