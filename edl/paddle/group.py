"""The group that Paddle's tensors are exchanged over: the current round's ring."""

from __future__ import annotations

from edl.worker.ring import Ring

_current: Ring | None = None


def current() -> Ring | None:
    """The ring of the current round, connected or aborted; None for a process that was never given a place."""
    return _current


def use(ring: Ring | None) -> None:
    """From now on everything goes over this one."""
    global _current
    _current = ring


def size() -> int:
    """Ranks in the current round."""
    return 1 if _current is None else _current.world_size
