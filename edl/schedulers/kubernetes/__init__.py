"""Kubernetes as a scheduler: StatefulSet, custom resource with ``/scale``, Indexed Job, Volcano Job, PaddleJob.

``kinds.py`` (pure) knows where each kind of object stores its size and how to patch it; ``pods.py`` (pure) interprets
pods; ``client.py`` is the API client; ``mirror.py`` keeps a list of objects up to date with watches; ``scheduler.py``
is the adapter; ``access.py`` finds the API server and the credentials.
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
    """Check the settings without making a connection. Raises ``SettingError`` for an invalid name or setting, for a
    launcher outside a cluster that names no API server, and for a missing package."""
    open_scheduler(wanted)
    if importlib.util.find_spec("aiohttp") is None:
        raise SettingError("--scheduler", wanted.text, "needs the package aiohttp", "Install it: pip install aiohttp")


def make(deps: SchedulerDeps) -> Scheduler:
    """Create the adapter for one Master's term. Raises ``SettingError``."""
    return open_scheduler(deps.wanted)


def open_scheduler(wanted: SchedulerChoice) -> KubernetesScheduler:
    """Create the adapter for ``--scheduler``, which does not connect yet. Raises ``SettingError``."""
    options = options_from(wanted.conf)
    return KubernetesScheduler(kind_from(wanted.text, options), options)
