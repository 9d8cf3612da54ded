"""All kernels at once, compiled where ``ready`` keeps them."""

from __future__ import annotations

from pathlib import Path

from ps.store.kernels import ready


def compile_all() -> Path | None:
    """Compile what is missing, in this process; one at a time on a machine. Where it is; None: nowhere."""
    place = ready.folder()
    with ready.alone(place):
        if place is None or not (place / ready.MARK).exists():
            from ps.store.kernels import batches, fast  # compiles most of it, or loads it

            fast.warm()
            batches.warm()
            if place is not None:
                (place / ready.MARK).touch()
                ready.tidy(place)
    return place
