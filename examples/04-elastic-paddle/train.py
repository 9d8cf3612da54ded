"""Recognise handwritten digits, elastically: the training of 02-digits-paddle with edl.paddle.

When workers come or go, those that live keep their process and go on from the last `commit()`. Start it with
`python -m edl.launch`; with plain `python` it trains alone. What is different from 02-digits-paddle: `State` and `run`
instead of `init_parallel_env` and a checkpoint of its own, and `edl.parallel` instead of `paddle.DataParallel`.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import nn
from sklearn.datasets import load_digits

import edl.paddle as edl

SEED = 7


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, default=Path("runs/elastic-paddle"), help="where result.json goes")
    parser.add_argument("--steps", type=int, default=400, help="global steps of the whole training")
    parser.add_argument("--batch", type=int, default=96, help="images per global step, over all ranks together")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS", help="to --checkpoint-dir; 0: never")
    parser.add_argument("--step-time", type=float, default=0.0, help="sleep this many seconds a step, to watch it")
    parser.add_argument("--step-log", type=Path, metavar="DIR", help="write one JSON line per finished step here")
    return parser.parse_args()


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


@contextmanager
def step_logger(directory: Path | None) -> Iterator[Callable[[int, float], None]]:
    """A function to call after each step, for this round; scripts/demo reads what it writes."""
    if directory is None:
        yield lambda step, loss: None
        return
    here = edl.context()
    directory.mkdir(parents=True, exist_ok=True)
    fixed = {"rank": here.rank, "world": here.world_size, "round": here.round, "pid": os.getpid()}
    fixed["node"] = int(os.environ.get("GROUP_RANK", "0"))
    with (directory / f"rank{here.rank}-{os.getpid()}.jsonl").open("a", buffering=1) as file:
        yield lambda step, loss: print(
            json.dumps({"t": time.monotonic(), "step": step, "loss": loss} | fixed), file=file
        )


def main() -> None:
    options = read_arguments()

    # Done once in the life of a process, whatever becomes of the others.
    train_x, train_y, test_x, test_y = load_images()
    model = build_model()
    optimizer = paddle.optimizer.Adam(2e-3, parameters=model.parameters())
    state = edl.State(model=model, optimizer=optimizer, step=0)

    @edl.run
    def train(state: edl.State) -> None:
        """Called for each new world, with the state as it was at the last commit."""
        here = edl.context()
        print(
            f"rank {here.rank} of {here.world_size} (process {os.getpid()}, round {here.round}, {train_x.place}) "
            f"goes on after step {state.step}",
            flush=True,
        )
        parallel = edl.parallel(model)  # also in a world of one
        with step_logger(options.step_log) as log_step:
            while state.step < options.steps:
                indices = my_images(state.step, options.batch, len(train_x), here.rank, here.world_size)
                mine = paddle.to_tensor(indices)
                loss = nn.functional.cross_entropy(parallel(train_x[mine]), train_y[mine])
                loss.backward()  # gradients are averaged over all ranks before this returns
                optimizer.step()
                optimizer.clear_grad()
                state.step += 1
                log_step(state.step, float(loss))
                if here.rank == 0 and state.step % 10 == 0:
                    print(
                        f"step {state.step} of {options.steps}, world {here.world_size}, loss {float(loss):.4f}",
                        flush=True,
                    )
                if options.save_every and state.step % options.save_every == 0:
                    state.save()  # a commit that is written to --checkpoint-dir, too
                else:
                    state.commit()  # what was done up to here is not done again
                time.sleep(options.step_time)

    train(state)

    # Once the training is through, in every worker of the last world.
    if edl.context().rank == 0:
        with paddle.no_grad():
            scores = model(test_x)
            final_loss = float(nn.functional.cross_entropy(scores, test_y))
            accuracy = float((scores.argmax(1).numpy() == test_y.numpy()).mean())
        print(f"final loss {final_loss:.4f} accuracy {accuracy:.4f}", flush=True)
        result = {"steps": state.step, "loss": final_loss, "accuracy": accuracy, "world": edl.context().world_size}
        options.workdir.mkdir(parents=True, exist_ok=True)
        (options.workdir / "result.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
