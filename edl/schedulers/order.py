"""What an adapter is told when it is made: which scheduler the user means, and what of the launcher it may need.

Each module of an adapter has two functions: ``check(wanted: SchedulerChoice) -> None`` raises ``SettingError`` for what
can be seen to be wrong before anything is started, on every launcher; ``make(order: Order) -> Scheduler`` makes one for
the time that one Master rules.
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
    """A time among ``--scheduler-conf``, at most a day. Raises ``SettingError``."""
    text = conf.get(key, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not least <= value <= MOST_S:
        raise SettingError(f"--scheduler-conf {key}", text, f"must be from {least:g} to {MOST_S:g} seconds")
    return value


@dataclass(frozen=True, slots=True)
class Order:
    """Everything that an adapter may use."""

    wanted: SchedulerChoice
    job: JobId
    nodes: NodeRange
    """The job's bounds, as it began with them."""
    node: str
    """The node whose launcher this is: the Master's."""
    clock: Clock
    log: Callable[[str], None]
    launcher: tuple[str, ...]
    """Command line of one more launcher of this job, complete but for ``--node-id`` and ``--node-index``; see
    ``with_options``."""
    environment: Mapping[str, str]
    """For processes that it starts: this launcher's own, without what is meant for this node alone."""
    runtime_folder: Path
    """For small files that have to be found again by the next Master on this host. May not exist yet."""
    log_folder: Path
    """Where launchers of this host write. May not exist yet."""
    shutdown_s: float
    """How long workers may take to end."""
    store: Store
    """The job's own."""
    beside: Callable[[], Mapping[int, str]]
    """Launchers of this job that run on this host: process and node."""
    open_store: Callable[[Sequence[str]], Store]
    """Another etcd, with the same credentials and time limits."""


def with_options(launcher: Sequence[str], *options: str) -> list[str]:
    """A launcher's command line with more options, such as ``--node-id=n7``: right after ``python -m edl.launch``."""
    return [*launcher[:3], *options, *launcher[3:]]
