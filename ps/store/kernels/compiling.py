"""Compiles all kernels into the directory given by ``ready``."""

from __future__ import annotations

from pathlib import Path

from ps.store.kernels import ready


def compile_all() -> Path | None:
    """Compile missing kernels in this process; processes on a machine take turns. Returns the directory; None if none
    is writable."""
    place = ready.folder()
    with ready.alone(place):
        if place is None or not (place / ready.MARK).exists():
            from ps.store.kernels import batches, fast  # importing compiles or loads most of it

            fast.warm()
            batches.warm()
            if place is not None:
                (place / ready.MARK).touch()
                ready.tidy(place)
    return place
