"""An ordinary DistributedDataParallel script, as one writes it for torchrun: checkpoint and resume."""

from __future__ import annotations

import itertools
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.scripts import soak_torch_parts as parts
from benchmarks.scripts.soak_parts import arguments, last_step, plain_step_log


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = parts.build()
    checkpoint, done = args.folder / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    parallel = DistributedDataParallel(model)
    log = plain_step_log(args.folder, rank, world)
    for step in itertools.count(done + 1):
        if step > last_step(args.folder):
            break
        loss = parts.whole_loss(model, step - 1)
        parts.advance(parallel, optimizer, parts.batch(step - 1)[rank::world])
        log.step(step, loss)
        if rank == 0:
            unfinished = checkpoint.with_suffix(".tmp")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished)
            unfinished.replace(checkpoint)
        time.sleep(args.pause)
    del parallel  # freed after the group, it may wait for a thread that waits for it (docs/failures.md)
    dist.destroy_process_group()


main()
