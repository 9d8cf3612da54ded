"""What the scripts of ``recut_job`` have in common: arguments, model, and the batch of a step, which has the same
samples in every world."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from benchmarks.scripts.sized_model import INPUTS, sized_model

GLOBAL_BATCH = 48
"""Divisible by the workers of 1 to 4 nodes with one or two each."""


def arguments() -> argparse.Namespace:
    """The command line of each script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workdir", type=Path, required=True, help="step logs")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause-ms", type=float, default=10.0, help="sleep per step")
    parser.add_argument("--megabytes", type=int, default=20, help="of parameters; Adam's state is twice as large")
    parser.add_argument("--layout", choices=("fsdp", "hsdp", "tp"), required=True)
    return parser.parse_args()


def model_of(megabytes: int) -> Any:
    """The model, not sharded yet."""
    return sized_model(megabytes)


def shard(model: Any, mesh: Any) -> torch.optim.Optimizer:
    """Shard each layer, and the model; returns its optimizer."""
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # A gradient that is 0 but for rounding must not become a step.
    return torch.optim.Adam(model.parameters(), lr=1e-4, eps=1e-5)


def loss_of(model: Any, step: int, part: int, parts: int) -> Any:
    """The mean loss of one of the equal parts of a step's samples."""
    rows = torch.randn(GLOBAL_BATCH, INPUTS, generator=torch.Generator().manual_seed(step))
    each = GLOBAL_BATCH // parts
    mine = rows[part * each : (part + 1) * each]
    return (model(mine) - mine.sum(dim=1, keepdim=True).sin()).square().mean()
