"""A model under FSDP2, HSDP, or tensor parallelism with FSDP2; its state is re-cut in memory when the world changes."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import edl.torch as edl
from benchmarks.scripts.sized_model import INPUTS, sized_model
from benchmarks.scripts.step_writer import StepWriter

parser = argparse.ArgumentParser()
parser.add_argument("--workdir", type=Path, required=True, help="step logs")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--pause-ms", type=float, default=10.0, help="sleep per step")
parser.add_argument("--megabytes", type=int, default=20, help="of parameters; Adam's state is twice as large")
parser.add_argument("--layout", choices=("fsdp", "hsdp", "tp"), required=True)
args = parser.parse_args()
log = StepWriter(args.workdir)
torch.set_num_threads(1)


def build(mesh: Any) -> dict[str, Any]:
    """The model for this world. HSDP: each pair of workers is a replica."""
    model: Any = sized_model(args.megabytes)
    if args.layout == "hsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    if args.layout == "tp":
        both = edl.mesh(tp=2)
        linear = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
        styles = [ColwiseParallel(), RowwiseParallel()]
        last = len(linear) // 2 * 2  # column and row take turns, so an odd last layer stays whole
        parallelize_module(model, both["tp"], {name: styles[at % 2] for at, name in enumerate(linear[:last])})
        mesh = both["dp"]
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=1e-4)}


state = edl.State(build=build, step=0)


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    common = torch.tensor([time.monotonic_ns()])
    dist.broadcast(common, src=0)
    log.group(here.rank, here.world_size, int(common[0]))
    generator = torch.Generator().manual_seed(here.rank // (2 if args.layout == "tp" else 1))
    while state.step < args.steps:
        state.optimizer.zero_grad()
        state.model(torch.randn(16, INPUTS, generator=generator)).square().mean().backward()
        state.optimizer.step()
        state.step += 1
        log.step(state.step)
        state.commit()
        time.sleep(args.pause_ms / 1000)


train(state)
