"""An ordinary paddle.DataParallel script, as one writes it for paddle.distributed.launch: checkpoint and resume."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

from benchmarks.scripts.soak_parts import (
    BATCH,
    FEATURES,
    arguments,
    last_step,
    plain_step_log,
    write_reference,
)


def build() -> tuple[Any, Any]:
    """A small model in double precision, the same at each call."""
    paddle.set_default_dtype("float64")
    paddle.seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, 1))
    return model, paddle.optimizer.Momentum(0.02, 0.9, parameters=model.parameters())


def loss_of(model: Any, rows: np.ndarray[Any, Any]) -> Any:
    """The loss for some rows."""
    given = paddle.to_tensor(rows)
    return ((model(given) - given.sum(axis=1, keepdim=True)) ** 2).mean()


def batch(step: int) -> np.ndarray[Any, Any]:
    """The global batch of a step, counted from 0."""
    return np.random.default_rng(step).standard_normal((BATCH, FEATURES))


def whole_loss(model: Any, step: int) -> float:
    """The loss for a whole global batch: the same on all ranks."""
    with paddle.no_grad():
        return float(loss_of(model, batch(step)))


def advance(model: Any, optimizer: Any, rows: np.ndarray[Any, Any]) -> None:
    """One step."""
    loss_of(model, rows).backward()
    optimizer.step()
    optimizer.clear_grad()


def undisturbed(steps: int) -> Iterator[float]:
    """The losses of a training by one process."""
    model, optimizer = build()
    for step in range(steps):
        yield whole_loss(model, step)
        advance(model, optimizer, batch(step))


def main() -> None:
    args = arguments()
    paddle.set_device("cpu")
    if args.reference:
        write_reference(args.folder, undisturbed(args.reference))
        return
    dist.init_parallel_env()
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = build()
    checkpoint, done = args.folder / "checkpoint.pdparams", 0
    if checkpoint.exists():
        saved = paddle.load(str(checkpoint))
        model.set_state_dict(saved["model"])
        optimizer.set_state_dict(saved["optimizer"])
        done = saved["step"]
    parallel = paddle.DataParallel(model) if world > 1 else model
    log = plain_step_log(args.folder, rank, world)
    for step in itertools.count(done + 1):
        if step > last_step(args.folder):
            break
        loss = whole_loss(model, step - 1)
        advance(parallel, optimizer, batch(step - 1)[rank::world])
        log.step(step, loss)
        if rank == 0:
            unfinished = checkpoint.with_suffix(".tmp")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            paddle.save(state, str(unfinished))
            unfinished.replace(checkpoint)
        time.sleep(args.pause)


main()
