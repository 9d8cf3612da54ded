"""Trains with ``edl.torch`` until a file says where to stop, saves regularly and logs a lot.

``chain`` is computed from the numbers of all steps in order, so a step on the wrong state is detected at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import edl.torch as edl
from benchmarks.endurance.verdict import chained


def arguments() -> argparse.Namespace:
    """The script's own command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workdir", type=Path, required=True, help="step logs, and the file last-step")
    parser.add_argument("--pause-ms", type=float, default=100.0, help="sleep per step")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--say", type=int, default=5000, help="bytes that each worker writes to stdout per step")
    return parser.parse_args()


args = arguments()
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
state = edl.State(model=model, optimizer=optimizer, step=0, chain=0)
LINE = "one of many lines that say how far it is ".ljust(99, ".")


def last_step() -> int:
    """The last step, when it is known; the file is written while that step is far enough ahead of all ranks."""
    file = args.workdir / "last-step"
    return int(file.read_text()) if file.exists() else sys.maxsize


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    fixed = {"rank": here.rank, "world": here.world_size, "pid": os.getpid(), "node": here.node}
    parallel = edl.parallel(model)
    generator = torch.Generator().manual_seed(here.rank)
    with (args.workdir / "steps" / f"{here.node}.steps").open("a", buffering=1) as log:
        while state.step < last_step():
            loss = parallel(torch.randn(16, 256, generator=generator)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step += 1
            state.chain = chained(state.chain, state.step)
            log.write(json.dumps({"t": time.monotonic(), "step": state.step, "chain": state.chain, **fixed}) + "\n")
            print("\n".join([f"step {state.step}: loss {float(loss.detach()):g}", *[LINE] * (args.say // 100)]))
            if state.step % args.save_every == 0:
                print(f"rank {here.rank} of {here.world_size} saves at step {state.step}", file=sys.stderr)
                state.save()
            else:
                state.commit()
            time.sleep(args.pause_ms / 1000)


train(state)
