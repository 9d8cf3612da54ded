"""The model of the recovery benchmarks: a tiny MLP, or one whose parameters take a given number of megabytes."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.common.model_sizes import INPUTS, WIDTH, layers

__all__ = ["INPUTS", "WIDTH", "sized_model"]


def sized_model(megabytes: int) -> nn.Module:
    """``megabytes=0``: 32 to 64 to 1."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for inputs, outputs in layers(megabytes):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*parts[:-1])
