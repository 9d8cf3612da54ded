"""Kubernetes as a scheduler: StatefulSet, custom resource with ``/scale``, Indexed Job, Volcano Job, PaddleJob.

``kinds.py`` (pure) knows where each object stores its size and how to patch it; ``pods.py`` (pure) interprets pods;
``client.py`` speaks HTTP; ``mirror.py`` keeps a list up to date with watches; ``scheduler.py`` is the adapter itself;
``access.py`` finds the API server and the credentials.
"""

from __future__ import annotations

import importlib.util

from edl.errors import SettingError
from edl.job_records import SchedulerChoice
from edl.schedulers.deps import SchedulerDeps
from edl.schedulers.kubernetes.access import CONF_KEYS, options_from
from edl.schedulers.kubernetes.kinds import kind_from
from edl.schedulers.kubernetes.scheduler import KubernetesScheduler
from edl.schedulers.port import Scheduler

__all__ = ["CONF_KEYS", "KubernetesScheduler", "check", "make", "open_scheduler"]


def check(wanted: SchedulerChoice) -> None:
    """Find errors before anything is started; makes no connection. Raises ``SettingError``.

    Errors are an invalid name, an invalid setting, a launcher outside a cluster without an address, and a missing
    package.
    """
    open_scheduler(wanted)
    if importlib.util.find_spec("aiohttp") is None:
        raise SettingError("--scheduler", wanted.text, "needs the package aiohttp", "Install it: pip install aiohttp")


def make(deps: SchedulerDeps) -> Scheduler:
    """Create the adapter for one Master's term. Raises ``SettingError``."""
    return open_scheduler(deps.wanted)


def open_scheduler(wanted: SchedulerChoice) -> KubernetesScheduler:
    """The adapter for ``--scheduler``; makes no connection yet. Raises ``SettingError``."""
    options = options_from(wanted.conf)
    return KubernetesScheduler(kind_from(wanted.text, options), options)
