"""The input for creating an adapter: which scheduler the user wants, and what it may use of the launcher.

Each adapter module has two functions. ``check(wanted: SchedulerChoice) -> None`` runs on every launcher before anything
is started and raises ``SettingError`` for errors that can be detected then. ``make(deps: SchedulerDeps) -> Scheduler``
creates an adapter for one Master's term.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edl.config import NodeRange
from edl.errors import SettingError
from edl.job_records import SchedulerChoice
from edl.ports import Clock, Store
from edl.types import JobId

MOST_S = 86400.0


def seconds(conf: Mapping[str, str], key: str, default: float, least: float = 0.001) -> float:
    """A time from ``--scheduler-conf``, at most a day. Raises ``SettingError``."""
    text = conf.get(key, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not least <= value <= MOST_S:
        raise SettingError(f"--scheduler-conf {key}", text, f"must be from {least:g} to {MOST_S:g} seconds")
    return value


@dataclass(frozen=True, slots=True)
class SchedulerDeps:
    """Everything that an adapter may use."""

    wanted: SchedulerChoice
    job: JobId
    nodes: NodeRange
    """The job's bounds at its start."""
    node: str
    """The Master's node, where this launcher runs."""
    clock: Clock
    log: Callable[[str], None]
    launcher: tuple[str, ...]
    """Command line of an additional launcher of this job, complete except for ``--node-id`` and ``--node-index``; see
    ``with_options``."""
    environment: Mapping[str, str]
    """Environment for processes that the adapter starts: this launcher's own, without variables meant for this node
    only."""
    runtime_folder: Path
    """For small files that the next Master on this host has to find. May not exist yet."""
    log_folder: Path
    """Where launchers of this host write their logs. May not exist yet."""
    shutdown_s: float
    """Seconds that workers may take to end."""
    store: Store
    """The job's own store."""
    beside: Callable[[], Mapping[int, str]]
    """Launchers of this job that run on this host: pid to node name."""
    open_store: Callable[[Sequence[str]], Store]
    """Connects to another etcd, with the same credentials and time limits."""


def with_options(launcher: Sequence[str], *options: str) -> list[str]:
    """A launcher's command line with options, such as ``--node-id=n7``, inserted right after ``python -m
    edl.launch``."""
    return [*launcher[:3], *options, *launcher[3:]]
