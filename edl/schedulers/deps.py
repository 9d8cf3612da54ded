"""The input for creating an adapter: the user's choice, and what the adapter gets from the launcher.

Each adapter module has two functions. ``check(wanted: SchedulerChoice) -> None`` runs on every launcher before anything
is started, and raises ``SettingError`` for errors that can be detected then. ``make(deps: SchedulerDeps) -> Scheduler``
creates an adapter for one Master's term.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edl.config import NodeRange
from edl.errors import SettingError
from edl.job_records import SchedulerChoice
from edl.ports import Clock, Store
from edl.types import JobId

MOST_S = 86400.0
"""Limit on times in ``--scheduler-conf``: a day."""


def seconds(conf: Mapping[str, str], key: str, default: float, least: float = 0.001) -> float:
    """Parse a number of seconds in ``--scheduler-conf``, from ``least`` to ``MOST_S``. Raises ``SettingError``."""
    text = conf.get(key, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not least <= value <= MOST_S:
        raise SettingError(f"--scheduler-conf {key}", text, f"must be from {least:g} to {MOST_S:g} seconds")
    return value


class SchedulerMemory(Protocol):
    """Small values that this Master's adapter leaves for that of the next one; part of ``WatchedMaster``."""

    def kept(self, name: str) -> str:
        """The value that was stored under this name; empty: none."""
        ...

    async def keep(self, name: str, value: str) -> None:
        """Store a value until the job ends. Raises ``StoreError``."""
        ...


class NoMemory:
    """Remembers nothing; for adapters that no Master uses."""

    def kept(self, name: str) -> str:
        """See ``SchedulerMemory``."""
        return ""

    async def keep(self, name: str, value: str) -> None:
        """See ``SchedulerMemory``."""


NO_MEMORY = NoMemory()


@dataclass(frozen=True, slots=True)
class SchedulerDeps:
    """What an adapter gets from the launcher."""

    wanted: SchedulerChoice
    job: JobId
    nodes: NodeRange
    """The job's range of nodes as given at its start."""
    node: str
    """This launcher's node, which is the Master's."""
    clock: Clock
    log: Callable[[str], None]
    launcher: tuple[str, ...]
    """Command line of an additional launcher of this job, complete except for ``--node-id`` and ``--node-index``; see
    ``with_options``."""
    environment: Mapping[str, str]
    """Environment for processes that the adapter starts: this launcher's own, without variables meant for this node
    only."""
    runtime_folder: Path
    """Folder for small files that the next Master on this host must find. May not exist yet."""
    log_folder: Path
    """Folder for the logs of launchers that the adapter starts, on whichever host they run. May not exist yet."""
    shutdown_s: float
    """Seconds that workers may take to end (``--shutdown-timeout``)."""
    store: Store
    """The job's own store."""
    beside: Callable[[], Mapping[int, str]]
    """Returns the node ids of this job's launchers on this host, by process id."""
    open_store: Callable[[Sequence[str]], Store]
    """Connects to another etcd at these endpoints, with the same credentials and timeouts."""
    memory: SchedulerMemory = NO_MEMORY
    """That of this Master's term."""


def with_options(launcher: Sequence[str], *options: str) -> list[str]:
    """A launcher's command line with options, such as ``--node-id=n7``, inserted right after ``python -m
    edl.launch``."""
    return [*launcher[:3], *options, *launcher[3:]]
