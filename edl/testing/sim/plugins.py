"""Extensions of a simulated job: the Master's services, what workers do with them, and their own faults and checks."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from edl.master.service import Service
from edl.ports import ElectedMaster

if TYPE_CHECKING:
    from edl.testing.sim.launcher import SimLauncher
    from edl.testing.sim.stepping import Script
    from edl.testing.sim.workers import Job
    from edl.testing.sim.world import SimWorld


class Plugin:
    """An extension for one schedule. It draws from its own random generator, so the rest of the schedule is the same
    without it."""

    excused = False
    """Whether the job may end as incomplete because of this plugin."""
    replenishes = False
    """Whether this plugin replaces missing launchers. If none does, the world does so after the faults."""
    settle_s = 0.0
    """Seconds that this plugin needs to settle after the faults, in addition to those of the job."""

    def job(self, world: SimWorld, total_s: float, script: Script | None) -> Job | None:
        """The job to simulate instead of the schedule's own. Called first, before there is any launcher."""
        return None

    def start(self, world: SimWorld) -> None:
        """Called when the world is set up, to plan faults on its timeline."""

    def services(self) -> Sequence[Service]:
        """Services for a new Master."""
        return ()

    def companions(self, launcher: SimLauncher, master: ElectedMaster) -> Sequence[Coroutine[Any, Any, None]]:
        """Coroutines that run beside a new Master, on its launcher's loop."""
        return ()

    def heal(self) -> None:
        """Called when the faults are over, to undo those of this plugin."""

    def check(self) -> None:
        """Called periodically, to report violations to the world's checks."""

    def settled(self) -> bool:
        """Whether the job may count as settled as far as this plugin is concerned."""
        return True

    def finish(self) -> None:
        """Called when the job has ended and all launchers have exited, for the final checks."""

    def close(self) -> None:
        """Called at the end of the schedule, successful or not."""


class Plugins(Plugin):
    """Several plugins as one."""

    def __init__(self, parts: Sequence[Plugin] = ()) -> None:
        self.parts = parts

    @property
    def excused(self) -> bool:  # type: ignore[override]
        """Whether any plugin excuses an incomplete end."""
        return any(part.excused for part in self.parts)

    @property
    def replenishes(self) -> bool:  # type: ignore[override]
        """Whether any plugin replaces missing launchers."""
        return any(part.replenishes for part in self.parts)

    @property
    def settle_s(self) -> float:  # type: ignore[override]
        """The longest settling time of all plugins, in seconds."""
        return max((part.settle_s for part in self.parts), default=0.0)

    def job(self, world: SimWorld, total_s: float, script: Script | None) -> Job | None:
        """The job of the first plugin that has one."""
        jobs = (part.job(world, total_s, script) for part in self.parts)
        return next((job for job in jobs if job is not None), None)

    def start(self, world: SimWorld) -> None:
        """Start each plugin with this world."""
        for part in self.parts:
            part.start(world)

    def services(self) -> Sequence[Service]:
        """The services of all plugins."""
        return [service for part in self.parts for service in part.services()]

    def companions(self, launcher: SimLauncher, master: ElectedMaster) -> Sequence[Coroutine[Any, Any, None]]:
        """The companions of all plugins."""
        return [one for part in self.parts for one in part.companions(launcher, master)]

    def heal(self) -> None:
        """Heal the faults of all plugins."""
        for part in self.parts:
            part.heal()

    def check(self) -> None:
        """Run the checks of all plugins."""
        for part in self.parts:
            part.check()

    def settled(self) -> bool:
        """Whether all plugins are settled."""
        return all(part.settled() for part in self.parts)

    def finish(self) -> None:
        """Run the final checks of all plugins."""
        for part in self.parts:
            part.finish()

    def close(self) -> None:
        """Close each plugin at the end of a run."""
        for part in self.parts:
            part.close()
