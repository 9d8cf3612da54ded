"""A script with ``edl.paddle`` of which one rank sleeps in each step."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import paddle
from paddle import nn

import edl.paddle as edl

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--slow", type=int, default=-1, metavar="RANK")
options = parser.parse_args()
paddle.seed(0)
model = nn.Linear(8, 1)
optimizer = paddle.optimizer.SGD(learning_rate=0.001, parameters=model.parameters())
state = edl.State(model=model, optimizer=optimizer, step=0)


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    fixed = {"rank": here.rank, "world": here.world_size, "pid": os.getpid(), "node": here.node, "round": here.round}
    log = (options.folder / f"{here.node}.{here.round}.{here.rank}.{os.getpid()}.steps").open("a", buffering=1)
    parallel = edl.parallel(model)
    last = options.folder / "last-step"
    with log:
        while not last.exists() or state.step < int(last.read_text()):
            time.sleep(0.2 if here.rank == options.slow else 0.03)
            loss = (parallel(paddle.ones([4, 8])) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            state.step += 1
            log.write(json.dumps({"t": time.monotonic(), "step": state.step, **fixed}) + "\n")
            state.commit()


train(state)
