"""``train_torch.py`` with ``edl.torch``: the same model, batches and step log; its state outlives each world."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist

import edl.torch as edl
from benchmarks.scripts.ballast import hold
from benchmarks.scripts.card import device
from benchmarks.scripts.sized_model import sized_model
from benchmarks.scripts.step_writer import StepWriter


def arguments() -> argparse.Namespace:
    """The script's own command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workdir", type=Path, required=True, help="step logs")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause-ms", type=float, default=10.0, help="sleep per step")
    parser.add_argument("--megabytes", type=int, default=0, help="of parameters; 0: a tiny model")
    parser.add_argument("--ballast-gigabytes", type=float, default=0.0, help="memory to hold besides")
    return parser.parse_args()


args = arguments()
log = StepWriter(args.workdir)
torch.set_num_threads(1)
ballast = hold(args.ballast_gigabytes)
where = device()
model = sized_model(args.megabytes).to(where)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = edl.State(model=model, optimizer=optimizer, step=0)


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    common = torch.tensor([time.monotonic_ns()])
    dist.broadcast(common, src=0)
    log.group(here.rank, here.world_size, int(common[0]))

    parallel = edl.parallel(model)
    generator = torch.Generator().manual_seed(here.rank)
    while state.step < args.steps:
        inputs = torch.randn(16, 32, generator=generator).to(where)
        loss = parallel(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state.step += 1
        log.commit(state, state.step)
        time.sleep(args.pause_ms / 1000)


train(state)
