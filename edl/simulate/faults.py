"""Faults as values: which unit fails when, and for how long. Drawn from a seed, the same seed gives the same faults."""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


LASTING = frozenset(set(FaultType) - {FaultType.WORKER, FaultType.MASTER})
"""Faults with a duration. The others are over as soon as the job has recovered."""
SLOWING = frozenset({FaultType.STRAGGLER, FaultType.SLOW_STORAGE})
"""Faults with a factor."""


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


@dataclass(frozen=True, slots=True)
class FaultProcess:
    """Faults of one kind that come by chance. Each unit fails on its own; a unit under repair does not fail."""

    kind: FaultType
    every_s: float
    """Mean time between faults of one unit: a node (of its workers too), a rack, a switch, the job's only Master."""
    shape: float = 1.0
    """Weibull's shape: 1 is exponential, below 1 faults come in clusters, above 1 with age."""
    lasts_s: float = 0.0
    """Mean duration, such as the time of a repair."""
    factor: float = 2.0
    """How many times slower a straggler or the storage is."""
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
        if not 1 <= self.factor < 1e6:
            raise SettingError(f"{name}:factor", f"{self.factor:g}", "must be from 1 to 1e6", "2 is twice as slow")


def units(kind: FaultType, cluster: ClusterShape) -> int:
    """How many units of this kind can fail. Raises ``SettingError`` if the cluster has none."""
    if kind in (FaultType.MASTER, FaultType.STORE, FaultType.SLOW_STORAGE):
        return 1
    if kind not in (FaultType.RACK, FaultType.SWITCH):
        return cluster.nodes
    size = cluster.rack_nodes if kind is FaultType.RACK else cluster.switch_nodes
    if not size:
        option = f"--{kind.value}-nodes"
        raise SettingError(f"--fault {kind.value}", None, f"needs {option}", f"Say how many nodes a {kind.value} has")
    return -(-cluster.nodes // size)


def affected(fault: TimedFault, cluster: ClusterShape) -> range:
    """The nodes that a fault hits."""
    size = {FaultType.RACK: cluster.rack_nodes, FaultType.SWITCH: cluster.switch_nodes}.get(fault.kind, 1)
    return range(fault.unit * size, min(cluster.nodes, (fault.unit + 1) * size))


def draw(processes: Iterable[FaultProcess], cluster: ClusterShape, horizon_s: float, seed: int) -> list[TimedFault]:
    """All faults before ``horizon_s``, in order. Each unit has random numbers of its own, so another spare, or another
    kind of fault, changes nothing about the faults of the others."""
    found: list[TimedFault] = []
    for number, process in enumerate(processes):
        scale_s = process.every_s / math.gamma(1 + 1 / process.shape)
        for unit in range(units(process.kind, cluster)):
            chance = random.Random(f"{seed}/{process.kind.value}/{number}/{unit}")
            at_s = chance.weibullvariate(scale_s, process.shape)
            while at_s < horizon_s:
                lasts_s = chance.expovariate(1 / process.lasts_s) if process.varies and process.lasts_s else 0.0
                lasts_s = lasts_s or process.lasts_s
                factor = process.factor if process.kind in SLOWING else 1.0
                found.append(TimedFault(at_s, unit, process.kind, lasts_s, factor))
                at_s += lasts_s + chance.weibullvariate(scale_s, process.shape)
    return sorted(found)


def check(faults: Sequence[TimedFault], cluster: ClusterShape) -> None:
    """Raises ``SettingError`` for a fault of a unit that the cluster does not have."""
    for fault in faults:
        most = units(fault.kind, cluster)
        if not 0 <= fault.unit < most:
            raise SettingError(f"unit of a {fault.kind.value} fault", fault.unit, f"must be from 0 to {most - 1}")
