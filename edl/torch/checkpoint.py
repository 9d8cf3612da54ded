"""Reads checkpoints from Python, without a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from edl.checkpoint.reading import whole
from edl.torch.arrays import TorchArrays
from edl.torch.state import State


def load_checkpoint(
    path: str | os.PathLike[str], *, into: Mapping[str, Any] | None = None, worker: int | None = None
) -> dict[str, Any]:
    """Read a checkpoint outside of a job. ``path``: one checkpoint's folder, or a checkpoint directory, whose newest
    complete checkpoint is read.

    Returns the saved objects by their names in ``State``: for a model its ``state_dict()`` with whole tensors on the
    CPU, regardless of the number of workers that wrote it; and plain values. ``into``: objects that are restored from
    the checkpoint instead, such as ``into={"model": model}``. ``worker``: in a sharded state, the worker whose values
    to return where workers had different values that are not parts of one tensor; without it that is an error. Every
    byte is verified. If an older checkpoint is read because newer ones are damaged, a warning is issued. Raises
    ``CheckpointError``.
    """
    return whole.load_checkpoint(path, TorchArrays(), State, into, worker)
