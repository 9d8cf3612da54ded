"""DiLoCo: each worker trains on its own; every 50 inner steps their models become one."""

import os

import torch
from torch import nn

import edl.torch as edl

STEPS, BATCH, WIDTH = 2000, 32, 64

torch.manual_seed(7)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # the inner one belongs to this worker alone
outer = edl.DiLoCo(model, every=50, outer_lr=0.7, outer_momentum=0.9)


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    place = f"rank {here.rank} of {here.world_size} (process {os.getpid()})"
    print(f"{place} goes on after inner step {outer.inner_steps}", flush=True)
    while outer.inner_steps < STEPS:
        seed = outer.inner_steps * 1000 + here.rank  # each worker has its own batches
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # nothing is sent
        if outer.step():  # an outer step has been made: all workers hold the same model
            state.commit()
            if here.rank == 0:
                print(f"outer step {outer.outer_steps}, world {here.world_size}, loss {loss.item():.4f}", flush=True)
    if outer.sync():  # the rest, if STEPS is no multiple of 50
        state.commit()


train(edl.State(model=model, outer=outer))
