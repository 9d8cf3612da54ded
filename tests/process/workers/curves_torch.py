"""Digits on any number of workers, with edl's loader and ``accumulate``: what the loss curves are compared of."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import edl.torch as edl


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=0, help="processes that load")
    return parser.parse_args()


options = read_arguments()
torch.set_num_threads(1)
torch.manual_seed(7)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16.0
data = torch.utils.data.TensorDataset(images, torch.tensor(digits.target))
model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
if not edl.settings().logical_ranks:  # both depend on how a step is split
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
sampler = edl.EDLDistributedSampler(data, shuffle=True, seed=3, tail="exact")  # the last step as it is, at any size
loader = edl.DataLoader(data, batch_size=options.batch, sampler=sampler, num_workers=options.workers)
state = edl.State(model=model, optimizer=optimizer, schedule=schedule, loader=loader, noise=edl.AdaScale(), step=0)
edl.scale_lr(optimizer)


def pause_s() -> float:
    """Pause after each step in seconds, as set by the test."""
    try:
        return float((options.folder / "pace").read_text())
    except (OSError, ValueError):
        return 0.0


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    fixed = {"rank": here.rank, "world": here.world_size, "pid": os.getpid(), "node": here.node, "round": here.round}
    log = (options.folder / f"{here.node}.{here.round}.{here.rank}.{os.getpid()}.steps").open("a", buffering=1)
    parallel = edl.parallel(model)
    with log:
        while state.step < options.steps:
            for step in edl.accumulate(loader, parallel, seed=11):
                for x, y in step:
                    step.backward(nn.functional.cross_entropy(parallel(x), y))
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                state.step += 1
                loss = step.mean_loss()
                line: dict[str, Any] = {"t": time.monotonic(), "step": state.step, **fixed, "loss": loss}
                log.write(json.dumps(line) + "\n")
                state.commit()
                if state.step >= options.steps:
                    break
                time.sleep(pause_s())


train(state)
