"""Everything that one simulation is given, and running it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from edl.errors import SettingError
from edl.simulate.accounts import SavingRules
from edl.simulate.faults import FaultProcess, TimedFault, check, draw
from edl.simulate.history import SimulatedHistory
from edl.simulate.shape import ClusterShape, JobShape, PhaseTimes
from edl.simulate.virtual import simulate

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class SimulatedScenario:
    """A cluster, a job, its faults and its rules for saving."""

    cluster: ClusterShape
    job: JobShape
    processes: tuple[FaultProcess, ...] = ()
    recorded: tuple[TimedFault, ...] = ()
    times: PhaseTimes = field(default_factory=PhaseTimes)
    saving: SavingRules = field(default_factory=SavingRules)
    horizon_s: float = 30 * DAY_S
    seed: int = 0
    price: float = 0.0
    """Of one slot for an hour, in any currency; 0: unknown."""

    def __post_init__(self) -> None:
        if not 1 <= self.horizon_s <= 100 * DAY_S:  # in nanoseconds, more would not be exact as a float
            raise SettingError("--for", f"{self.horizon_s:g} s", "must be from 1 s to 100 days")
        if not 0 <= self.price < 1e9:
            raise SettingError("--price", f"{self.price:g}", "must be 0 or more")
        if self.job.maximum > self.cluster.nodes:
            raise SettingError("--spares", self.spares, "must be 0 or more")
        check(self.recorded, self.cluster)

    @property
    def spares(self) -> int:
        """Nodes beyond those of the largest world."""
        return self.cluster.nodes - self.job.maximum

    def with_spares(self, spares: int) -> SimulatedScenario:
        """The same job on a cluster with another number of spares; the faults of the other nodes stay. Raises
        ``SettingError`` if recorded faults, or the shape of the cluster, need more nodes."""
        cluster = dataclasses.replace(self.cluster, nodes=self.job.maximum + spares)
        return dataclasses.replace(self, cluster=cluster)

    def run(self) -> SimulatedHistory:
        """Simulate it."""
        drawn = draw(self.processes, self.cluster, self.horizon_s, self.seed)
        recorded = [one for one in self.recorded if one.at_s < self.horizon_s]
        return simulate(self.cluster, self.job, self.times, sorted([*drawn, *recorded]), self.horizon_s)
