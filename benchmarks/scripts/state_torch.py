"""Commits a state of a given size in each step, and writes down how long each commit blocked.

The size in GB is the content of ``<workdir>/gigabytes``; the state is a model of layers of 256 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import edl.torch as edl
from benchmarks.scripts.card import device
from benchmarks.scripts.step_writer import StepWriter

LAYER_BYTES = 256 << 20


def synchronize() -> None:
    """Wait for the card, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


parser = argparse.ArgumentParser()
parser.add_argument("--workdir", type=Path, required=True)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--pause-ms", type=float, default=10.0)
args = parser.parse_args()
log = StepWriter(args.workdir)
where = device()
tensors = max(3, round(float((args.workdir / "gigabytes").read_text()) * 1e9 / LAYER_BYTES))
model = torch.nn.ParameterList(torch.zeros(LAYER_BYTES // 4, device=where) for _ in range(tensors))
state = edl.State(model=model, step=0)


def note(**line: object) -> None:
    """Append a line to ``<workdir>/notes``, with this process's id."""
    with (args.workdir / "notes").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "t": time.monotonic(), **line}) + "\n")


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    common = torch.tensor([time.monotonic_ns()])
    dist.broadcast(common, src=0)
    log.group(here.rank, here.world_size, int(common[0]))
    wrong = [n for n, layer in enumerate(model) if float(layer.min()) != state.step]
    note(restored=state.step, wrong=wrong, peak=torch.cuda.max_memory_allocated() if where.type == "cuda" else 0)
    while state.step < args.steps:
        if here.world_size > 1:
            dist.all_reduce(torch.zeros(1, device=where))  # a step of one waits for all
        with torch.no_grad():
            for layer in model:
                layer.add_(1)
        state.step += 1
        synchronize()
        begun_s = time.monotonic()
        state.commit()
        note(step=state.step, commit_s=time.monotonic() - begun_s)
        log.step(state.step)
        time.sleep(args.pause_ms / 1000)


train(state)
