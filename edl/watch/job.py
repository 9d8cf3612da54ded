"""Watchdogs for a job as a whole, as the Master sees it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from edl.rendezvous.phrases import count, duration
from edl.watch.readings import Reading, reading
from edl.watch.table import WatchLimits
from edl.wire.records import NO_STATE, Version
from edl.wire.status import JobStatus

INTERVALS = 5
"""Number of intervals between checkpoints that are remembered."""
LEAST_INTERVALS = 2
"""Number of intervals after which a job has a usual one."""
PLAIN_S = 600.0
"""A world whose script does not use edl.State has made progress if it ran this many seconds."""


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """A job at one moment."""

    at_s: float
    """Time on the Master's clock."""
    phase: str
    """``forming``, ``running``, ``suspended`` or ``ended``."""
    reason: str
    round: int
    members: int
    """Nodes in the running world."""
    requested: int
    """Nodes that were requested with ``edl scale``; 0: none were."""
    restored: Version
    """The commit from which the world started."""
    saved: Version
    """The newest complete checkpoint."""
    underway: bool
    """Whether the workers of the world use edl.State, and train."""
    restarts_used: int
    restarts_allowed: int
    store_total: int
    """Members of the embedded store; 0: the store is not embedded."""
    store_up: int
    """Members whose launcher is alive."""
    store_trouble: str = ""
    """Why the Master cannot write to the store; empty: it can."""


def snapshot_of(status: JobStatus, at_s: float, store_trouble: str = "") -> JobSnapshot:
    """The part of a status that the watchdogs need."""
    members = [node.members for node in status.nodes if node.members]
    inside = [node for node in status.nodes if node.position >= 0]
    return JobSnapshot(
        at_s,
        status.phase,
        status.reason,
        status.round,
        len(inside) if status.phase == "running" else 0,
        status.scale.asked,
        status.restored,
        status.saved,
        bool(inside) and all(node.underway for node in inside),
        status.restarts_used,
        status.restarts_allowed,
        max(members, default=0),
        len(members),
        store_trouble,
    )


@dataclass(frozen=True, slots=True)
class JobMemory:
    """What the detectors remember of a job. A new Master begins without."""

    at_s: float | None = None
    """Time of the last snapshot; None: there was none."""
    running: bool = False
    """Whether a world ran then."""
    saved: Version = NO_STATE
    aged_s: float = 0.0
    """Seconds of training since a checkpoint was last completed, as far as this Master has seen."""
    intervals_s: tuple[float, ...] = ()
    """Seconds of training between the last checkpoints."""
    round: int = 0
    restored: Version = NO_STATE
    restarts: int = 0
    """Restarts used when the round began."""
    ran_s: float = 0.0
    """Seconds that the world of this round has run."""
    completed: bool = False
    """Whether a checkpoint was completed since the first snapshot."""
    progressed: bool = False
    """Whether lasting progress was seen since the first snapshot."""
    uses_state: bool = False
    """Whether a world of this job was seen underway."""
    futile: int = 0
    """Worlds in a row that failed without lasting progress."""
    short_since_s: float | None = None
    waiting_since_s: float | None = None
    trouble_since_s: float | None = None


def look(memory: JobMemory, seen: JobSnapshot, limits: WatchLimits) -> tuple[JobMemory, tuple[Reading, ...]]:
    """The readings of all watchdogs that are on, and what to remember."""
    memory = _remember(memory, seen)
    texts = {name: check(memory, seen, limits.of(name)) for name, check in _CHECKS.items() if limits.on(name)}
    return memory, tuple(reading(name, text) for name, text in texts.items())


def _remember(memory: JobMemory, seen: JobSnapshot) -> JobMemory:
    running = seen.phase == "running"
    passed_s = max(0.0, seen.at_s - memory.at_s) if memory.at_s is not None and memory.running else 0.0
    memory = replace(memory, aged_s=memory.aged_s + passed_s, ran_s=memory.ran_s + passed_s)
    memory = _new_round(memory, seen)
    memory = _new_checkpoint(memory, seen)
    plain = not memory.uses_state and memory.ran_s >= PLAIN_S
    short = running and 0 < seen.members < seen.requested
    return replace(
        memory,
        at_s=seen.at_s,
        running=running,
        uses_state=memory.uses_state or (running and seen.underway),
        futile=0 if plain else memory.futile,
        progressed=memory.progressed or plain,
        short_since_s=_since(memory.short_since_s, short, seen.at_s),
        waiting_since_s=_since(memory.waiting_since_s, seen.phase == "forming", seen.at_s),
        trouble_since_s=_since(memory.trouble_since_s, bool(seen.store_trouble), seen.at_s),
    )


