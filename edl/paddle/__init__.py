"""The public names of edl for PaddlePaddle scripts, imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl.arithmetic.adascale import AdaScale as AdaScale
    from edl.paddle.accumulation import accumulate as accumulate
    from edl.paddle.checkpoint import load_checkpoint as load_checkpoint
    from edl.paddle.comm import all_gather as all_gather
    from edl.paddle.comm import all_reduce as all_reduce
    from edl.paddle.comm import barrier as barrier
    from edl.paddle.comm import broadcast as broadcast
    from edl.paddle.data import Data as Data
    from edl.paddle.ddp import parallel as parallel
    from edl.paddle.loader import DataLoader as DataLoader
    from edl.paddle.loader import shard_iterable as shard_iterable
    from edl.paddle.lr import scale_lr as scale_lr
    from edl.paddle.outer import DiLoCo as DiLoCo
    from edl.paddle.outer import LocalSGD as LocalSGD
    from edl.paddle.random_state import RandomState as RandomState
    from edl.paddle.sampler import EDLBatchSampler as EDLBatchSampler
    from edl.paddle.sampler import EDLDistributedSampler as EDLDistributedSampler
    from edl.paddle.sharding import group_sharded_parallel as group_sharded_parallel
    from edl.paddle.state import State as State
    from edl.paddle.state import run as run
    from edl.worker.context import context as context
    from edl.worker.hyper import settings as settings

_PLACES = {
    "Data": "edl.paddle.data",
    "load_checkpoint": "edl.paddle.checkpoint",
    "AdaScale": "edl.arithmetic.adascale",
    "accumulate": "edl.paddle.accumulation",
    "scale_lr": "edl.paddle.lr",
    "State": "edl.paddle.state",
    "run": "edl.paddle.state",
    "context": "edl.worker.context",
    "settings": "edl.worker.hyper",
    "parallel": "edl.paddle.ddp",
    "group_sharded_parallel": "edl.paddle.sharding",
    "DiLoCo": "edl.paddle.outer",
    "LocalSGD": "edl.paddle.outer",
    "RandomState": "edl.paddle.random_state",
    "EDLBatchSampler": "edl.paddle.sampler",
    "EDLDistributedSampler": "edl.paddle.sampler",
    "DataLoader": "edl.paddle.loader",
    "shard_iterable": "edl.paddle.loader",
    "all_reduce": "edl.paddle.comm",
    "broadcast": "edl.paddle.comm",
    "all_gather": "edl.paddle.comm",
    "barrier": "edl.paddle.comm",
}

__all__ = [
    "AdaScale", "Data", "DataLoader", "DiLoCo", "EDLBatchSampler", "EDLDistributedSampler", "LocalSGD", "RandomState",
    "State", "accumulate", "all_gather", "all_reduce", "barrier", "broadcast", "context", "group_sharded_parallel",
    "load_checkpoint", "parallel", "run", "scale_lr", "settings", "shard_iterable",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name when it is used, so that the launcher can import ``edl.paddle.startup`` without paddle."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value
