"""What the scripts with trainers of other libraries have in common: arguments, data, and the step log."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.scripts.step_writer import StepWriter

BATCH = 16
CHECKPOINT_EVERY = 5


def arguments() -> argparse.Namespace:
    """The command line of each script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workdir", type=Path, required=True, help="step logs and checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause-ms", type=float, default=10.0, help="sleep per step")
    parser.add_argument("--checkpoint-every", type=int, default=CHECKPOINT_EVERY, help="steps between checkpoints")
    return parser.parse_args()


def net() -> nn.Module:
    """The model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))


def loader() -> DataLoader[Any]:
    """The train loader, with batches for one worker."""
    return DataLoader(TensorDataset(torch.randn(4096, 32)), batch_size=BATCH, shuffle=True)


class Log:
    """Writes the step log of a worker."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._writer = StepWriter(args.workdir)
        self._pause_s = args.pause_ms / 1000

    def world(self, rank: int, size: int) -> None:
        """A world begins; all its workers call this."""
        formed = torch.tensor([time.monotonic_ns()])
        torch.distributed.broadcast(formed, src=0)
        self._writer.group(rank, size, int(formed[0]))

    def step(self, step: int) -> None:
        """A step is complete."""
        self._writer.step(step)
        time.sleep(self._pause_s)
