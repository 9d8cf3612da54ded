"""Digits on any number of workers, with edl's loader and ``accumulate``: what the loss curves are compared of."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import paddle
from sklearn.datasets import load_digits

import edl.paddle as edl


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    return parser.parse_args()


options = read_arguments()
nn: Any = paddle.nn
paddle.seed(7)
digits = load_digits()
data = paddle.io.TensorDataset(
    [paddle.to_tensor((digits.data / 16.0).astype("float32")), paddle.to_tensor(digits.target.astype("int64"))]
)
logical = edl.settings().logical_ranks > 0
middle = [nn.BatchNorm1D(32), nn.ReLU(), nn.Dropout(0.2)] if logical else [nn.ReLU()]
model = nn.Sequential(nn.Linear(64, 32), *middle, nn.Linear(32, 10))
schedule = paddle.optimizer.lr.CosineAnnealingDecay(options.lr, options.steps)
optimizer = paddle.optimizer.Momentum(schedule, momentum=0.9, parameters=model.parameters())
batches = edl.EDLBatchSampler(data, options.batch, shuffle=True, seed=3, tail="exact")
loader = edl.DataLoader(data, batch_sampler=batches)
state = edl.State(model=model, optimizer=optimizer, loader=loader, noise=edl.AdaScale(), step=0)
edl.scale_lr(optimizer)
parallel = edl.parallel(model)


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
    with log:
        while state.step < options.steps:
            for step in edl.accumulate(loader, parallel, seed=11):
                for x, y in step:
                    step.backward(nn.functional.cross_entropy(parallel(x), y))
                optimizer.step()
                optimizer.clear_grad()
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
