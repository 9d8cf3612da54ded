"""A model of which each worker holds its rows, however many workers there are: from memory, in the same processes."""

import os
from typing import Any

import paddle

import edl.paddle as edl

STEPS, BATCH, WIDTH = 400, 96, 256

nn: Any = paddle.nn
paddle.seed(0)
layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
adam = paddle.optimizer.AdamW(1e-3, parameters=layer.parameters())
model, optimizer, _ = edl.group_sharded_parallel(layer, adam, "p_g_os")


@edl.run
def train(state: edl.State) -> None:
    here = edl.context()
    print(f"rank {here.rank} of {here.world_size} (process {os.getpid()}) goes on after step {state.step}", flush=True)
    while state.step < STEPS:
        paddle.seed(state.step)
        x = paddle.randn([BATCH, WIDTH])
        mine = x[here.rank :: here.world_size]
        loss = ((model(mine) - mine.sum(1, keepdim=True)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        state.step += 1
        state.commit()
        if here.rank == 0 and state.step % 20 == 0:
            print(f"step {state.step} of {STEPS}, world {here.world_size}, loss {loss.item():.3f}", flush=True)


train(edl.State(model=model, optimizer=optimizer, sharded=True, step=0))
