"""Watchdogs for one directory: free space, free inodes, the time until it is full, and whether it can be written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edl.rendezvous.phrases import amount, duration
from edl.watch.readings import Reading, Sight, reading
from edl.watch.table import WatchLimits

WINDOW_S = 3600.0
"""Seconds of history from which the growth is computed."""
SHORTEST_SPAN_S = 600.0
"""Seconds of history below which the growth is unknown: one checkpoint in two minutes is no trend."""
SPACING_S = 60.0
"""Seconds between two remembered values."""


@dataclass(frozen=True, slots=True)
class DirectorySample:
    """One directory at one moment."""

    about: str
    """The directory, for people: ``checkpoint directory /data/run7``."""
    at_s: float
    """Time on the launcher's clock."""
    shared: bool = False
    """Whether other nodes use the same file system under the same name."""
    error: str = ""
    """Why the file system could not be asked for its free space; empty: it could, and the next fields are valid."""
    free_bytes: int = 0
    total_bytes: int = 0
    free_inodes: int = 0
    total_inodes: int = 0
    """0: this file system does not count them."""
    write_error: str = ""
    """Why a small file could not be written, made durable and removed; empty: it could."""
    write_s: float = 0.0
    """Seconds that this took, or has been taking so far."""
    checkpoint_bytes: int = 0
    """Size of the last checkpoint that this node has written here; 0: unknown."""
    checkpoint_every_s: float = 0.0
    """Seconds between its last two checkpoints; 0: unknown."""


@dataclass(frozen=True, slots=True)
class DiskMemory:
    """What the detectors remember of one directory."""

    used: tuple[tuple[float, int], ...] = ()
    """Times, and bytes in use, oldest first; at most ``WINDOW_S`` back."""


def look(memory: DiskMemory, sample: DirectorySample, limits: WatchLimits) -> tuple[DiskMemory, tuple[Reading, ...]]:
    """The readings of all watchdogs that are on, and what to remember."""
    if not sample.error:
        memory = _remember(memory, sample)
    return memory, tuple(_readings(memory, sample, limits))


def _remember(memory: DiskMemory, sample: DirectorySample) -> DiskMemory:
    kept = [one for one in memory.used if one[0] >= sample.at_s - WINDOW_S]
    if not kept or sample.at_s - kept[-1][0] >= SPACING_S:
        kept.append((sample.at_s, sample.total_bytes - sample.free_bytes))
    return DiskMemory(tuple(kept))


def _readings(memory: DiskMemory, sample: DirectorySample, limits: WatchLimits) -> Iterator[Reading]:
    for name, check in _CHECKS.items():
        if not limits.on(name):
            continue
        if sample.error and name != "disk-write":
            yield Reading(name, sample.about, Sight.BLIND, sample.error)
        else:
            # Only one node may have lost the way to a shared file system, so a failed write is never shared.
            shared = sample.shared and name != "disk-write"
            yield reading(name, check(memory, sample, limits.of(name)), sample.about, shared=shared)


def _space(memory: DiskMemory, sample: DirectorySample, limit: float) -> str:
    free, needed = sample.free_bytes, sample.checkpoint_bytes
    if free < limit:
        return (
            f"{amount(free)} free of {amount(sample.total_bytes)}, below the limit of {amount(int(limit))}. Free some "
            f"space, or keep fewer checkpoints (--checkpoint-keep)"
        )
    if free < needed:
        return (
            f"{amount(free)} free, and the last checkpoint took {amount(needed)}: the next one does not fit. Free some "
            f"space, or keep fewer checkpoints (--checkpoint-keep)"
        )
    return ""


def _inodes(memory: DiskMemory, sample: DirectorySample, limit: float) -> str:
    if not sample.total_inodes or sample.free_inodes >= limit:
        return ""
    return (
        f"{sample.free_inodes} inodes free of {sample.total_inodes}, below the limit of {limit:.0f}. Remove small "
        f"files: no more files can be created soon, however much space is free"
    )


def _full_in(memory: DiskMemory, sample: DirectorySample, limit: float) -> str:
    grows = growth(memory, sample)
    left_s = sample.free_bytes / grows if grows > 0 else float("inf")
    if left_s >= limit:
        return ""
    return (
        f"full in {duration(left_s)} ({amount(sample.free_bytes)} free, {amount(int(grows * 3600))} more per hour), "
        f"below the limit of {duration(limit)}. Free some space, or write less often"
    )


def growth(memory: DiskMemory, sample: DirectorySample) -> float:
    """Bytes per second by which the use grows, as measured; while that is unknown, as if no checkpoint were ever
    removed. 0: unknown."""
    if memory.used:
        since_s, before = memory.used[0]
        span_s = sample.at_s - since_s
        if span_s >= SHORTEST_SPAN_S:
            return (sample.total_bytes - sample.free_bytes - before) / span_s
    return sample.checkpoint_bytes / sample.checkpoint_every_s if sample.checkpoint_every_s > 0 else 0.0


def _write(memory: DiskMemory, sample: DirectorySample, limit: float) -> str:
    if sample.write_error:
        return f"cannot write: {sample.write_error}. Check its quota, its permissions, and that it is mounted writable"
    if sample.write_s > limit:
        took = duration(sample.write_s)
        return f"writing a small file takes {took}, above the limit of {duration(limit)}. Check its server"
    return ""


_CHECKS: dict[str, Callable[[DiskMemory, DirectorySample, float], str]] = {
    "disk-space": _space,
    "disk-inodes": _inodes,
    "disk-full-in": _full_in,
    "disk-write": _write,
}
"""For each watchdog a function of memory, sample and limit that returns the text of its alarm; empty: all is well."""
NAMES = tuple(_CHECKS)
"""The watchdogs for directories."""
