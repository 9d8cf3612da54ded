"""edl for PaddlePaddle scripts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl.paddle.comm import all_gather as all_gather
    from edl.paddle.comm import all_reduce as all_reduce
    from edl.paddle.comm import barrier as barrier
    from edl.paddle.comm import broadcast as broadcast
    from edl.paddle.ddp import parallel as parallel
    from edl.paddle.random_state import RandomState as RandomState
    from edl.paddle.state import State as State
    from edl.paddle.state import run as run
    from edl.worker.context import context as context

_PLACES = {
    "State": "edl.paddle.state",
    "run": "edl.paddle.state",
    "context": "edl.worker.context",
    "parallel": "edl.paddle.ddp",
    "RandomState": "edl.paddle.random_state",
    "all_reduce": "edl.paddle.comm",
    "broadcast": "edl.paddle.comm",
    "all_gather": "edl.paddle.comm",
    "barrier": "edl.paddle.comm",
}

__all__ = [
    "RandomState", "State", "all_gather", "all_reduce", "barrier", "broadcast", "context", "parallel", "run",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The launcher's part, ``edl.paddle.startup``, is imported without the rest, and so without paddle."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value
