"""A script with ``edl.torch`` of which one rank is slow in the way that the command line says."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import edl.torch as edl

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--steps", type=int, default=1_000_000, help="unless FOLDER/last-step says otherwise")
parser.add_argument("--work", type=float, default=0.1, help="seconds of each rank's own part of a step")
parser.add_argument("--slow", default="", metavar="RANK:HOW:SECONDS", help="compute or data: additional time per step")
options = parser.parse_args()
SLOW_RANK, HOW, EXTRA_S = (options.slow or "-1::0").split(":")


class Slow(Dataset[Any]):
    """Records that take some time to load on one rank."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if HOW == "data" and edl.context().rank == int(SLOW_RANK):
            time.sleep(float(EXTRA_S) / 4)
        return torch.full((8,), float(index % 7))


torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
state = edl.State(model=model, optimizer=optimizer, step=0)


def last_step() -> int:
    file = options.folder / "last-step"
    return int(file.read_text()) if file.exists() else int(options.steps)


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    fixed = {"rank": here.rank, "world": here.world_size, "pid": os.getpid(), "node": here.node, "round": here.round}
    log = (options.folder / f"{here.node}.{here.round}.{here.rank}.{os.getpid()}.steps").open("a", buffering=1)
    parallel = edl.parallel(model)
    batches = iter(DataLoader(Slow(), batch_size=4))
    with log:
        while state.step < last_step():
            batch = next(batches)
            time.sleep(options.work)
            if HOW == "compute" and here.rank == int(SLOW_RANK):
                time.sleep(float(EXTRA_S))
            optimizer.zero_grad()
            loss = (parallel(batch) ** 2).mean()
            loss.backward()
            optimizer.step()
            state.step += 1
            log.write(json.dumps({"t": time.monotonic(), "step": state.step, **fixed}) + "\n")
            state.commit()


train(state)
