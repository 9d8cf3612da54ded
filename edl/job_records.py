"""The parts of a job's specification that are not about workers: data sets, pservers, the scheduler.

They are in a module below ``edl.config``, so that ``JobSpec`` can contain them and the packages that act on them
(``ps``, ``data_service``, ``edl.schedulers``) import nothing else. Each record validates itself on construction.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from edl.errors import SettingError

MOST_SERVERS = 1000
"""Largest number of pservers of one job."""

MOST_WINDOWS = 1000
"""Largest number of windows that ``--straggler-windows`` accepts."""

# --- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DataFiles:
    """One data set of ``--data``: its files and how they are read."""

    name: str
    patterns: tuple[str, ...]
    """Absolute paths or URLs; they may contain wildcards."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The settings given after the patterns, such as ``shuffle`` and ``no``; ``data_service.loader.source`` reads
    them."""

    @property
    def text(self) -> str:
        """The data set as on the command line: ``train=/data/*.parquet;shuffle=no``."""
        return ";".join([f"{self.name}={','.join(self.patterns)}", *(f"{k}={v}" for k, v in self.settings.items())])


def environment_text(sets: Iterable[DataFiles]) -> str:
    """The value of ``EDL_DATA_SETS`` in a worker: a JSON object by name, with ``files`` and the settings; empty if
    there are no data sets."""
    found = {one.name: {"files": list(one.patterns), **one.settings} for one in sets}
    return json.dumps(found, sort_keys=True) if found else ""


# --- parameter servers -----------------------------------------------------------------------------------------------


class Mode(enum.Enum):
    """The way in which the trainers of a job with parameter servers synchronise."""

    SYNC = "sync"
    """The gradients of a step from all trainers of the membership epoch are averaged, then applied once."""
    ASYNC = "async"
    """Each push is applied when it arrives; no trainer gets more than ``staleness`` steps ahead of the slowest."""
    GEO = "geo"
    """Trainers train on local copies and push differences every ``geo_steps`` steps."""


class Replication(enum.Enum):
    """The condition on which a push is acknowledged."""

    SYNC = "sync"
    """Every replica in sync has it: losing one pserver loses no acknowledged push."""
    ASYNC = "async"
    """The owner has it; while replicas are more than ``lag_s`` behind, nothing is acknowledged."""
    NONE = "none"
    """There are no replicas: the rows of a dead pserver are restored from the last checkpoint."""


@dataclass(frozen=True, slots=True)
class Training:
    """How a job with parameter servers trains. Raises ``SettingError`` that names the option."""

    mode: Mode = Mode.ASYNC
    staleness: int = 0
    """Async: number of steps that a trainer may be ahead of the slowest one; 0: unlimited."""
    staleness_lr: bool = False
    """Async: divide the LR of a push by 1 + (pushes of others applied since its pull) / trainers."""
    geo_steps: int = 10
    """Geo: steps on local copies between two exchanges of differences."""
    replication: Replication = Replication.SYNC
    lag_s: float = 0.5
    """Async replication: seconds that a replica may be behind before acknowledgements wait for it."""
    servers: tuple[int, ...] = (1, 64)
    """Minimum and maximum number of pservers that hold buckets."""
    save_every_s: float = 0.0
    """Seconds between two checkpoints; 0: only on request."""

    def __post_init__(self) -> None:
        for name, number, least, most in (
            ("--staleness", self.staleness, 0, 1 << 30),
            ("--geo-steps", self.geo_steps, 1, 1 << 20),
        ):
            if not least <= number <= most:
                raise SettingError(name, number, f"must be from {least} to {most}")
        for name, seconds in (("--replication-lag", self.lag_s), ("--ps-save-every", self.save_every_s)):
            if not (seconds >= 0 and math.isfinite(seconds)):
                raise SettingError(name, seconds, "must be 0 or more, and finite")
        if len(self.servers) != 2 or not 1 <= self.servers[0] <= self.servers[1] <= MOST_SERVERS:
            shown = ":".join(map(str, self.servers))
            raise SettingError("--servers", shown, f"needs MIN:MAX with 1 <= MIN <= MAX <= {MOST_SERVERS}")


# --- stragglers ------------------------------------------------------------------------------------------------------


class StragglerMode(enum.Enum):
    """What the Master does about a rank that the others wait for."""

    OFF = "off"
    """It does not look for them."""
    REPORT = "report"
    """It raises an alarm."""
    EXCLUDE = "exclude"
    """It also drops the slot, if the job can do without it."""


@dataclass(frozen=True, slots=True)
class StragglerRules:
    """When a rank is a straggler. Raises ``SettingError`` that names the option."""

    mode: StragglerMode = StragglerMode.REPORT
    windows: int = 6
    """Number of windows in a row, of about 5 s each, that name a rank or clear it."""
    share: float = 0.2
    """Share of the step time that the others wait for it; the limit of the watchdog ``straggler``."""

    def __post_init__(self) -> None:
        if not 1 <= self.windows <= MOST_WINDOWS:
            raise SettingError("--straggler-windows", self.windows, f"must be from 1 to {MOST_WINDOWS}")


# --- scheduler -------------------------------------------------------------------------------------------------------


class SizeOwner(enum.Enum):
    """Who decides how many nodes the job has."""

    MASTER = "master"
    """The Master: it receives requests and asks the scheduler for nodes."""
    EXTERNAL = "external"
    """The users of the scheduler: the Master follows, and never asks for nodes."""


WITH_COLON = ("exec", "discovery", "custom")
"""Kinds of schedulers whose target follows a colon instead of a slash."""


@dataclass(frozen=True, slots=True)
class SchedulerChoice:
    """The parsed values of ``--scheduler``, ``--scheduler-conf`` and ``--scale-owner``."""

    kind: str
    """The word before ``/`` or ``:``, such as ``statefulset``."""
    target: str = ""
    """The name or the command after it."""
    conf: Mapping[str, str] = field(default_factory=dict)
    """Settings from ``--scheduler-conf``; only keys that this kind accepts."""
    owner: SizeOwner = SizeOwner.MASTER

    @property
    def text(self) -> str:
        """The scheduler as on the command line, for messages."""
        if not self.target:
            return self.kind
        return f"{self.kind}{':' if self.kind in WITH_COLON else '/'}{self.target}"


# --- health ----------------------------------------------------------------------------------------------------------


class HealthMode(enum.Enum):
    """When nodes are checked."""

    OFF = "off"
    JOIN = "join"
    """Before a node takes part for the first time."""
    FAILURE = "failure"
    """After a failure that looks like defective hardware."""
    BOTH = "both"

    @property
    def on_join(self) -> bool:
        """Whether new nodes are checked."""
        return self in (HealthMode.JOIN, HealthMode.BOTH)

    @property
    def on_failure(self) -> bool:
        """Whether nodes are checked after failures."""
        return self in (HealthMode.FAILURE, HealthMode.BOTH)


class SlowNodes(enum.Enum):
    """What happens to a node that a check finds slow."""

    REPORT = "report"
    EXCLUDE = "exclude"
    """It is kept out, provided that the job can do without it."""


LARGEST_PRODUCT = 1 << 16
"""Most rows of the matrices of a health check: at this size each has 16 GiB."""


@dataclass(frozen=True, slots=True)
class HealthRules:
    """When nodes are checked, how, and for how long the result holds."""

    mode: HealthMode = HealthMode.OFF
    timeout_s: float = 60.0
    """Seconds that one probe of a node may take; a check has one or two."""
    size: int = 2048
    """Rows of the matrices that are multiplied."""
    slow: SlowNodes = SlowNodes.REPORT
    factor: float = 2.0
    """A node is slow if it takes more than this many times as long as others of its kind."""
    expiry_s: float = 86400.0
    """Seconds after which a verdict no longer holds; 0: it holds as long as the launcher lives."""

    def __post_init__(self) -> None:
        if not 16 <= self.size <= LARGEST_PRODUCT:
            raise SettingError("--health-check-size", self.size, f"must be from 16 to {LARGEST_PRODUCT}")
        if not (self.factor > 1 and math.isfinite(self.factor)):
            raise SettingError(
                "--health-check-factor", f"{self.factor:g}", "must be more than 1, and finite", "Such as 2"
            )
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise SettingError("--health-check-timeout", f"{self.timeout_s:g}", "must be more than 0, and finite")
        if not (self.expiry_s >= 0 and math.isfinite(self.expiry_s)):
            raise SettingError(
                "--health-check-expiry", f"{self.expiry_s:g}", "must be 0 or more, and finite", "0: it never expires"
            )
