"""Kubernetes as a scheduler: StatefulSet, custom resource with ``/scale``, Indexed Job, Volcano Job, PaddleJob.

``kinds.py`` (pure) knows where each object keeps its size and how it is patched; ``pods.py`` (pure) reads pods;
``client.py`` speaks HTTP; ``mirror.py`` follows a list by watches; ``scheduler.py`` is the adapter itself;
``access.py`` says where the API server is, and how to come in.
"""

from __future__ import annotations

import importlib.util

from edl.errors import SettingError
from edl.job_records import SchedulerChoice
from edl.schedulers.kubernetes.access import CONF_KEYS, options_from
from edl.schedulers.kubernetes.kinds import kind_from
from edl.schedulers.kubernetes.scheduler import KubernetesScheduler
from edl.schedulers.order import Order
from edl.schedulers.port import Scheduler

__all__ = ["CONF_KEYS", "KubernetesScheduler", "check", "make", "open_scheduler"]


def check(wanted: SchedulerChoice) -> None:
    """Find what is wrong before anything is started; nothing is connected. Raises ``SettingError``.

    That may be a name that cannot be, a setting, a launcher outside of a cluster without an address, a package that is
    missing.
    """
    open_scheduler(wanted)
    if importlib.util.find_spec("aiohttp") is None:
        raise SettingError("--scheduler", wanted.text, "needs the package aiohttp", "Install it: pip install aiohttp")


def make(order: Order) -> Scheduler:
    """The adapter for the time that one Master rules. Raises ``SettingError``."""
    return open_scheduler(order.wanted)


def open_scheduler(wanted: SchedulerChoice) -> KubernetesScheduler:
    """The adapter for what was wanted; nothing is connected yet. Raises ``SettingError``."""
    options = options_from(wanted.conf)
    return KubernetesScheduler(kind_from(wanted.text, options), options)
