"""The public names of edl for PyTorch scripts, imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl.arithmetic.adascale import AdaScale as AdaScale
    from edl.torch.accumulation import accumulate as accumulate
    from edl.torch.checkpoint import load_checkpoint as load_checkpoint
    from edl.torch.data import Data as Data
    from edl.torch.ddp import parallel as parallel
    from edl.torch.device_mesh import mesh as mesh
    from edl.torch.loader import DataLoader as DataLoader
    from edl.torch.loader import shard_iterable as shard_iterable
    from edl.torch.lr import scale_lr as scale_lr
    from edl.torch.outer import DiLoCo as DiLoCo
    from edl.torch.outer import LocalSGD as LocalSGD
    from edl.torch.random_state import RandomState as RandomState
    from edl.torch.sampler import EDLBatchSampler as EDLBatchSampler
    from edl.torch.sampler import EDLDistributedSampler as EDLDistributedSampler
    from edl.torch.state import State as State
    from edl.torch.state import connect as connect
    from edl.torch.state import run as run
    from edl.worker.context import context as context
    from edl.worker.hyper import settings as settings

_PLACES = {
    "Data": "edl.torch.data",
    "load_checkpoint": "edl.torch.checkpoint",
    "AdaScale": "edl.arithmetic.adascale",
    "accumulate": "edl.torch.accumulation",
    "scale_lr": "edl.torch.lr",
    "State": "edl.torch.state",
    "run": "edl.torch.state",
    "connect": "edl.torch.state",
    "context": "edl.worker.context",
    "settings": "edl.worker.hyper",
    "mesh": "edl.torch.device_mesh",
    "parallel": "edl.torch.ddp",
    "DiLoCo": "edl.torch.outer",
    "LocalSGD": "edl.torch.outer",
    "RandomState": "edl.torch.random_state",
    "EDLBatchSampler": "edl.torch.sampler",
    "EDLDistributedSampler": "edl.torch.sampler",
    "DataLoader": "edl.torch.loader",
    "shard_iterable": "edl.torch.loader",
}

__all__ = [
    "AdaScale",
    "Data",
    "DataLoader",
    "DiLoCo",
    "EDLBatchSampler",
    "EDLDistributedSampler",
    "LocalSGD",
    "RandomState",
    "State",
    "accumulate",
    "connect",
    "context",
    "load_checkpoint",
    "mesh",
    "parallel",
    "run",
    "scale_lr",
    "settings",
    "shard_iterable",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is used, so that the launcher can import ``edl.torch.startup`` without torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value
