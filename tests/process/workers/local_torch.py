"""Local steps with ``edl.torch``: a linear model, by DiLoCo; besides, local SGD with an outer step in each step."""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import edl.torch as edl

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--every", type=int, default=5)
parser.add_argument("--steps", type=int, default=1_000_000, help="unless FOLDER/last-step says otherwise")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--exact", action="store_true", help="also compare with DistributedDataParallel")
options = parser.parse_args()

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
model = torch.nn.Linear(8, 1)
with torch.no_grad():
    model.weight.zero_()
    model.bias.zero_()
averaged, small = copy.deepcopy(model), copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
state = edl.State(
    model=model,
    outer=edl.DiLoCo(model, every=options.every),
    averaged=averaged,
    local=edl.LocalSGD(averaged, every=1),
    small=small,
    sixteen=edl.LocalSGD(small, every=1, wire="bfloat16"),
    step=0,
)


def last_step() -> int:
    file = options.folder / "last-step"
    return int(file.read_text()) if file.exists() else int(options.steps)


def batch(step: int, rank: int) -> Any:
    """Rank 0 has six samples in a step, all others two."""
    return torch.from_numpy(np.random.default_rng([step, rank]).normal(size=(2 if rank else 6, 8)))


def sgd_step(parallel: Any, plain: Any, x: Any) -> None:
    plain.zero_grad()
    ((parallel(x) - x.sum(1, keepdim=True)) ** 2).mean().backward()
    with torch.no_grad():
        for one in plain.parameters():
            one -= 0.1 * one.grad


def flat(one: Any) -> list[float]:
    numbers: list[float] = torch.cat([each.detach().flatten() for each in one.parameters()]).tolist()
    return numbers


def error(one: Any) -> float:
    """The loss on data that nobody trains."""
    x = torch.from_numpy(np.random.default_rng(99).normal(size=(64, 8)))
    with torch.no_grad():
        return float(((one(x) - x.sum(1, keepdim=True)) ** 2).mean())


@edl.run
def train(state: Any) -> None:
    here = edl.context()
    fixed = {"rank": here.rank, "world": here.world_size, "pid": os.getpid(), "node": here.node, "round": here.round}
    twin = copy.deepcopy(averaged)
    parallel = edl.parallel(twin) if options.exact else None
    name = f"{here.node}.{here.round}.{here.rank}.{os.getpid()}"
    with (
        (options.folder / f"{name}.steps").open("a", buffering=1) as log,
        (options.folder / f"{name}.outer").open("a", buffering=1) as outer_log,
    ):
        while state.outer.inner_steps < last_step():
            x = batch(state.outer.inner_steps, here.rank)
            optimizer.zero_grad()
            ((model(x) - x.sum(1, keepdim=True)) ** 2).mean().backward()
            optimizer.step()
            if options.exact:
                for one in (averaged, small):
                    sgd_step(one, one, x)
                sgd_step(parallel, twin, x)
                state.local.step()
                state.sixteen.step()
            # The inner step is made, even if step() leaves this function because the round is over.
            log.write(json.dumps({"t": time.monotonic(), "step": state.outer.inner_steps + 1, **fixed}) + "\n")
            if state.outer.step(samples=len(x)):
                state.step += 1
                outer = {"outer": state.outer.outer_steps, "parameters": flat(model), "loss": error(model), **fixed}
                outer_log.write(json.dumps(outer) + "\n")
                state.commit()
            time.sleep(options.pause)
        if state.outer.sync():
            state.commit()
        result = {name: flat(one) for name, one in (("averaged", averaged), ("small", small), ("ddp", twin))}
        (options.folder / f"result-{here.rank}").write_text(json.dumps({**result, "loss": error(model)}))


train(state)
