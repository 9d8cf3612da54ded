"""A plain paddle.DataParallel script, as one writes it for paddle.distributed.launch: checkpoint and resume."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn


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
    paddle.set_device("cpu")
    dist.init_parallel_env()
    rank, world = dist.get_rank(), dist.get_world_size()
    paddle.seed(0)
    model = nn.Linear(8, 1)
    optimizer = paddle.optimizer.Momentum(0.05, 0.9, parameters=model.parameters())
    checkpoint, done = options.folder / "checkpoint.pdparams", 0
    if checkpoint.exists():
        saved = paddle.load(str(checkpoint))
        model.set_state_dict(saved["model"])
        optimizer.set_state_dict(saved["optimizer"])
        done = saved["step"]
    parallel = paddle.DataParallel(model) if world > 1 else model
    fixed = {"rank": rank, "world": world, "pid": os.getpid(), "node": os.environ["EDL_NODE_ID"]}
    fixed["round"] = int(os.environ["EDL_ROUND"])
    log = (options.folder / f"{fixed['node']}.{fixed['round']}.{rank}.{os.getpid()}.steps").open("a", buffering=1)
    loss = paddle.zeros([1])
    for step in itertools.count(done + 1):
        if step > last_step(options):
            break
        # Every rank takes its share of a batch that depends on the step alone.
        batch = np.random.default_rng(step).standard_normal((32, 8), dtype=np.float32)
        mine = paddle.to_tensor(batch[rank::world])
        loss = ((parallel(mine) - mine.sum(axis=1, keepdim=True)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        log.write(json.dumps({"t": time.monotonic(), "step": step, **fixed}) + "\n")
        if rank == 0:
            unfinished = checkpoint.with_suffix(".tmp")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            paddle.save(state, str(unfinished))
            unfinished.replace(checkpoint)
        time.sleep(options.pause)
    if rank == 0:
        (options.folder / "result").write_text(f"{float(loss)}")


if __name__ == "__main__":
    main()
