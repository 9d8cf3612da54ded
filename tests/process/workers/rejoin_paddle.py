"""A script that uses ``edl.paddle``: data-parallel training in which every world sees the same global batch."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

import edl.paddle as edl

BATCH = 24
"""Divisible by every world size that the tests use."""


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000, help="unless FOLDER/last-step says otherwise")
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--digests", action="store_true", help="write a digest of the state at each commit and restore")
    parser.add_argument("--results", action="store_true", help="write down the model's sum and norm after each step")
    parser.add_argument("--slow-start", type=float, default=0.0, help="seconds of preparation before edl.run")
    parser.add_argument("--harm", default="", metavar="STEP:RANK", help="once, add 1 to a weight of this rank")
    parser.add_argument("--local-value", action="store_true", help="keep what differs between nodes")
    return parser.parse_args()


options = read_arguments()
paddle.seed(0)
paddle.set_default_dtype("float64")  # so that the order of additions does not show
time.sleep(options.slow_start)
model = nn.Sequential(nn.Linear(8, options.width), nn.LayerNorm(options.width), nn.Tanh(), nn.Linear(options.width, 1))
optimizer = paddle.optimizer.Adam(learning_rate=0.01, parameters=model.parameters())
statistics = {"norm": nn.BatchNorm1D(8)} if options.local_value else {}
state = edl.State(model=model, optimizer=optimizer, step=0, losses=[], where="", **statistics)  # type: ignore[arg-type]


def last_step() -> int:
    """Where to stop. A file in the shared folder may set it while the job runs, well ahead of all ranks."""
    file = options.folder / "last-step"
    return int(file.read_text()) if file.exists() else int(options.steps)


def digest(what: str) -> None:
    """Note which bits the model and the optimizer consist of."""
    if not options.digests:
        return
    total = hashlib.sha256()
    for value in tensors({"model": model.state_dict(), "optimizer": optimizer.state_dict()}):
        total.update(np.ascontiguousarray(value).tobytes())
    with (options.folder / f"digests-{what}").open("a") as file:
        file.write(f"{state.step} {total.hexdigest()}\n")


def tensors(value: object) -> Iterator[Any]:
    """All arrays in a nest of dicts, in order; generated names play no part in it."""
    if isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)
    elif hasattr(value, "numpy"):
        yield value.numpy()


def harm(rank: int) -> None:
    """Simulate a faulty device: change one weight of one rank."""
    once = options.folder / "harmed"
    if options.harm == f"{state.step}:{rank}" and not once.exists():
        once.touch()
        weight = next(iter(model.parameters()))
        wrong = weight.numpy()
        wrong[0, 0] += 1
        weight.set_value(wrong)


def result() -> str:
    """Step, sum and norm of the trained model, as JSON."""
    numbers = np.concatenate([value.numpy().ravel() for value in model.state_dict().values()])
    return json.dumps({"step": state.step, "sum": float(numbers.sum()), "norm": float(np.linalg.norm(numbers))})


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    fixed = {"rank": here.rank, "world": here.world_size, "pid": os.getpid(), "node": here.node, "round": here.round}
    log = (options.folder / f"{here.node}.{here.round}.{here.rank}.{os.getpid()}.steps").open("a", buffering=1)
    digest("restored")
    if options.local_value:
        with (options.folder / "values").open("a") as file:
            file.write(f"{here.round} {here.rank} {state.where}\n")
        state.where = here.node
    parallel = edl.parallel(model)
    with log:
        while state.step < last_step():
            batch = np.random.default_rng(state.step).standard_normal((BATCH, 8))
            mine = paddle.to_tensor(batch[here.rank :: here.world_size])
            loss = ((parallel(mine) - mine.sum(1, keepdim=True)) ** 2).mean()
            for norm in statistics.values():
                norm(mine)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            state.step += 1
            harm(here.rank)
            if here.rank == 0:
                digest("committed")
            if options.results:
                with (options.folder / "results").open("a") as file:
                    file.write(result() + "\n")
            log.write(json.dumps({"t": time.monotonic(), "step": state.step, **fixed, "loss": float(loss)}) + "\n")
            if options.save_every and state.step % options.save_every == 0:
                state.save()
            else:
                state.commit()
            if options.pause:
                time.sleep(options.pause)


train(state)
if edl.context().rank == 0:
    (options.folder / "result.json").write_text(result())
