"""A loop with Accelerate, elastically: a small network learns to add up its input. Nothing is downloaded."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from edl.integrations.accelerate import EDLLoop

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
loop = EDLLoop(
    model=net,
    optimizer=torch.optim.AdamW(net.parameters(), lr=1e-3),
    loader=DataLoader(TensorDataset(torch.randn(4096, 16)), batch_size=8, shuffle=True),
    global_batch=32,
)


def train() -> None:  # called in each world
    accelerator = Accelerator(cpu=True)
    model, optimizer, batches = loop.prepare(accelerator)
    for epoch in loop.epochs(10):
        for (rows,) in batches:
            with accelerator.accumulate(model):
                accelerator.backward(((model(rows) - rows.sum(1, keepdim=True)) ** 2).mean())
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} is complete")


loop.run(train)
