"""A script whose samples come from ``edl.DataLoader``: notes which ones each step takes."""

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


class Numbers:
    """Each item is its own index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return np.int64(index)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--framework", choices=("torch", "paddle"), required=True)
    parser.add_argument("--pause", type=float, default=0.02)
    return parser.parse_args()


options = read_arguments()
edl: Any = importlib.import_module(f"edl.{options.framework}")
if options.framework == "torch":
    import torch

    torch.set_num_threads(1)
    model: Any = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-9)
    sampler = edl.EDLDistributedSampler(Numbers(), seed=5, tail="exact")
    loader = edl.DataLoader(Numbers(), 4, sampler=sampler, num_workers=2)
else:
    import paddle

    model = paddle.nn.Linear(1, 1)
    optimizer = paddle.optimizer.SGD(learning_rate=1e-9, parameters=model.parameters())
    sampler = edl.EDLBatchSampler(Numbers(), 4, shuffle=True, seed=5, tail="exact")
    loader = edl.DataLoader(Numbers(), batch_sampler=sampler)
state = edl.State(model=model, optimizer=optimizer, loader=loader, step=0)


def last_epoch() -> int:
    """Where to stop: a file in the shared folder says so while the job runs, well ahead of all ranks."""
    file = options.folder / "last-epoch"
    return int(file.read_text()) if file.exists() else 1_000_000


def learn(parallel: Any, batch: Any) -> float:
    inputs = batch.reshape([-1, 1])
    loss = (parallel(inputs.float() if options.framework == "torch" else inputs.astype("float32")) ** 2).mean()
    loss.backward()
    optimizer.step()
    (optimizer.zero_grad if options.framework == "torch" else optimizer.clear_grad)()
    return float(loss.detach())


@edl.run  # type: ignore[untyped-decorator]
def train(state: Any) -> None:
    here = edl.context()
    fixed = {"rank": here.rank, "world": here.world_size, "pid": os.getpid(), "node": here.node, "round": here.round}
    name = f"{here.node}.{here.round}.{here.rank}.{os.getpid()}"
    parallel = edl.parallel(model)
    with (
        (options.folder / f"{name}.steps").open("a", buffering=1) as steps,
        (options.folder / f"{name}.samples").open("a", buffering=1) as samples,
    ):
        while loader.epoch <= last_epoch():
            for batch in loader:
                share = loader.share
                taken = batch.numpy().tolist() if share.samples else []
                line = {"step": state.step, "epoch": loader.epoch, "round": here.round, "samples": taken}
                # Before the gradients are added up: of a step that was committed, all workers have written theirs.
                samples.write(json.dumps(line) + "\n")
                loss = learn(parallel, batch)
                state.step += 1
                steps.write(json.dumps({"t": time.monotonic(), "step": state.step, **fixed, "loss": loss}) + "\n")
                state.commit()
                time.sleep(options.pause)


train(state)
