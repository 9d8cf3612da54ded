"""A script with all of it: ``DataLoader``, ``accumulate`` and ``scale_lr``. Its only weight says which samples counted.

The loss is the mean of weight times sample, so that each step takes LR times the mean of its samples off the weight.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES = 613
"""Prime: no world divides it."""
LR = 0.01


class Numbers:
    """Each item is its own index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return np.float64(index)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--framework", choices=("torch", "paddle"), required=True)
    return parser.parse_args()


options = read_arguments()
edl: Any = importlib.import_module(f"edl.{options.framework}")
if options.framework == "torch":
    import torch

    torch.set_num_threads(1)
    model: Any = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR)
    sampler = edl.EDLDistributedSampler(Numbers(), seed=5, tail="exact")
    loader = edl.DataLoader(Numbers(), 16, sampler=sampler, num_workers=1)
else:
    import paddle

    paddle.set_default_dtype("float64")
    zero = paddle.nn.initializer.Constant(0.0)
    model = paddle.nn.Linear(1, 1, weight_attr=paddle.ParamAttr(initializer=zero), bias_attr=False)
    optimizer = paddle.optimizer.SGD(learning_rate=LR, parameters=model.parameters())
    sampler = edl.EDLBatchSampler(Numbers(), 16, shuffle=True, seed=5, tail="exact")
    loader = edl.DataLoader(Numbers(), batch_sampler=sampler)
state = edl.State(model=model, optimizer=optimizer, loader=loader, step=0)
edl.scale_lr(optimizer)


def last_epoch() -> int:
    """Where to stop: a file in the shared folder says so while the job runs, well ahead of all ranks."""
    file = options.folder / "last-epoch"
    return int(file.read_text()) if file.exists() else 1_000_000


class Noting:
    """The loader, and what it has handed out of a step."""

    def __init__(self) -> None:
        self.taken: list[float] = []
        self.weights: list[float] = []

    def shares(self) -> Any:
        for batch, share in loader.shares():
            if not share.micro:
                self.taken, self.weights = [], []
            if share.samples:
                self.taken += batch.numpy().tolist()
            self.weights.append(share.weight)
            yield batch.reshape([-1, 1]), share


@edl.run  # type: ignore[untyped-decorator]
def train(state: Any) -> None:
    here = edl.context()
    fixed = {"rank": here.rank, "world": here.world_size, "pid": os.getpid(), "node": here.node, "round": here.round}
    name = f"{here.node}.{here.round}.{here.rank}.{os.getpid()}"
    edl.scale_lr(optimizer)  # a second time, in each round: nothing is applied twice
    parallel, noting = edl.parallel(model), Noting()
    with (
        (options.folder / f"{name}.steps").open("a", buffering=1) as steps,
        (options.folder / f"{name}.taken").open("a", buffering=1) as log,
    ):
        while loader.epoch <= last_epoch():
            for step in edl.accumulate(noting, parallel):
                for batch in step:
                    step.backward(parallel(batch).mean())
                held, epoch = edl.settings(16), loader.epoch
                optimizer.step()
                (optimizer.zero_grad if options.framework == "torch" else optimizer.clear_grad)()
                state.step += 1
                line = {
                    "step": state.step, "epoch": epoch, "round": here.round, "rank": here.rank,
                    "world": here.world_size, "samples": noting.taken, "weights": noting.weights, "total": step.samples,
                    "number": held.number, "factor": held.lr_factor, "weight": float(model.weight.reshape([-1])[0]),
                }  # fmt: skip
                log.write(json.dumps(line) + "\n")
                steps.write(json.dumps({"t": time.monotonic(), "step": state.step, **fixed}) + "\n")
                state.commit()
                time.sleep(0.03)


train(state)
