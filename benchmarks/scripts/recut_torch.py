"""A model under FSDP2, HSDP, or tensor parallelism with FSDP2; its state is re-cut in memory when the world changes."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import edl.torch as edl
from benchmarks.scripts.recut_parts import arguments, loss_of, model_of, shard
from benchmarks.scripts.step_writer import StepWriter

args = arguments()
log = StepWriter(args.workdir)
torch.set_num_threads(1)


def build(mesh: Any) -> dict[str, Any]:
    """The model for this world. HSDP: each pair of workers is a replica."""
    model = model_of(args.megabytes)
    if args.layout == "hsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    if args.layout == "tp":
        both = edl.mesh(tp=2)
        linear = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
        styles = [ColwiseParallel(), RowwiseParallel()]
        last = len(linear) // 2 * 2  # column and row take turns, so an odd last layer stays whole
        parallelize_module(model, both["tp"], {name: styles[at % 2] for at, name in enumerate(linear[:last])})
        mesh = both["dp"]
    return {"model": model, "optimizer": shard(model, mesh)}


state = edl.State(build=build, step=0)


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    common = torch.tensor([time.monotonic_ns()])
    dist.broadcast(common, src=0)
    log.group(here.rank, here.world_size, int(common[0]))
    together = 2 if args.layout == "tp" else 1  # workers with the same samples
    while state.step < args.steps:
        state.optimizer.zero_grad()
        loss = loss_of(state.model, state.step, here.rank // together, here.world_size // together)
        loss.backward()
        state.optimizer.step()
        state.step += 1
        log.commit(state, state.step, loss.item())
        time.sleep(args.pause_ms / 1000)


train(state)
