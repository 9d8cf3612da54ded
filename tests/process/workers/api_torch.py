"""A function of torch's that a job started from Python calls."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def sum_of_ranks(folder: str) -> dict[str, Any]:
    """An all-reduce; in the first round rank 1 is killed after it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    mark = Path(folder) / "killed"
    if rank == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()
    return {"total": total, "round": int(os.environ["EDL_ROUND"])}
