"""A data-parallel loop with fleet's functions and ``edl.State``. Writes a line for each step, the samples of each step,
and the trained numbers at the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

import edl.paddle as edl
from edl.integrations import fleet
from tests.process.workers import trainer_script

options = trainer_script.parser().parse_args()
"""``--batch`` has no effect: the workers divide each step's samples."""


def main() -> None:
    trainer_script.wait_until_free(options.folder)
    paddle.seed(0)
    rows = trainer_script.Rows(options.samples)
    net = paddle.nn.Sequential(
        paddle.nn.Linear(8, 8), paddle.nn.Tanh(), paddle.nn.Dropout(options.dropout), paddle.nn.Linear(8, 1)
    )
    rate = paddle.optimizer.lr.ExponentialDecay(1e-2, 0.999)
    adam = paddle.optimizer.AdamW(rate, parameters=net.parameters())
    state = edl.State(net=net, adam=adam, rate=rate, random=edl.RandomState(), step=0)
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": -1}

    @edl.run
    def train(state: edl.State) -> None:
        fleet.init(is_collective=True, strategy=strategy)
        model: Any = fleet.distributed_model(net)
        optimizer: Any = fleet.distributed_optimizer(adam)
        rank, world = fleet.worker_index(), fleet.worker_num()
        while state.step < options.steps:
            first = state.step * options.global_batch
            mine = [sample % options.samples for sample in range(first, first + options.global_batch)][rank::world]
            batch = paddle.to_tensor(np.stack([rows[sample] for sample in mine]))
            # of all workers' mean, the part of these samples
            weight = len(mine) * world / options.global_batch
            (weight * ((model(batch) - batch.sum(1, keepdim=True)) ** 2).mean()).backward()
            optimizer.step()
            optimizer.clear_grad()
            rate.step()
            state.step += 1
            trainer_script.log(options, state.step, rank, world, rows.read)
            rows.read = []
            state.commit()

    train(state)
    trainer_script.write_result(
        options.folder, fleet.worker_index(), state.step, net.state_dict(), rate=[rate.get_lr()]
    )


if __name__ == "__main__":
    main()
