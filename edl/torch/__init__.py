"""edl for PyTorch scripts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl.torch.ddp import parallel as parallel
    from edl.torch.random_state import RandomState as RandomState
    from edl.torch.state import State as State
    from edl.torch.state import connect as connect
    from edl.torch.state import run as run
    from edl.worker.context import context as context

_PLACES = {
    "State": "edl.torch.state",
    "run": "edl.torch.state",
    "connect": "edl.torch.state",
    "context": "edl.worker.context",
    "parallel": "edl.torch.ddp",
    "RandomState": "edl.torch.random_state",
}

__all__ = ["RandomState", "State", "connect", "context", "parallel", "run"]


def __getattr__(name: str) -> Any:
    """The launcher's part, ``edl.torch.startup``, is imported without the rest, and so without torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value
