"""The model that all torch scripts of the soak train.

A global batch depends on the step alone, so each world size gives the same losses, but for the order of additions,
which does not show in double precision.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.scripts.soak_parts import BATCH, FEATURES, StepLog, last_step

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model with its optimizer; the same at each call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, 1))
    return model, optimizer_of(model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum: part of the state is the optimizer's."""
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def batch(step: int) -> torch.Tensor:
    """The global batch of a step, counted from 0."""
    return torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(step))


def loss_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """The loss for some rows."""
    loss: torch.Tensor = ((model(rows) - rows.sum(1, keepdim=True)) ** 2).mean()
    return loss


def whole_loss(model: Any, step: int) -> float:
    """The loss for a whole global batch: the same on all ranks."""
    with torch.no_grad():
        return float(loss_of(model, batch(step)))


def advance(model: Any, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    """One step."""
    optimizer.zero_grad()
    loss_of(model, rows).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def undisturbed(steps: int) -> Iterator[float]:
    """The losses of a training by one process."""
    model, optimizer = build()
    for step in range(steps):
        yield whole_loss(model, step)
        advance(model, optimizer, batch(step))


def train_from(state: Any, args: argparse.Namespace, model: Any, parallel: Any, optimizer: Any) -> None:
    """Train to the last step in one world, with a commit or a checkpoint after each step. ``parallel``: the model as it
    is called with the rows of this rank."""
    import edl.torch as edl  # the plain script does without it

    here = edl.context()
    log = StepLog(args.folder, here.rank, here.world_size, here.node, here.round)
    try:
        while state.step < last_step(args.folder):
            loss = whole_loss(model, state.step)
            advance(parallel, optimizer, batch(state.step)[here.rank :: here.world_size])
            state.step += 1
            log.step(state.step, loss)
            if state.step % args.save_every == 0:
                state.save()
            else:
                state.commit()
            time.sleep(args.pause)
    finally:
        log.close()
