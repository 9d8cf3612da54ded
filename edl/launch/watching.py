"""Sets up what the launcher of a Master runs beside it for watchdogs and notifications."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from edl.adapters.clock import SystemClock, wall_clock_s
from edl.adapters.system_threads import SYSTEM_THREADS
from edl.config import JobSpec
from edl.job_records import StragglerMode
from edl.launch.scaling import Companions
from edl.launch.settings import LaunchSettings
from edl.watch.table import STRAGGLER, WatchLimits
from edl.watched_master import WatchedMaster


def judged_by(spec: JobSpec, limits: WatchLimits) -> JobSpec:
    """The specification with the limit of the watchdog that is part of the Master's machine."""
    if not limits.on(STRAGGLER):
        return replace(spec, stragglers=replace(spec.stragglers, mode=StragglerMode.OFF))
    return replace(spec, stragglers=replace(spec.stragglers, share=limits.of(STRAGGLER)))


def companions(settings: LaunchSettings, run: str, log: Callable[[str], None]) -> Companions:
    """The companions for ``MasterDeps``. ``run``: see ``Registration.run``."""
    from edl.notify.addresses import channels_of
    from edl.notify.delivery import DeliveryDeps
    from edl.notify.notification import Sender
    from edl.notify.program import program_environment
    from edl.notify.shell import Notifier
    from edl.watch.shell import JobWatch

    clock, wanted = SystemClock(), settings.notify
    channels = channels_of(wanted.urls, program_environment())
    digest = hashlib.sha256(f"run {run}".encode()).hexdigest()[:8]
    sender = Sender(settings.spec.job, digest, settings.node.name)
    deps = DeliveryDeps(clock, SYSTEM_THREADS, wall_clock_s, log)

    def of(master: WatchedMaster) -> Sequence[Coroutine[Any, Any, None]]:
        notifier = Notifier(master, channels, wanted.least, sender, run, deps)
        return (notifier.run(), JobWatch(master, settings.limits, clock, notifier.tell).run())

    return of
