"""How a soak is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.soak.faults import Need
from benchmarks.soak.plan import Strike


@dataclass(frozen=True, slots=True)
class Options:
    """How a soak is run. Times in seconds."""

    seconds: float
    seed: int
    kinds: tuple[str, ...]
    faults: tuple[str, ...]
    out: Path
    every_s: float
    """Mean time between two faults, over all jobs."""
    job_s: float
    """How long faults go on in one job."""
    lease_s: float
    pause_s: float
    patience_s: float
    """How long a job may take to start, to recover, and to end."""
    at_once: int
    allowed: frozenset[Need]
    command: str
    clock_library: Path | None = None
    """For jobs with a node whose clock is moved."""
    replay: tuple[Strike, ...] = ()
