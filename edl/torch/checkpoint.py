"""Reading checkpoints from Python, without a job."""

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
    """Read a checkpoint outside of any job: a folder of one, or a checkpoint directory, whose newest whole one it is.

    Returns what was kept, by the names in ``State``: of a model the ``state_dict()`` with whole tensors on the CPU,
    whatever the number of workers that wrote it, and plain values. ``into``: objects that take theirs instead, such as
    ``into={"model": model}``. ``worker``: whose values are taken of a sharded state where workers had different ones
    and they are no pieces of one tensor; without it that is an error. Every byte is checked; if an older checkpoint is
    read because newer ones are damaged, there is a warning. Raises ``CheckpointError``.
    """
    return whole.load_checkpoint(path, TorchArrays(), State, into, worker)
