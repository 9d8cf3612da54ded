"""The same as ``train_torch.py`` with paddle.DataParallel: a small MLP on gloo, checkpoints, resume."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn

from benchmarks.scripts.step_writer import StepWriter

CHECKPOINT_EVERY = 5


def arguments() -> argparse.Namespace:
    """The script's own command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workdir", type=Path, required=True, help="step logs and the checkpoint")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause-ms", type=float, default=10.0, help="sleep per step")
    return parser.parse_args()


def load(path: Path, model: nn.Layer) -> int:
    """Restore the model; returns the number of steps that it has been trained for, 0 without a checkpoint."""
    if not path.exists():
        return 0
    saved = paddle.load(str(path))
    model.set_state_dict(saved["model"])
    return int(saved["step"])


def save(path: Path, model: nn.Layer, step: int) -> None:
    """Replace the checkpoint atomically, so that a kill never leaves half a file."""
    draft = path.with_suffix(f".{os.getpid()}")
    state: dict[str, Any] = {"model": model.state_dict(), "step": step}
    paddle.save(state, str(draft))
    os.replace(draft, path)


def main() -> None:
    args = arguments()
    log = StepWriter(args.workdir)
    paddle.device.set_device("cpu")
    dist.init_parallel_env()
    rank, world = dist.get_rank(), dist.get_world_size()

    paddle.seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    checkpoint = args.workdir / "checkpoint.pdparams"
    begin = load(checkpoint, model) if rank == 0 else 0
    common = paddle.to_tensor([time.monotonic_ns(), begin], dtype="int64")
    if world > 1:  # Paddle creates no group for a single worker
        dist.broadcast(common, src=0)
    formed, begin = (int(value) for value in common.numpy())
    log.group(rank, world, formed)

    parallel = paddle.DataParallel(model) if world > 1 else model  # broadcasts rank 0's weights
    optimizer = paddle.optimizer.SGD(learning_rate=0.01, parameters=parallel.parameters())
    for step in range(begin + 1, args.steps + 1):
        inputs = paddle.randn([16, 32])
        loss = parallel(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        log.step(step)
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            save(checkpoint, model, step)
        time.sleep(args.pause_ms / 1000)


if __name__ == "__main__":
    main()
