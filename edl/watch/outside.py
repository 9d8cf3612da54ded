"""Watchdogs for a job as it is seen from outside, by a program that does not share its fate."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from edl.rendezvous.phrases import duration
from edl.watch.readings import Reading, Sight, reading
from edl.wire.status import JobStatus

REACHABLE, RUNNING, PROGRESS = "job-reachable", "job-running", "job-progress"
_RUN = ("running", "suspended")
"""Phases of a job that trains, or is not meant to."""


@dataclass(frozen=True, slots=True)
class OutsideSnapshot:
    """A job at one moment, or why it could not be asked."""

    at_s: float
    silent: str = ""
    """Why no Master has answered; empty: one has, and the next fields are valid."""
    phase: str = ""
    reason: str = ""
    progress: Hashable = None
    """Changes whenever the job gets on; None: nothing is known that would."""


def snapshot_of(status: JobStatus, at_s: float) -> OutsideSnapshot:
    """The part of a status that tells whether a job gets on: checkpoints and data that was used."""
    counts = tuple((one.service, one.name, one.counts) for one in status.services if one.counts)
    known = bool(status.saved.commit or counts)
    return OutsideSnapshot(at_s, "", status.phase, status.reason, (status.saved, counts) if known else None)


@dataclass(frozen=True, slots=True)
class OutsideMemory:
    """What the detectors remember."""

    silent_since_s: float | None = None
    stopped_since_s: float | None = None
    progress: Hashable = None
    moved_s: float | None = None
    """When the progress last changed, or the job was not running; None: nothing is known that would change."""


def look(
    memory: OutsideMemory, seen: OutsideSnapshot, limit_s: float | None, grace_s: float
) -> tuple[OutsideMemory, tuple[Reading, ...]]:
    """The readings, and what to remember. ``limit_s``: for a job that does not run or does not get on; None: this look
    is the only one, which measures no time, so a job that does not run is reported at once. ``grace_s``: for one that
    does not answer, as while another Master is elected."""
    memory = _remember(memory, seen)
    silent_s = _since(memory.silent_since_s, seen.at_s)
    silent = ""
    if silent_s is not None and silent_s >= grace_s:
        silent = f"no Master has answered for {duration(silent_s)} (limit {duration(grace_s)}): {seen.silent}"
    first = reading(REACHABLE, silent)
    if seen.silent:
        blind = [Reading(name, "", Sight.BLIND, seen.silent) for name in (RUNNING, PROGRESS)]
        return memory, (first, *blind)
    if limit_s is None:
        stopped = "" if seen.phase in _RUN else f"{seen.phase}: {seen.reason}. See edl status"
        return memory, (first, reading(RUNNING, stopped), reading(PROGRESS, None))
    stopped_s, still_s = _since(memory.stopped_since_s, seen.at_s), _since(memory.moved_s, seen.at_s)
    stopped = still = ""
    if stopped_s is not None and stopped_s >= limit_s:
        stopped = f"{seen.phase} for {duration(stopped_s)} (limit {duration(limit_s)}): {seen.reason}. See edl status"
    if still_s is not None and still_s >= limit_s:
        still = (
            f"running, but no checkpoint was completed and no data used for {duration(still_s)} "
            f"(limit {duration(limit_s)}). See edl status and the workers' logs"
        )
    return memory, (first, reading(RUNNING, stopped), reading(PROGRESS, still))


def _remember(memory: OutsideMemory, seen: OutsideSnapshot) -> OutsideMemory:
    if seen.silent:
        begins_s = seen.at_s if memory.silent_since_s is None else memory.silent_since_s
        return replace(memory, silent_since_s=begins_s)
    running = seen.phase in _RUN
    moved = seen.phase != "running" or memory.moved_s is None or seen.progress != memory.progress
    stopped_s = seen.at_s if memory.stopped_since_s is None else memory.stopped_since_s
    return OutsideMemory(
        None,
        None if running else stopped_s,
        seen.progress,
        None if seen.progress is None else seen.at_s if moved else memory.moved_s,
    )


def _since(since_s: float | None, now_s: float) -> float | None:
    return None if since_s is None else now_s - since_s
