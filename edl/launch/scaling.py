"""What the ruling Master has beside it to get nodes from a scheduler."""

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
from edl.ports import Ruling, Store
from edl.schedulers.order import Order

Companions = Callable[[Ruling], Sequence[Coroutine[Any, Any, None]]]

_THIS_NODE_ALONE = (
    *("EDL_NODE_ID", "EDL_NODE_INDEX", "EDL_STANDALONE", "EDL_HTTP_PORT", "PET_STANDALONE"),
    *row_of("rank").variables,
)
"""Options given in the environment that another launcher must not get."""
_THIS_HOST_ALONE = ("EDL_LOCAL_ADDR", "EDL_HTTP_HOST", "PET_LOCAL_ADDR", *row_of("host").variables)
"""The same for one on another host."""
_NO_PLACE = {"EDL_NODE_RANK": "-1"}
"""It takes the place that is free. This is stronger than ``PET_*`` and than what a launch world says of this node."""


def companions(
    settings: LaunchSettings, store: Store, endpoints: Sequence[str], log: Callable[[str], None]
) -> Companions:
    """For ``MasterDeps``: one that looks after the scheduler, if the job has any."""
    wanted = settings.spec.scheduler
    if wanted is None:
        return lambda ruling: ()
    from edl.schedulers.shell import Reconciler  # for jobs that have a scheduler: a launcher's start is mostly imports

    told = order(settings, wanted, store, endpoints, log)
    return lambda ruling: (Reconciler(lambda: make_scheduler(told), ruling, told.clock, wanted.owner, log).run(),)


def order(
    settings: LaunchSettings,
    wanted: SchedulerChoice,
    store: Store,
    endpoints: Sequence[str],
    log: Callable[[str], None],
) -> Order:
    """All that an adapter may use."""
    spec, logs = settings.spec, Path(settings.logs.folder).parent if settings.logs.folder else runtime_folder()
    named = () if settings.store.endpoints else endpoints  # a private store's address is not on the command line
    told = {"--rdzv-id": spec.job, "--log-dir": str(logs) if settings.logs.folder else os.devnull}
    elsewhere = wanted.kind != "process"
    left_out = (*_THIS_NODE_ALONE, *(_THIS_HOST_ALONE if elsewhere else ()))
    return Order(
        wanted=wanted,
        job=spec.job,
        nodes=spec.nodes,
        node=settings.node,
        clock=SystemClock(),
        log=log,
        launcher=launcher_again(sys.executable, settings.arguments, value_options(), named, told, elsewhere=elsewhere),
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
