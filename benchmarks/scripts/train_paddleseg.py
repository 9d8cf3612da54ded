"""PaddleSeg's own training function with its checkpoints and resume, as its ``tools/train.py`` calls it: FastSCNN on
small pictures. The learning rate's scheduler, which the library calls after each step, writes the step log."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddleseg.core import train
from paddleseg.datasets import Dataset
from paddleseg.models import FastSCNN
from paddleseg.transforms import Normalize, RandomHorizontalFlip

from benchmarks.scripts.step_writer import StepWriter

OUT = Path("out")


class LoggedDecay(paddle.optimizer.lr.PolynomialDecay):
    """Its count of steps is part of the optimizer's checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._log: StepWriter | None = None
        self._pause_s = args.pause_ms / 1000
        super().__init__(0.01, args.steps, end_lr=0, power=0.9)
        self._log = StepWriter(args.workdir)
        self._formed = 0

    def step(self, epoch: Any = None) -> None:
        super().step(epoch)
        if self._log is None:  # the first one is part of the construction
            return
        if not self._formed:
            formed = paddle.to_tensor([time.monotonic_ns()], dtype="int64")
            if dist.get_world_size() > 1:
                dist.broadcast(formed, src=0)
            self._formed = int(formed.numpy()[0])
            self._log.group(dist.get_rank(), dist.get_world_size(), self._formed)
        self._log.step(self.last_epoch)
        time.sleep(self._pause_s)


def arguments() -> argparse.Namespace:
    """The script's own command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="a folder with pictures and train.txt")
    parser.add_argument("--workdir", type=Path, required=True, help="step logs")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause-ms", type=float, default=10.0, help="sleep per step")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps between checkpoints")
    return parser.parse_args()


def last_checkpoint() -> str | None:
    """The newest folder ``iter_N`` of the output directory with both of its files."""
    kept = [one for one in OUT.glob("iter_*") if all((one / f"model.{end}").exists() for end in ("pdparams", "pdopt"))]
    return str(max(kept, key=lambda one: int(one.name.rpartition("_")[2]))) if kept else None


def main() -> None:
    args = arguments()
    paddle.seed(0)
    data = Dataset(
        "train", str(args.data), [RandomHorizontalFlip(), Normalize()], 2, train_path=str(args.data / "train.txt")
    )
    model = FastSCNN(num_classes=2, enable_auxiliary_loss=False)
    optimizer = paddle.optimizer.Momentum(LoggedDecay(args), parameters=model.parameters(), momentum=0.9)
    train(
        model, data, optimizer=optimizer, save_dir=str(OUT), iters=args.steps, batch_size=2,
        resume_model=last_checkpoint(), save_interval=args.checkpoint_every, keep_checkpoint_max=3,
        log_iters=args.steps,  # its log fails with losses that have no dimension, as in Paddle 3
        losses={"types": [paddle.nn.CrossEntropyLoss(axis=1)], "coef": [1]},  # its own multiplies floats by integers
    )  # fmt: skip


if __name__ == "__main__":
    main()
