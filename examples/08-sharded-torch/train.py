"""A model that FSDP2 spreads over all workers, however many there are: from memory, in the same processes."""

import os

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import edl.torch as edl

STEPS, BATCH, WIDTH = 400, 96, 256


def build(mesh: DeviceMesh) -> dict[str, object]:
    """Called in each world: its parameters are spread over the workers that there are now."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    print(f"rank {here.rank} of {here.world_size} (process {os.getpid()}) goes on after step {state.step}", flush=True)
    device = next(state.model.parameters()).device  # a GPU where the workers have one each
    while state.step < STEPS:
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(state.step))
        mine = x[here.rank :: here.world_size].to(device)
        loss = ((state.model(mine) - mine.sum(1, keepdim=True)) ** 2).mean()
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        state.step += 1
        state.commit()
        if here.rank == 0 and state.step % 20 == 0:
            print(f"step {state.step} of {STEPS}, world {here.world_size}, loss {loss.item():.3f}", flush=True)


train(edl.State(build=build, step=0))
