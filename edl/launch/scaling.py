"""The companion of the Master that gets nodes from a scheduler."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from edl.adapters.clock import SystemClock
from edl.adapters.host_notes import notes, runtime_folder
from edl.config import environment
from edl.job_records import SchedulerChoice
from edl.launch.addresses import etcd_store
from edl.launch.options import value_options
from edl.launch.paddle_table import row_of
from edl.launch.scale_options import launcher_again, make_scheduler
from edl.launch.settings import LaunchSettings
from edl.ports import ElectedMaster, Store
from edl.schedulers.deps import SchedulerDeps

Companions = Callable[[ElectedMaster], Sequence[Coroutine[Any, Any, None]]]

_THIS_NODE_ALONE = (
    *("EDL_NODE_ID", "EDL_NODE_INDEX", "EDL_STANDALONE", "EDL_HTTP_PORT", "PET_STANDALONE"),
    *row_of("rank").variables,
)
"""Option variables of this node that other launchers must not get."""
_THIS_HOST_ALONE = ("EDL_LOCAL_ADDR", "EDL_HTTP_HOST", "PET_LOCAL_ADDR", *row_of("host").variables)
"""The same for launchers on other hosts."""
_NO_PLACE = {"EDL_NODE_RANK": "-1"}
"""Makes the new launcher take any free rank. Takes precedence over ``PET_*`` and over the cluster environment of this
node."""


def companions(
    settings: LaunchSettings, store: Store, endpoints: Sequence[str], log: Callable[[str], None]
) -> Companions:
    """The companions for ``MasterDeps``: one that manages the scheduler, if the job has one."""
    wanted = settings.spec.scheduler
    if wanted is None:
        return lambda master: ()
    from edl.schedulers.shell import Reconciler  # imported late: only for jobs with a scheduler

    deps = scheduler_deps(settings, wanted, store, endpoints, log)
    return lambda master: (Reconciler(lambda: make_scheduler(deps), master, deps.clock, wanted.owner, log).run(),)


def scheduler_deps(
    settings: LaunchSettings,
    wanted: SchedulerChoice,
    store: Store,
    endpoints: Sequence[str],
    log: Callable[[str], None],
) -> SchedulerDeps:
    """Everything that an adapter of a scheduler may use."""
    spec, logs = settings.spec, Path(settings.logs.folder).parent if settings.logs.folder else runtime_folder()
    named = () if settings.store.endpoints else endpoints  # the address of a private store is not on the command line
    fixed = {"--rdzv-id": spec.job, "--log-dir": str(logs) if settings.logs.folder else os.devnull}
    elsewhere = wanted.kind != "process"
    left_out = (*_THIS_NODE_ALONE, *(_THIS_HOST_ALONE if elsewhere else ()))
    return SchedulerDeps(
        wanted=wanted,
        job=spec.job,
        nodes=spec.nodes,
        node=settings.node.name,
        clock=SystemClock(),
        log=log,
        launcher=launcher_again(sys.executable, settings.arguments, value_options(), named, fixed, elsewhere=elsewhere),
        environment={name: value for name, value in environment().items() if name not in left_out} | _NO_PLACE,
        runtime_folder=runtime_folder() / f"{spec.job}.nodes",
        log_folder=logs,
        shutdown_s=spec.timeouts.shutdown_s,
        store=store,
        beside=lambda: _beside(spec.job),
        open_store=lambda others: etcd_store(settings.store, others),
    )


def _beside(job: str) -> Mapping[int, str]:
    return {note.pid: note.node for note in notes() if note.job == job}
