"""The table of all watchdogs, with their severities and limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from edl.rendezvous.phrases import amount
from edl.wire.severity import Severity


@dataclass(frozen=True, slots=True)
class Watchdog:
    """One watchdog: what it is called, how bad its alarm is, and its default limit."""

    name: str
    severity: Severity
    limit: float
    """Default limit in ``unit``."""
    unit: str
    """``bytes``, ``inodes``, ``s``, ``intervals``, ``worlds``, ``restarts``, ``members`` or ``of a step``."""
    meaning: str
    """When the alarm is raised, for the documentation; "this" is the limit."""


_W, _C = Severity.WARNING, Severity.CRITICAL
STRAGGLER = "straggler"
"""The watchdog that the Master itself is, since it compares the ranks."""
OFF = math.nan
"""The limit of a watchdog that is off."""

WATCHDOGS: tuple[Watchdog, ...] = (
    Watchdog("disk-space", _C, float(1 << 30), "bytes", "less than this is free in the directory"),
    Watchdog("disk-inodes", _C, 1000.0, "inodes", "fewer inodes than this are free in the directory"),
    Watchdog("disk-full-in", _W, 3600.0, "s", "at the rate of the last hour, the directory is full sooner than this"),
    Watchdog(
        "disk-write", _C, 30.0, "s", "a file cannot be written into the directory, or that takes longer than this"
    ),
    Watchdog(
        *("checkpoint-late", _W, 3.0, "intervals"),
        "no checkpoint was completed for this many times the usual interval of the job",
    ),
    Watchdog("checkpoint-age", _W, OFF, "s", "no checkpoint was completed for this long"),
    Watchdog("no-progress", _C, 3.0, "worlds", "this many worlds in a row failed before they made lasting progress"),
    Watchdog("restarts-left", _W, 1.0, "restarts", "restarts were used, and no more than this are left"),
    Watchdog("short-of-nodes", _W, 300.0, "s", "the world has had fewer nodes than were requested for this long"),
    Watchdog("waiting", _C, 300.0, "s", "the job has been waiting, not training, for this long"),
    Watchdog(
        *("store-members", _W, 1.0, "members"),
        "the embedded store has lost members, and may lose fewer than this more",
    ),
    Watchdog("store", _C, 30.0, "s", "the Master has not reached the store for this long"),
    Watchdog(
        *(STRAGGLER, _W, 0.2, "of a step"),
        "the other ranks wait for one rank for this share of each step, see [stragglers.md](stragglers.md)",
    ),
    Watchdog("blind", _W, 0.0, "s", "another watchdog cannot see what it watches"),
)
OUTSIDE_SEVERITY = Severity.CRITICAL
"""Severity of the watchdogs of ``edl watch``, whose limits are options of that command."""
BY_NAME: Mapping[str, Watchdog] = MappingProxyType({one.name: one for one in WATCHDOGS})


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """The limits of all watchdogs. ``changed``: those that differ from the defaults; ``OFF``: the watchdog is off."""

    changed: tuple[tuple[str, float], ...] = ()

    def of(self, name: str) -> float:
        """The limit of a watchdog. Raises ``KeyError`` for an unknown name."""
        return dict(self.changed).get(name, BY_NAME[name].limit)

    def on(self, name: str) -> bool:
        """Whether this watchdog is on."""
        return not math.isnan(self.of(name))


DEFAULT_LIMITS = WatchLimits()


def markdown() -> str:
    """The rows of the table in docs/notifications.md."""
    return "\n".join(f"| `{one.name}` | `{one.severity.value}` | {_limit(one)} | {one.meaning} |" for one in WATCHDOGS)


def _limit(one: Watchdog) -> str:
    if math.isnan(one.limit):
        return "off"
    if one.unit == "bytes":
        return amount(int(one.limit))
    unit = one.unit.removesuffix("s") if one.limit == 1 and one.unit != "s" else one.unit
    return f"{one.limit:g} {unit}" if one.limit else ""
