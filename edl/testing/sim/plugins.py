"""Parts of a job that the simulated world does not know: services of the Master, what workers do with them, faults and
checks of their own."""

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
    """One such part, for one schedule. What it draws, it draws from a generator of its own, so that the rest of the
    schedule stays as it is without it."""

    excused = False
    """Whether the job may end as incomplete because of this part."""
    replenishes = False
    """Whether this part starts launchers where some are missing; otherwise the world does, after the faults."""
    settle_s = 0.0
    """Seconds that this part needs to settle after the faults, beyond those of the job."""

    def job(self, world: SimWorld, total_s: float, script: Script | None) -> Job | None:
        """The job that workers do, instead of the one of the schedule. First call, before there is any launcher."""
        return None

    def start(self, world: SimWorld) -> None:
        """The world stands: plan faults on its timeline."""

    def services(self) -> Sequence[Service]:
        """Services for a new Master."""
        return ()

    def companions(self, launcher: SimLauncher, master: ElectedMaster) -> Sequence[Coroutine[Any, Any, None]]:
        """Coroutines that run beside a new Master, on its launcher's loop."""
        return ()

    def heal(self) -> None:
        """Faults are over: undo those of this part."""

    def check(self) -> None:
        """Called now and then. Reports violations to the world's checks."""

    def settled(self) -> bool:
        """Whether nothing of this part stands against the job's being settled."""
        return True

    def finish(self) -> None:
        """The job has ended, and all launchers have exited: judge."""

    def close(self) -> None:
        """The schedule is over, whatever came of it."""


class Plugins(Plugin):
    """Several parts as one."""

    def __init__(self, parts: Sequence[Plugin] = ()) -> None:
        self.parts = parts

    @property
    def excused(self) -> bool:  # type: ignore[override]
        """See ``Plugin.excused``: because of any part."""
        return any(part.excused for part in self.parts)

    @property
    def replenishes(self) -> bool:  # type: ignore[override]
        """See ``Plugin.replenishes``: any part does."""
        return any(part.replenishes for part in self.parts)

    @property
    def settle_s(self) -> float:  # type: ignore[override]
        """See ``Plugin.settle_s``: the longest of all parts."""
        return max((part.settle_s for part in self.parts), default=0.0)

    def job(self, world: SimWorld, total_s: float, script: Script | None) -> Job | None:
        """The job of the first part that has one."""
        jobs = (part.job(world, total_s, script) for part in self.parts)
        return next((job for job in jobs if job is not None), None)

    def start(self, world: SimWorld) -> None:
        """All parts start."""
        for part in self.parts:
            part.start(world)

    def services(self) -> Sequence[Service]:
        """The services of all parts."""
        return [service for part in self.parts for service in part.services()]

    def companions(self, launcher: SimLauncher, master: ElectedMaster) -> Sequence[Coroutine[Any, Any, None]]:
        """The companions of all parts."""
        return [one for part in self.parts for one in part.companions(launcher, master)]

    def heal(self) -> None:
        """All parts heal."""
        for part in self.parts:
            part.heal()

    def check(self) -> None:
        """All parts check."""
        for part in self.parts:
            part.check()

    def settled(self) -> bool:
        """Whether all parts are settled."""
        return all(part.settled() for part in self.parts)

    def finish(self) -> None:
        """All parts judge."""
        for part in self.parts:
            part.finish()

    def close(self) -> None:
        """All parts close."""
        for part in self.parts:
            part.close()
