"""Counts the time that training waits for torch's own ``DataLoader``."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.data import dataloader

from edl.worker import session as sessions


def observe() -> None:
    """Count the waits of every loader of this process from now on. Idempotent."""
    iterator: Any = getattr(dataloader, "_BaseDataLoaderIter", None)
    original = getattr(iterator, "__next__", None)
    if original is None or getattr(original, "_edl_observed", False):
        return

    @functools.wraps(original)
    def following(self: Any) -> Any:
        session = sessions.opened()
        if session is None or not session.trains_here:
            return original(self)
        with session.fetching():
            return original(self)

    following._edl_observed = True  # type: ignore[attr-defined]
    iterator.__next__ = following
