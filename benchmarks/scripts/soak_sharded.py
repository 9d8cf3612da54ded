"""Trains FSDP2 on gloo: a state that is sharded over the workers."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import fully_shard

import edl.torch as edl
from benchmarks.scripts import soak_torch_parts as parts
from benchmarks.scripts.soak_parts import arguments

args = arguments()


def shard(mesh: Any) -> dict[str, Any]:
    """The model in parts, one a worker."""
    model, _ = parts.build()
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": parts.optimizer_of(model)}


state = edl.State(build=shard, step=0)


@edl.run
def train(state: edl.State) -> None:
    parts.train_from(state, args, state.model, state.model, state.optimizer)


train(state)