def _since(before_s: float | None, holds: bool, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if before_s is None else before_s


def _new_round(memory: JobMemory, seen: JobSnapshot) -> JobMemory:
    """Judge the last world when there is another one: a world that has cost a restart was futile if the next one begins
    where it began."""
    if seen.round == memory.round:
        return memory
    failed = seen.restarts_used - memory.restarts if memory.round else 0
    progress = seen.restored > memory.restored or (not memory.uses_state and memory.ran_s >= PLAIN_S)
    futile = 0 if progress else memory.futile + max(0, failed)
    return replace(
        memory,
        round=seen.round,
        restored=seen.restored,
        restarts=seen.restarts_used,
        ran_s=0.0,
        futile=futile,
        progressed=memory.progressed or (progress and memory.at_s is not None),
    )


def _new_checkpoint(memory: JobMemory, seen: JobSnapshot) -> JobMemory:
    if seen.saved <= memory.saved:  # an older one: the node that knew the newest is gone
        return memory
    # The age of the first checkpoint that this Master learns of is unknown, so it ends no interval.
    known = (*memory.intervals_s, memory.aged_s) if memory.saved != NO_STATE else memory.intervals_s
    memory = replace(memory, saved=seen.saved, aged_s=0.0, intervals_s=known[-INTERVALS:], futile=0)
    # Before a world was seen underway, it is the nodes that tell a new Master of an old checkpoint.
    return replace(memory, completed=True, progressed=True) if memory.uses_state else memory


def _late(memory: JobMemory, seen: JobSnapshot, limit: float) -> str | None:
    if len(memory.intervals_s) < LEAST_INTERVALS:
        return "" if memory.completed else None
    usual_s = statistics.median(memory.intervals_s)
    if usual_s <= 0 or memory.aged_s <= limit * usual_s:
        return ""
    if seen.phase != "running":
        return None
    return (
        f"no checkpoint for {duration(memory.aged_s)} of training; the usual interval is {duration(usual_s)}, "
        f"the limit {limit:g} times that. Look for failed writes in edl events, or run: edl checkpoint"
    )


def _age(memory: JobMemory, seen: JobSnapshot, limit: float) -> str | None:
    if memory.aged_s <= limit:
        return "" if memory.completed else None
    if seen.phase != "running":
        return None
    newest = f"the newest is commit {seen.saved.commit}" if seen.saved.commit else "there is none"
    return (
        f"no checkpoint for {duration(memory.aged_s)} of training ({newest}), above the limit of {duration(limit)}. "
        f"Look for failed writes in edl events, or run: edl checkpoint"
    )


def _futile(memory: JobMemory, seen: JobSnapshot, limit: float) -> str | None:
    if seen.phase == "ended":
        return ""
    if memory.futile < limit:
        return "" if memory.progressed else None
    if memory.uses_state:
        begins = f"commit {seen.restored.commit}" if seen.restored.commit else "the beginning"
        what = f"failed without progress (limit {limit:.0f}); each began again from {begins}"
    else:  # nobody knows from where
        what = f"failed within {duration(PLAIN_S)} (limit {limit:.0f})"
    return f"{count(memory.futile, 'world')} in a row {what}. Read the failures in edl status"


def _budget(memory: JobMemory, seen: JobSnapshot, limit: float) -> str:
    left = seen.restarts_allowed - seen.restarts_used
    if not seen.restarts_used or left > limit or seen.phase == "ended":
        return ""
    return (
        f"{left} of {count(seen.restarts_allowed, 'restart')} left (limit {limit:.0f}); after that, the next failure "
        f"ends the job. Read the failures in edl status"
    )


def _short(memory: JobMemory, seen: JobSnapshot, limit: float) -> str | None:
    since_s = memory.short_since_s
    if since_s is None:
        return None if seen.phase == "forming" and seen.requested else ""
    if seen.at_s - since_s < limit:
        return None
    return (
        f"{count(seen.members)} in training for {duration(seen.at_s - since_s)}, {seen.requested} were requested "
        f"(limit {duration(limit)}). Start more launchers, or request fewer: edl scale"
    )


def _waiting(memory: JobMemory, seen: JobSnapshot, limit: float) -> str | None:
    since_s = memory.waiting_since_s
    if since_s is None:
        return ""
    if seen.at_s - since_s < limit:
        return None
    return f"not training for {duration(seen.at_s - since_s)} (limit {duration(limit)}): {seen.reason}. See edl status"


def _members(memory: JobMemory, seen: JobSnapshot, limit: float) -> str | None:
    if seen.phase == "forming" and not seen.round and seen.store_up < seen.store_total:
        return None  # they may not have started yet
    total, up = seen.store_total, seen.store_up
    spare = up - (total // 2 + 1)
    if up >= total or spare >= limit:
        return ""
    return (
        f"{up} of {count(total, 'member')} of the store are up, {max(0, spare)} more may be lost (limit {limit:.0f}). "
        f"Start the launchers of the missing members again"
    )


def _trouble(memory: JobMemory, seen: JobSnapshot, limit: float) -> str:
    since_s = memory.trouble_since_s
    if since_s is None or seen.at_s - since_s < limit:
        return ""
    return (
        f"the Master has not reached the store for {duration(seen.at_s - since_s)} (limit {duration(limit)}): "
        f"{seen.store_trouble}. Training continues, but no change of the world is possible"
    )


_CHECKS: dict[str, Callable[[JobMemory, JobSnapshot, float], str | None]] = {
    "checkpoint-late": _late,
    "checkpoint-age": _age,
    "no-progress": _futile,
    "restarts-left": _budget,
    "short-of-nodes": _short,
    "waiting": _waiting,
    "store-members": _members,
    "store": _trouble,
}
"""For each watchdog a function of memory, snapshot and limit that returns the text of its alarm; empty: all is well;
None: not known, because this Master has not watched for long enough, or because no world runs."""

NAMES = tuple(_CHECKS)
"""The watchdogs for a job."""
