"""Recognise handwritten digits with plain paddle.DataParallel.

Nothing in here knows about edl: the same file runs under `python`, `paddle.distributed.launch`, `python -m edl.launch`.
All it does for fault tolerance is what any long training does: write a checkpoint now and then, and continue from it.
"""

import argparse
import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import nn
from sklearn.datasets import load_digits

SEED = 7


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, default=Path("runs/digits-paddle"), help="shared by all nodes")
    parser.add_argument("--steps", type=int, default=400, help="global steps of the whole training")
    parser.add_argument("--batch", type=int, default=96, help="images per global step, over all ranks together")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--step-time", type=float, default=0.0, help="sleep this many seconds a step, to watch it")
    parser.add_argument("--step-log", type=Path, metavar="DIR", help="write one JSON line per finished step here")
    return parser.parse_args()


def told(name: str, default: int) -> int:
    """What the launcher told this process through the environment."""
    return int(os.environ.get(name) or default)


def load_images() -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """1797 real 8x8 images (they come with scikit-learn), every fifth for the test: train x, y, test x, y."""
    digits = load_digits()
    images = digits.images[:, None].astype("float32") / 16.0
    labels = digits.target.astype("int64")
    test = np.arange(len(labels)) % 5 == 0
    x, y = paddle.to_tensor(images), paddle.to_tensor(labels)
    return x[~test], y[~test], x[test], y[test]


def build_model() -> nn.Layer:
    paddle.seed(SEED)
    return nn.Sequential(
        nn.Conv2D(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2D(2), nn.Conv2D(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2D(2), nn.Flatten(), nn.Linear(32 * 2 * 2, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def my_images(step: int, batch: int, images: int, rank: int, world: int) -> NDArray[np.int64]:
    """Which training images this rank takes in this step: its share of `batch` images, the same for any world size.

    So a training that goes on with more or fewer ranks sees the same data. Each epoch has its own order.
    """
    epoch, place = divmod(step, images // batch)
    order = np.random.default_rng([SEED, epoch]).permutation(images)
    return order[place * batch : (place + 1) * batch][rank::world]


def save_checkpoint(path: Path, model: nn.Layer, optimizer: paddle.optimizer.Optimizer, step: int) -> None:
    """Write beside the old checkpoint, then rename: a crash at any moment leaves one complete file."""
    unfinished = path.with_suffix(".tmp")
    contents = io.BytesIO()
    state: Any = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    paddle.save(state, contents)
    with unfinished.open("wb") as file:
        file.write(contents.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load_checkpoint(path: Path, model: nn.Layer, optimizer: paddle.optimizer.Optimizer) -> int:
    """How many steps are done: 0 without a checkpoint."""
    if not path.exists():
        return 0
    saved = paddle.load(str(path))
    model.set_state_dict(saved["model"])
    optimizer.set_state_dict(saved["optimizer"])
    return int(saved["step"])


def step_logger(directory: Path | None, rank: int, world: int) -> Callable[[int, float], None]:
    """A function to call after each step; scripts/demo reads what it writes to measure recovery times."""
    if directory is None:
        return lambda step, loss: None
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / f"rank{rank}-{os.getpid()}.jsonl").open("a", buffering=1)
    fixed = {"rank": rank, "world": world, "node": told("GROUP_RANK", 0), "pid": os.getpid()}
    fixed["round"] = told("TORCHELASTIC_RESTART_COUNT", told("EDL_ROUND", 0))

    def log(step: int, loss: float) -> None:
        file.write(json.dumps({"t": time.monotonic(), "step": step, "loss": loss} | fixed) + "\n")

    return log


def main() -> None:
    options = read_arguments()
    options.workdir.mkdir(parents=True, exist_ok=True)
    # The launcher says who we are through the environment; without one we are alone. With one rank there is no group
    # (init_parallel_env does nothing), so DataParallel is left out as well.
    paddle.distributed.init_parallel_env()
    rank, world = paddle.distributed.get_rank(), paddle.distributed.get_world_size()

    train_x, train_y, test_x, test_y = load_images()
    model = build_model()
    optimizer = paddle.optimizer.Adam(2e-3, parameters=model.parameters())
    checkpoint = options.workdir / "checkpoint.pdparams"
    # Everyone has loaded before anyone can finish a step and overwrite the file, because a step needs all ranks.
    done = load_checkpoint(checkpoint, model, optimizer)
    print(f"rank {rank} of {world} (process {os.getpid()}, {train_x.place}) starts after step {done}", flush=True)
    parallel: Any = paddle.DataParallel(model) if world > 1 else model  # never wrap twice: that crashes Paddle

    log_step = step_logger(options.step_log, rank, world)

    for step in range(done, options.steps):
        mine = paddle.to_tensor(my_images(step, options.batch, len(train_x), rank, world))
        loss = nn.functional.cross_entropy(parallel(train_x[mine]), train_y[mine])
        loss.backward()  # DataParallel averages the gradients over all ranks in here
        optimizer.step()
        optimizer.clear_grad()
        log_step(step + 1, float(loss))
        if rank == 0 and ((step + 1) % options.checkpoint_every == 0 or step + 1 == options.steps):
            save_checkpoint(checkpoint, model, optimizer, step + 1)
            print(f"step {step + 1} of {options.steps}, world {world}, loss {float(loss):.4f}", flush=True)
        time.sleep(options.step_time)

    if rank == 0:
        with paddle.no_grad():
            scores = model(test_x)
            final_loss = float(nn.functional.cross_entropy(scores, test_y))
            accuracy = float((scores.argmax(1).numpy() == test_y.numpy()).mean())
        print(f"final loss {final_loss:.4f} accuracy {accuracy:.4f}", flush=True)
        result = {"steps": options.steps, "loss": final_loss, "accuracy": accuracy, "world": world}
        (options.workdir / "result.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
