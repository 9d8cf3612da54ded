"""Many groups of Paddle's on the CPU, one after the other, two of them side by side each time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import paddle
import paddle.distributed as dist

TIMES = 5


def total(group: dist.communication.group.Group | None, rank: int) -> int:
    """Sum of the ranks of a group."""
    value = paddle.to_tensor([rank])
    dist.all_reduce(value, group=group)
    return int(value.numpy()[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    paddle.set_device("cpu")
    dist.init_parallel_env()
    rank, world = dist.get_rank(), dist.get_world_size()
    sums = []
    for _ in range(TIMES):
        everybody = dist.new_group(list(range(world)))
        halves = [dist.new_group(list(range(first, world, 2))) for first in (0, 1)]
        sums.append([total(everybody, rank), total(halves[rank % 2], rank)])
    (folder / f"rank-{rank}.json").write_text(json.dumps({"rank": rank, "sums": sums}))


if __name__ == "__main__":
    main()
