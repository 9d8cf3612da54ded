"""``group_sharded_parallel`` under ``State(sharded=True)``; every world sees the same global batch. Without a launcher
it trains in one process: what the losses of jobs are compared with."""

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

BATCH = 24
"""Divisible by every world size that the tests use."""


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--level", default="os")
    parser.add_argument("--steps", type=int, default=1_000_000, help="unless FOLDER/last-step says otherwise")
    parser.add_argument("--pause", type=float, default=0.1)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--refuse-at", type=int, default=0, help="all vote, and rank 1 votes once against this commit")
    return parser.parse_args()


options = read_arguments()
nn: Any = paddle.nn
paddle.seed(os.getpid())  # each worker begins with other values; those of rank 0 are everybody's
paddle.set_default_dtype("float64")  # so that the order of additions does not show


class Model(nn.Layer):  # type: ignore[misc]
    """Parameters that worlds do not divide, one that leaves workers without rows, a scalar, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 13), nn.Linear(13, 1)
        self.scale = self.create_parameter([])
        self.frozen = self.create_parameter([4, 8])
        self.frozen.stop_gradient = True
        self.register_buffer("seen", paddle.zeros([2], dtype="int64"))

    def forward(self, batch: Any) -> Any:
        self.seen += paddle.to_tensor([1, 2])
        return self.last(paddle.tanh(self.first(batch))) * self.scale + (batch @ self.frozen.t()).sum(1, keepdim=True)


def begin_alike(layer: Any) -> None:
    """Rank 0's values do not depend on the process, so that runs can be compared."""
    if edl.context().rank == 0:
        random = np.random.default_rng(5)
        for parameter in layer.parameters():
            parameter.set_value(random.standard_normal(parameter.shape))


model = Model()
trained = [one for one in model.parameters() if not one.stop_gradient]
schedule = paddle.optimizer.lr.StepDecay(0.02, step_size=7, gamma=0.9)
clip = nn.ClipGradByGlobalNorm(3.0)
optimizer = paddle.optimizer.AdamW(schedule, parameters=trained, weight_decay=0.05, grad_clip=clip)
parallel, optimizer, _ = edl.group_sharded_parallel(model, optimizer, options.level)
state = edl.State(model=model, optimizer=optimizer, sharded=True, step=0, told=[])


def last_step() -> int:
    file = options.folder / "last-step"
    return int(file.read_text()) if file.exists() else int(options.steps)


def refuses(rank: int) -> bool:
    """Whether to vote against the commit of this step."""
    once = options.folder / "refused"
    if rank != 1 or state.step != options.refuse_at or once.exists():
        return False
    once.touch()
    return True


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    if state.step == 0:
        begin_alike(model)
    fixed = {"rank": here.rank, "world": here.world_size, "pid": os.getpid(), "node": here.node, "round": here.round}
    with (options.folder / f"began-{here.round}.{here.rank}").open("w") as began:
        json.dump({**fixed, "step": state.step, "commits": state.commits, "era": state.era}, began)
    assert state.told == list(range(state.step)), state.told
    log = (options.folder / f"{here.node}.{here.round}.{here.rank}.{os.getpid()}.steps").open("a", buffering=1)
    with log:
        while state.step < last_step():
            batch = np.random.default_rng(state.step).standard_normal((BATCH, 8))
            mine = paddle.to_tensor(batch[here.rank :: here.world_size])
            loss = ((parallel(mine) - mine.sum(1, keepdim=True)) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            schedule.step()
            everybody = float(edl.all_reduce(loss.detach().clone(), "mean"))
            state.told.append(state.step)
            state.step += 1
            line = {"t": time.monotonic(), "step": state.step, **fixed, "loss": everybody}
            log.write(json.dumps(line) + "\n")
            if options.refuse_at:
                state.commit(ok=not refuses(here.rank))
            elif options.save_every and state.step % options.save_every == 0:
                state.save()
            else:
                state.commit()
            time.sleep(options.pause)
    rows = {tuple(one.shape) for one in optimizer._accumulators["moment1"].values()}
    assert ((13, 1) in rows) == (here.world_size == 1), rows


train(state)
