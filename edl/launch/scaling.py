"""Sets up the Master's companion task that adds and removes nodes through a scheduler."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from edl.adapters.clock import SystemClock
from edl.adapters.local_jobs import local_jobs
from edl.adapters.runtime_folder import runtime_folder
from edl.config import environment
from edl.job_records import SchedulerChoice
from edl.launch.addresses import etcd_store
from edl.launch.options import value_options
from edl.launch.paddle_table import row_of
from edl.launch.scale_options import launcher_again, make_scheduler
from edl.launch.settings import LaunchSettings
from edl.ports import Store
from edl.schedulers.deps import SchedulerDeps
from edl.types import JobId
from edl.watched_master import WatchedMaster

Companions = Callable[[WatchedMaster], Sequence[Coroutine[Any, Any, None]]]

_THIS_NODE_ALONE = (
    *("EDL_NODE_ID", "EDL_NODE_INDEX", "EDL_STANDALONE", "PET_STANDALONE"),
    *row_of("rank").variables,
)
"""Option variables that apply to this node only and are not passed to other launchers."""
_THIS_HOST_ALONE = (
    *("EDL_LOCAL_ADDR", "EDL_HTTP_HOST", "EDL_HOST_ID", "EDL_RACK", "PET_LOCAL_ADDR"),
    *row_of("host").variables,
)
"""Option variables that are not passed to launchers on other hosts."""
_ANY_PORT = {"EDL_HTTP_PORT": "0"}
"""This launcher uses the given port."""
_ANY_RANK = {"EDL_NODE_RANK": "-1"}
"""Makes a new launcher take any free rank, whatever this node's ``PET_*`` and cluster environment say."""


def companions(
    settings: LaunchSettings, store: Store, endpoints: Sequence[str], log: Callable[[str], None]
) -> Companions:
    """The companions for ``MasterDeps``: a ``Reconciler`` if the job has a scheduler, otherwise none."""
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
    """What a scheduler's adapter gets from the launcher."""
    spec, logs = settings.spec, Path(settings.logs.folder).parent if settings.logs.folder else runtime_folder()
    named = () if settings.store.endpoints else endpoints  # only a private store's address must be added
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
        environment={
            **{name: value for name, value in environment().items() if name not in left_out},
            **_ANY_RANK,
            **(_ANY_PORT if environment().get("EDL_HTTP_PORT") else {}),
        },
        runtime_folder=nodes_folder(spec.job),
        log_folder=logs,
        shutdown_s=spec.timeouts.shutdown_s,
        store=store,
        beside=lambda: _launchers_on_this_host(spec.job),
        open_store=lambda others: etcd_store(settings.store, others),
    )


def nodes_folder(job: JobId) -> Path:
    """The folder of the files about launchers that the job's Masters have started on this host."""
    return runtime_folder() / f"{job}.nodes"


def _launchers_on_this_host(job: str) -> Mapping[int, str]:
    """Node ids of the job's launchers on this host, by process id."""
    return {local.pid: local.node for local in local_jobs() if local.job == job}
