"""Local steps with ``edl.paddle``: a linear model, by DiLoCo; besides, local SGD with an outer step in each step."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle

import edl.paddle as edl

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--every", type=int, default=5)
parser.add_argument("--steps", type=int, default=1_000_000, help="unless FOLDER/last-step says otherwise")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--exact", action="store_true", help="also compare with averaged gradients")
options = parser.parse_args()

paddle.set_default_dtype("float64")


def zeros() -> Any:
    nothing: Any = paddle.nn.initializer.Constant(0.0)
    return paddle.nn.Linear(8, 1, weight_attr=nothing, bias_attr=nothing)


model, averaged, twin = zeros(), zeros(), zeros()
optimizer = paddle.optimizer.AdamW(learning_rate=0.05, weight_decay=0.01, parameters=model.parameters())
state = edl.State(
    model=model,
    outer=edl.DiLoCo(model, every=options.every),
    averaged=averaged,
    local=edl.LocalSGD(averaged, every=1),
    step=0,
)


def last_step() -> int:
    file = options.folder / "last-step"
    return int(file.read_text()) if file.exists() else int(options.steps)


def batch(step: int, rank: int) -> Any:
    """Rank 0 has six samples in a step, all others two."""
    return paddle.to_tensor(np.random.default_rng([step, rank]).normal(size=(2 if rank else 6, 8)))


def sgd_step(parallel: Any, plain: Any, x: Any) -> None:
    ((parallel(x) - x.sum(1, keepdim=True)) ** 2).mean().backward()
    with paddle.no_grad():
        for one in plain.parameters():
            one.set_value(one - 0.1 * one.grad)
            one.clear_gradient(False)


def flat(one: Any) -> list[float]:
    numbers: list[float] = np.concatenate([each.numpy().reshape(-1) for each in one.parameters()]).tolist()
    return numbers


def error(one: Any) -> float:
    """The loss on data that nobody trains."""
    x = paddle.to_tensor(np.random.default_rng(99).normal(size=(64, 8)))
    with paddle.no_grad():
        return float(((one(x) - x.sum(1, keepdim=True)) ** 2).mean())


@edl.run
def train(state: Any) -> None:
    here = edl.context()
    fixed = {"rank": here.rank, "world": here.world_size, "pid": os.getpid(), "node": here.node, "round": here.round}
    parallel = edl.parallel(twin) if options.exact else None
    name = f"{here.node}.{here.round}.{here.rank}.{os.getpid()}"
    with (
        (options.folder / f"{name}.steps").open("a", buffering=1) as log,
        (options.folder / f"{name}.outer").open("a", buffering=1) as outer_log,
    ):
        while state.outer.inner_steps < last_step():
            x = batch(state.outer.inner_steps, here.rank)
            ((model(x) - x.sum(1, keepdim=True)) ** 2).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
            if options.exact:
                sgd_step(averaged, averaged, x)
                sgd_step(parallel, twin, x)
                state.local.step()
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
        result = {name: flat(one) for name, one in (("averaged", averaged), ("ddp", twin))}
        (options.folder / f"result-{here.rank}").write_text(json.dumps({**result, "loss": error(model)}))


train(state)
