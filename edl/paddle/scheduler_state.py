"""The state of Paddle's learning rate schedulers, with the counters that their own ``state_dict`` lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddle.optimizer.lr import CosineAnnealingWarmRestarts

_COUNTERS: tuple[tuple[type, tuple[str, ...]], ...] = ((CosineAnnealingWarmRestarts, ("T_cur", "T_i")),)
"""By kind: counters that Paddle 3.3 neither saves nor loads, so that the rate would go on as from the beginning."""
_ADDED = "edl_counters"


def capture(scheduler: Any) -> dict[str, Any]:
    """``state_dict()``, and the counters."""
    counters = {name: getattr(scheduler, name) for name in _counters(scheduler)}
    state = dict(scheduler.state_dict())
    return {**state, _ADDED: counters} if counters else state


def load(scheduler: Any, state: Mapping[str, Any]) -> None:
    """The inverse of ``capture``. A checkpoint of an earlier version has no counters, and leaves them as they are."""
    scheduler.set_state_dict({key: part for key, part in state.items() if key != _ADDED})
    counters = state.get(_ADDED, {})
    for name in _counters(scheduler):
        if name in counters:
            setattr(scheduler, name, counters[name])


def _counters(scheduler: Any) -> list[str]:
    return [name for kind, names in _COUNTERS if isinstance(scheduler, kind) for name in names]
