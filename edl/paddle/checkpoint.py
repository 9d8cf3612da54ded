"""Reading checkpoints from Python, without a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from edl.checkpoint.reading import whole
from edl.paddle.framework import FRAMEWORK
from edl.paddle.state import State


def load_checkpoint(path: str | os.PathLike[str], *, into: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a checkpoint outside of any job: a folder of one, or a checkpoint directory, whose newest whole one it is.

    Returns what was kept, by the names in ``State``: of a layer the ``state_dict()`` with tensors on the CPU, and plain
    values. ``into``: objects that take theirs instead, such as ``into={"model": model}``. Every byte is checked; an
    older checkpoint that is read because newer ones are damaged is warned of. Raises ``CheckpointError``.
    """
    return whole.load_checkpoint(path, FRAMEWORK.arrays, State, into, None)
