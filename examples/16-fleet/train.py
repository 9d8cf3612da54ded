"""A data-parallel loop with fleet, elastically: a small network learns to add up its input. Nothing is downloaded."""

import numpy as np
import paddle

import edl.paddle as edl
from edl.integrations import fleet  # in place of paddle.distributed.fleet

paddle.seed(0)
rows = np.random.default_rng(0).standard_normal((4096, 16), dtype=np.float32)
net = paddle.nn.Sequential(paddle.nn.Linear(16, 64), paddle.nn.Tanh(), paddle.nn.Linear(64, 1))
adam = paddle.optimizer.AdamW(1e-3, parameters=net.parameters())
sampler = edl.EDLBatchSampler(rows, 8, shuffle=True)


@edl.run
def train(state: edl.State) -> None:  # called in each world
    fleet.init(is_collective=True)
    model = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(adam)
    while sampler.epoch < 10:
        epoch, total = sampler.epoch, 0.0
        for batch in edl.DataLoader(rows, batch_sampler=sampler):
            loss = ((model(batch) - batch.sum(axis=1, keepdim=True)) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            total += float(loss)
            state.commit()
        if fleet.is_first_worker():
            print(f"epoch {epoch} is complete, sum of losses {total:.1f}")


train(edl.State(net=net, adam=adam, sampler=sampler))
