"""The model of ``benchmarks.ps bags`` on the parameter servers of Paddle 2.6: as pserver, or as the trainer, which
trains a round for each line that it reads (examples in a step, steps) and prints seconds and CPU seconds.

Paddle 2.6 and 3 cannot be installed in one environment, so this file imports nothing of edl.
"""

import sys
import time
from typing import Any

import numpy as np

FEATURES, BAGS, LONGEST, WIDTH, NUMBERS, KEYS = 26, 3, 10, 8, 13, 1_000_003


def model(paddle: Any) -> Any:
    """The loss, from feeds ``f0`` .. ``f25`` and ``label``."""
    static = paddle.static
    vectors = []
    for number in range(FEATURES):
        keys = static.data(f"f{number}", [-1, 1], "int64", lod_level=1)
        initial = paddle.ParamAttr(name=f"e{number}", initializer=paddle.nn.initializer.Normal(0, 0.02))
        rows = static.nn.sparse_embedding(keys, [KEYS, WIDTH], param_attr=initial)
        vectors.append(static.nn.sequence_lod.sequence_pool(rows, "sum"))
    label, numbers = static.data("label", [-1, 1], "float32"), static.data("numbers", [-1, NUMBERS], "float32")
    stacked = paddle.stack(vectors, 1)
    squares = paddle.square(stacked.sum(1)) - paddle.square(stacked).sum(1)
    hidden = static.nn.fc(paddle.concat([*vectors, numbers], 1), 64, activation="relu")
    logit = 0.5 * squares.sum(1, keepdim=True) + static.nn.fc(hidden, 1)
    return paddle.mean(paddle.nn.functional.binary_cross_entropy_with_logits(logit, label))


def batch(paddle: Any, random: np.random.Generator, size: int) -> dict[str, Any]:
    """As ``benchmarks.ps.bags.DeepFM.batch``."""
    found: dict[str, Any] = {}
    keys = np.zeros((0, 1), np.int64)
    for number in range(FEATURES):
        lengths = random.integers(0, LONGEST + 1, size) if number < BAGS else np.ones(size, np.int64)
        keys = (random.zipf(1.2, lengths.sum()) % KEYS).astype(np.int64).reshape(-1, 1)
        found[f"f{number}"] = paddle.base.create_lod_tensor(keys, [lengths.tolist()], paddle.CPUPlace())
    return {**found, "label": (keys % 3 == 0).astype(np.float32), "numbers": np.zeros((size, NUMBERS), np.float32)}


def main() -> None:
    import paddle
    from paddle.distributed import fleet
    from paddle.distributed.fleet.base.distributed_strategy import DistributedStrategy

    # Its text needs a part of protobuf that no longer exists, and only a debug message shows it.
    DistributedStrategy.__repr__ = lambda self: "strategy"  # type: ignore[method-assign]
    paddle.enable_static()
    fleet.init(is_collective=False)
    loss = model(paddle)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    optimizer: Any = fleet.distributed_optimizer
    optimizer(paddle.optimizer.SGD(0.05), strategy).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    static, random = paddle.static, np.random.default_rng(1)
    executor = static.Executor(paddle.CPUPlace())
    executor.run(static.default_startup_program())
    fleet.init_worker()
    print("ready", flush=True)
    for line in sys.stdin:
        size, steps = map(int, line.split())
        work = [batch(paddle, random, size) for _ in range(steps)]
        start, cpu_s = time.perf_counter(), time.process_time()
        for one in work:
            executor.run(static.default_main_program(), feed=one, fetch_list=[loss])
        print("round", time.perf_counter() - start, time.process_time() - cpu_s, flush=True)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
