"""DistributedDataParallel with a model of a given size. With edl, blocks of steps with a commit each and blocks without
alternate; with ``--plain`` nothing is committed and no launcher's library is used."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.scripts.sized_model import INPUTS, sized_model

parser = argparse.ArgumentParser()
parser.add_argument("--workdir", type=Path, required=True)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--megabytes", type=int, required=True)
parser.add_argument("--block", type=int, default=5, help="steps of a block")
parser.add_argument("--plain", action="store_true")
args = parser.parse_args()
torch.set_num_threads(1)
model = sized_model(args.megabytes)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)


def loop(parallel: Any, rank: int, commit: Any) -> None:
    """Train, and append a line for each step to ``<workdir>/notes`` (rank 0)."""
    generator = torch.Generator().manual_seed(rank)
    with (args.workdir / "notes").open("a", buffering=1) as notes:
        for step in range(args.steps):
            commits = commit is not None and step // args.block % 2 == 0
            begun_s = time.monotonic()
            optimizer.zero_grad()
            parallel(torch.randn(16, INPUTS, generator=generator)).square().mean().backward()
            optimizer.step()
            trained_s = time.monotonic()
            if commits:
                commit()
            ended_s = time.monotonic()
            if rank == 0:
                line = {"step": step, "commits": commits, "step_s": ended_s - begun_s, "commit_s": ended_s - trained_s}
                notes.write(json.dumps({**line, "pid": os.getpid()}) + "\n")


if args.plain:
    dist.init_process_group("gloo")
    loop(DistributedDataParallel(model), dist.get_rank(), None)
else:
    import edl.torch as edl

    state = edl.State(model=model, optimizer=optimizer, step=0)

    @edl.run
    def train(state: edl.State) -> None:
        def commit() -> None:
            state.step += 1
            state.commit()

        loop(edl.parallel(model), edl.context().rank, commit)

    train(state)
