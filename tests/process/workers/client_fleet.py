"""PaddlePaddle's fleet API in collective mode on the CPU, as one writes it for paddle.distributed.launch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.distributed import fleet


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    paddle.set_device("cpu")
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": -1, "mp_degree": 1, "pp_degree": 1}
    fleet.init(is_collective=True, strategy=strategy)
    rank, world = fleet.worker_index(), fleet.worker_num()
    paddle.seed(0)
    model = nn.Linear(8, 1)
    make: Any = fleet  # not typed
    optimizer = make.distributed_optimizer(paddle.optimizer.Momentum(0.05, 0.9, parameters=model.parameters()))
    parallel = make.distributed_model(model)
    for step in range(8):
        inputs = paddle.to_tensor(np.random.default_rng(step).standard_normal((32, 8), dtype=np.float32)[rank::world])
        loss = ((parallel(inputs) - inputs.sum(axis=1, keepdim=True)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    gathered: list[paddle.Tensor] = []
    paddle.distributed.all_gather(gathered, model.weight.flatten())
    seen = {
        "rank": rank,
        "world": world,
        "first": fleet.is_first_worker(),
        "weights": gathered[rank].numpy().tolist(),
        "alike": all(bool((one == gathered[0]).all()) for one in gathered),
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
