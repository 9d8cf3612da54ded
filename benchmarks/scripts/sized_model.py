"""The model of the recovery benchmarks: a tiny MLP, or one whose parameters take a given number of megabytes."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 1024
"""Of the hidden layers of a model of a given size: 4 MiB each."""
INPUTS = 32


def sized_model(megabytes: int) -> nn.Module:
    """``megabytes=0``: 32 to 64 to 1."""
    torch.manual_seed(0)
    if not megabytes:
        return nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, 1))
    layers = max(1, round(megabytes * 1e6 / (4 * WIDTH * WIDTH)))
    hidden = [layer for _ in range(layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, 1))


def shapes(megabytes: int) -> dict[str, tuple[int, ...]]:
    """The shapes of its parameters, by name."""
    with torch.device("meta"):
        return {name: tuple(one.shape) for name, one in sized_model(megabytes).named_parameters()}
