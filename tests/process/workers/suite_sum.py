"""A function that a test of torch's launcher suite calls; apart from the others, since torch is imported for it."""

from __future__ import annotations

import torch
import torch.distributed as dist


def sum_of_ranks() -> int:
    """The same on all of them, by an all-reduce."""
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total.item())
