"""Trains FSDP2 on gloo: a state that is sharded over the workers."""

from __future__ import annotations

import time
from typing import Any

from torch.distributed.fsdp import fully_shard

import edl.torch as edl
from benchmarks.scripts import soak_torch_parts as parts
from benchmarks.scripts.soak_parts import StepLog, arguments, last_step

args = arguments()


def shard(mesh: Any) -> dict[str, Any]:
    """The model in parts, one a worker."""
    model, _ = parts.build()
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": parts.optimizer_of(model)}


state = edl.State(build=shard, step=0)


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    log = StepLog(args.folder, here.rank, here.world_size, here.node, here.round)
    try:
        while state.step < last_step(args.folder):
            loss = parts.whole_loss(state.model, state.step)
            parts.advance(state.model, state.optimizer, parts.batch(state.step)[here.rank :: here.world_size])
            state.step += 1
            log.step(state.step, loss)
            if state.step % args.save_every == 0:
                state.save()
            else:
                state.commit()
            time.sleep(args.pause)
    finally:
        log.close()


train(state)
