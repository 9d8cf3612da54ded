"""``train_paddle.py`` with ``edl.paddle``: the same model, batches and step log; its state outlives each world."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import paddle
from paddle import nn

import edl.paddle as edl
from benchmarks.scripts.step_writer import StepWriter


def arguments() -> argparse.Namespace:
    """The script's own command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workdir", type=Path, required=True, help="step logs")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause-ms", type=float, default=10.0, help="sleep per step")
    return parser.parse_args()


args = arguments()
log = StepWriter(args.workdir)
paddle.device.set_device("cpu")
paddle.seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = paddle.optimizer.SGD(learning_rate=0.01, parameters=model.parameters())
state = edl.State(model=model, optimizer=optimizer, step=0)


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    common = paddle.to_tensor([time.monotonic_ns()], dtype="int64")
    edl.broadcast(common)
    log.group(here.rank, here.world_size, int(common.numpy()[0]))

    parallel = edl.parallel(model)
    while state.step < args.steps:
        inputs = paddle.randn([16, 32])
        loss = parallel(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        state.step += 1
        log.commit(state, state.step)
        time.sleep(args.pause_ms / 1000)


train(state)
