"""Reads checkpoints from Python, without a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from edl.checkpoint.reading import whole
from edl.paddle.framework import FRAMEWORK
from edl.paddle.state import State


def load_checkpoint(path: str | os.PathLike[str], *, into: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a checkpoint outside of a job. ``path``: one checkpoint's folder, or a checkpoint directory, whose newest
    complete checkpoint is read.

    Returns the saved objects by their names in ``State``: for a layer its ``state_dict()`` with tensors on the CPU; and
    plain values. ``into``: objects that are restored from the checkpoint instead, such as ``into={"model": model}``.
    Every byte is verified. If an older checkpoint is read because newer ones are damaged, a warning is issued. Raises
    ``CheckpointError``.
    """
    return whole.load_checkpoint(path, FRAMEWORK.arrays, State, into, None)
