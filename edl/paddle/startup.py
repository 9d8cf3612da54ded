"""Checks and settings of Paddle for starting a worker. Called by name from ``edl.worker.frameworks``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from edl.paddle import stores

_TRUE = ("1", "t", "true", "y", "yes")


def why_unsafe() -> str:
    """Why a process that has imported paddle must not be forked; empty when it may."""
    import paddle

    if paddle.is_compiled_with_cuda() and os.path.exists("/dev/nvidiactl"):
        # Its import counts and initialises the devices, and CUDA does not survive a fork.
        return "this build of paddle initialises CUDA when it is imported"
    return ""


def before_script(imported_under: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Adapt Paddle's store to this worker, and apply flags that were set after the import. A second call does
    nothing."""
    import paddle
    from paddle.base import core

    _apply_flags(paddle, imported_under, environment)
    stores.adapt(core, environment)


def _apply_flags(paddle: Any, imported_under: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Apply ``FLAGS_*`` that differ from those at import, since Paddle reads them only when it is imported."""
    for name, value in environment.items():
        if name.startswith("FLAGS_") and imported_under.get(name) != value:
            # Variables of launchers begin with FLAGS_ as well, but are not flags of the library.
            with contextlib.suppress(ValueError, TypeError):
                kind = type(paddle.get_flags(name)[name])
                paddle.set_flags({name: value.lower() in _TRUE if kind is bool else kind(value)})
