"""A plain PyTorch DistributedDataParallel script, as one writes it for torchrun: checkpoint and resume."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000, help="unless FOLDER/last-step says otherwise")
    parser.add_argument("--pause", type=float, default=0.05)
    return parser.parse_args()


def last_step(options: argparse.Namespace) -> int:
    """Where to stop. A file in the shared folder may set it while the job runs, well ahead of all ranks."""
    file = options.folder / "last-step"
    return int(file.read_text()) if file.exists() else int(options.steps)


def main() -> None:
    options = read_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    checkpoint, done = options.folder / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    parallel = DistributedDataParallel(model)
    fixed = {"rank": rank, "world": world, "pid": os.getpid(), "node": os.environ["EDL_NODE_ID"]}
    fixed["round"] = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    log = (options.folder / f"{fixed['node']}.{fixed['round']}.{rank}.{os.getpid()}.steps").open("a", buffering=1)
    loss = torch.zeros(())
    for step in itertools.count(done + 1):
        if step > last_step(options):
            break
        # Every rank takes its share of a batch that depends on the step alone.
        batch = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        mine = batch[rank::world]
        loss = ((parallel(mine) - mine.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.write(json.dumps({"t": time.monotonic(), "step": step, **fixed}) + "\n")
        if rank == 0:
            unfinished = checkpoint.with_suffix(".tmp")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished)
            unfinished.replace(checkpoint)
        time.sleep(options.pause)
    if rank == 0:
        (options.folder / "result").write_text(f"{loss.item()}")
    del parallel  # freed after the group, it may wait for a thread that waits for it (docs/failures.md)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
