"""A script whose ranks share one card and sum over NCCL; every number it holds is known beforehand.

In each step all ranks together add ``TOTAL`` to each weight, whatever the size of the world. Nothing waits for the
device between the sums and ``commit``, as in ordinary scripts, so a commit may be asked for while the sums still run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import edl.torch as edl
from edl.torch import nccl

TOTAL = 12
"""Divisible by every world size that the tests use."""
LAYERS = 4


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--weights", type=int, default=4 << 20, help="in each of four layers")
    parser.add_argument("--optimizer", action="store_true", help="have Adam make its moments; its learning rate is 0")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--slow", default="-1:0", metavar="RANK:SECONDS", help="this rank sleeps in each step")
    parser.add_argument("--die-forming", type=int, default=0, metavar="ROUND", help="rank 1 dies before NCCL is set up")
    parser.add_argument("--hang-at", type=int, default=0, metavar="STEP", help="once, rank 1 leaves out a sum")
    return parser.parse_args()


options = read_arguments()
slow_rank, slow_s = options.slow.split(":")
cuda = torch.cuda.is_available()
# NCCL refuses two ranks on one card of one host; with a name of its own each process counts as a host.
os.environ["NCCL_HOSTID"] = f"host-{os.getpid()}"
device = torch.device("cuda" if cuda else "cpu")
model = torch.nn.ParameterList(torch.zeros(options.weights, device=device, dtype=torch.float64) for _ in range(LAYERS))
optimizer = torch.optim.Adam(model.parameters(), lr=0.0, fused=cuda)
state = edl.State(model=model, optimizer=optimizer, step=0)


def once(name: str) -> bool:
    """Whether this is the first process of the job to ask."""
    try:
        (options.folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def last_step() -> int:
    file = options.folder / "last-step"
    return int(file.read_text()) if file.exists() else 1_000_000


def note(state: edl.State, what: str) -> None:
    """Write down whether all weights are what they must be after so many steps, and what the process holds."""
    found = [(float(weight.min()), float(weight.max())) for weight in model]
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    line = {
        "what": what, "step": state.step, "right": all(pair == (TOTAL * state.step,) * 2 for pair in found),
        "found": found, "pid": os.getpid(), "threads": threading.active_count(), "t": time.monotonic(),
        "system_threads": len(os.listdir("/proc/self/task")), "descriptors": len(os.listdir("/proc/self/fd")),
        "allocated": torch.cuda.memory_allocated() if cuda else 0, "peak": peak, "round": edl.context().round,
    }  # fmt: skip
    if cuda:
        line["free"] = torch.cuda.mem_get_info()[0]
    with (options.folder / "notes").open("a") as file:
        file.write(json.dumps(line) + "\n")


def dying() -> None:
    """Have rank 1 of one round die after its peer has begun to set NCCL up."""
    form = nccl.form

    def form_or_die(group: Any, device: Any) -> None:
        if dist.get_world_size() > 1 and dist.get_rank() == 1 and edl_round() == options.die_forming and once("died"):
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        form(group, device)

    nccl.form = form_or_die


def edl_round() -> int:
    from edl.torch.framework import current

    seat = current().seat
    return 0 if seat is None else seat.round


if options.die_forming:
    dying()


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    note(state, "restored")
    fixed = {"rank": here.rank, "world": here.world_size, "pid": os.getpid(), "node": here.node, "round": here.round}
    if options.hang_at and here.world_size > 1:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5), dist.group.WORLD)
    with (options.folder / f"{here.node}.{here.round}.{here.rank}.{os.getpid()}.steps").open("a", buffering=1) as log:
        while state.step < last_step():
            if here.rank == int(slow_rank):
                time.sleep(float(slow_s))
            for n, weight in enumerate(model):
                gradient = torch.full_like(weight, TOTAL // here.world_size)
                if here.world_size > 1:
                    if state.step == options.hang_at and n == 1 and here.rank == 1 and options.hang_at and once("hung"):
                        time.sleep(3600)
                    dist.all_reduce(gradient)
                with torch.no_grad():
                    weight += gradient
                weight.grad = gradient if options.optimizer else None
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            state.commit()
            log.write(json.dumps({"t": time.monotonic(), "step": state.step, **fixed}) + "\n")
            if options.pause:
                time.sleep(options.pause)
    note(state, "ended")


train(state)
