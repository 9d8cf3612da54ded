"""Functions that jobs started from Python call."""

from __future__ import annotations

import os
import threading


def place(base: int) -> tuple[int, int, int]:
    """Where this worker is, counted from a base, and its process."""
    return base + int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.getpid()


def fail_on(rank: int) -> None:
    """One rank fails, the others wait for ever."""
    if rank == int(os.environ["RANK"]):
        raise LookupError(f"rank {rank} found nothing")
    threading.Event().wait()
