"""Sets up the Master's companion task that adds and removes nodes through a scheduler."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from edl.adapters.clock import SystemClock
from edl.adapters.leftovers import here
from edl.adapters.local_jobs import local_jobs
from edl.adapters.runtime_folder import runtime_folder
from edl.config import LogPlan, environment
from edl.job_records import SchedulerChoice
from edl.launch.addresses import etcd_store
from edl.launch.options import value_options
from edl.launch.paddle_table import row_of
from edl.launch.scale_options import launcher_again, make_scheduler
from edl.launch.settings import LaunchSettings
from edl.ports import Store
from edl.schedulers.deps import SchedulerDeps
from edl.schedulers.port import Scheduler
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

    def run(master: WatchedMaster) -> Coroutine[Any, Any, None]:
        def make() -> Scheduler:
            return make_scheduler(dataclasses.replace(deps, memory=master))

        return Reconciler(make, master, deps.clock, wanted.owner, log).run()

    return lambda master: (run(master),)


def scheduler_deps(
    settings: LaunchSettings,
    wanted: SchedulerChoice,
    store: Store,
    endpoints: Sequence[str],
    log: Callable[[str], None],
) -> SchedulerDeps:
    """What a scheduler's adapter gets from the launcher."""
    spec, elsewhere = settings.spec, wanted.kind != "process"
    named = () if settings.store.endpoints else endpoints  # only a private store's address must be added
    logs, fixed = _logs(settings.logs, elsewhere=elsewhere)
    fixed["--rdzv-id"] = spec.job
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


def _logs(plan: LogPlan, *, elsewhere: bool) -> tuple[Path, dict[str, str]]:
    """The folder for the logs of other launchers, and their options about it. A launcher on another host finds neither
    the temporary folder nor the runtime folder of this one, but the working directory."""
    if elsewhere and plan.temporary:
        return Path.cwd(), {}
    if not plan.folder:
        return Path.cwd() if elsewhere else runtime_folder(), {"--log-dir": os.devnull}
    folder = Path(plan.folder).parent
    return folder, {"--log-dir": str(folder)}


def nodes_folder(job: JobId) -> Path:
    """The folder of the files about launchers that the job's Masters have started on this host."""
    return runtime_folder() / f"{job}@{here()}.nodes"


def _launchers_on_this_host(job: str) -> Mapping[int, str]:
    """Node ids of the job's launchers on this host, by process id."""
    return {local.pid: local.node for local in local_jobs() if local.job == job}
