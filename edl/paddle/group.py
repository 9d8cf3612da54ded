"""The group over which Paddle's tensors are exchanged: the current round's ring."""

from __future__ import annotations

from edl.worker.ring import Ring

_current: Ring | None = None


def current() -> Ring | None:
    """The ring of the current round, connected or aborted; None in a process that has not joined a world."""
    return _current


def use(ring: Ring | None) -> None:
    """Use this ring for all exchanges from now on."""
    global _current
    _current = ring


def size() -> int:
    """Number of ranks in the current round."""
    return 1 if _current is None else _current.world_size
