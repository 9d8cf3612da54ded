"""Typed parts of a job's specification about what it uses beside its workers: data sets, pservers, a scheduler.

They lie below ``edl.config`` so that ``JobSpec`` holds them nested and the packages that act on them (``ps``,
``data_service``, ``edl.schedulers``) need nothing else. Each refuses impossible values when it is made.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from edl.errors import SettingError

MOST_SERVERS = 1000
"""Pservers of one job."""

# --- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DataFiles:
    """One data set of ``--data``: where its files are and how they are read."""

    name: str
    patterns: tuple[str, ...]
    """Absolute paths or URLs, with wildcards."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """As written after the patterns, such as ``shuffle`` and ``no``; ``data_service.loader.source`` reads them."""

    @property
    def text(self) -> str:
        """As on the command line: ``train=/data/*.parquet;shuffle=no``."""
        return ";".join([f"{self.name}={','.join(self.patterns)}", *(f"{k}={v}" for k, v in self.settings.items())])


def environment_text(sets: Iterable[DataFiles]) -> str:
    """The value of ``EDL_DATA_SETS`` in a worker: JSON by name, with ``files`` and the settings; empty for no sets."""
    found = {one.name: {"files": list(one.patterns), **one.settings} for one in sets}
    return json.dumps(found, sort_keys=True) if found else ""


# --- parameter servers -----------------------------------------------------------------------------------------------


class Mode(enum.Enum):
    """How the trainers of a job with parameter servers synchronise."""

    SYNC = "sync"
    """A step's gradients of all trainers of the membership epoch are averaged, then applied once."""
    ASYNC = "async"
    """Each push is applied when it comes; no trainer gets more than ``staleness`` steps ahead of the slowest."""
    GEO = "geo"
    """Trainers train on local copies and push differences every ``geo_steps`` steps."""


class Replication(enum.Enum):
    """When a push is acknowledged."""

    SYNC = "sync"
    """When every replica in sync has it: no acknowledged push is lost with one pserver."""
    ASYNC = "async"
    """When the owner has it; while replicas are more than ``lag_s`` behind, nothing is acknowledged."""
    NONE = "none"
    """There are no replicas: a dead pserver's rows come back from the last checkpoint."""


@dataclass(frozen=True, slots=True)
class Training:
    """How a job with parameter servers trains. Raises ``SettingError`` that names the option."""

    mode: Mode = Mode.ASYNC
    staleness: int = 0
    """Async: steps that a trainer may be ahead of the slowest one; 0: any number."""
    staleness_lr: bool = False
    """Async: the LR of a push is divided by 1 + (pushes of others applied since its pull) / trainers."""
    geo_steps: int = 10
    replication: Replication = Replication.SYNC
    lag_s: float = 0.5
    """Async replication: a replica further behind than this holds acknowledgements up."""
    servers: tuple[int, ...] = (1, 64)
    """Least and most pservers that hold buckets."""
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


# --- scheduler -------------------------------------------------------------------------------------------------------


class SizeOwner(enum.Enum):
    """Who decides how many nodes there are."""

    MASTER = "master"
    """Requests come to the Master, which asks the scheduler."""
    EXTERNAL = "external"
    """Users of the scheduler decide; the Master follows, and never asks."""


WITH_COLON = ("exec", "discovery", "custom")
"""Kinds of schedulers whose target follows a colon."""


@dataclass(frozen=True, slots=True)
class SchedulerChoice:
    """``--scheduler``, ``--scheduler-conf`` and ``--scale-owner``, read."""

    kind: str
    """The word before ``/`` or ``:``, such as ``statefulset``."""
    target: str = ""
    """What follows it: a name, a command."""
    conf: Mapping[str, str] = field(default_factory=dict)
    """Only keys that the kind knows."""
    owner: SizeOwner = SizeOwner.MASTER

    @property
    def text(self) -> str:
        """As on the command line, for messages."""
        if not self.target:
            return self.kind
        return f"{self.kind}{':' if self.kind in WITH_COLON else '/'}{self.target}"
