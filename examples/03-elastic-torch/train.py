"""Recognise handwritten digits, elastically: the training of 01-digits-torch with edl.torch.

When workers come or go, those that live keep their process and go on from the last `commit()`. Start it with
`python -m edl.launch`; with plain `python` it trains alone. What is different from 01-digits-torch: `State` and `run`
instead of `init_process_group` and a checkpoint of its own.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import edl.torch as edl

SEED = 7


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, default=Path("runs/elastic-torch"), help="where result.json goes")
    parser.add_argument("--steps", type=int, default=400, help="global steps of the whole training")
    parser.add_argument("--batch", type=int, default=96, help="images per global step, over all ranks together")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS", help="to --checkpoint-dir; 0: never")
    parser.add_argument("--step-time", type=float, default=0.0, help="sleep this many seconds a step, to watch it")
    parser.add_argument("--step-log", type=Path, metavar="DIR", help="write one JSON line per finished step here")
    return parser.parse_args()


def load_images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1797 real 8x8 images (they come with scikit-learn), every fifth for the test: train x, y, test x, y."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64)
    test = torch.arange(len(labels)) % 5 == 0
    return images[~test], labels[~test], images[test], labels[test]


def build_model() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 2 * 2, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def my_images(step: int, batch: int, images: int, rank: int, world: int) -> Tensor:
    """Which training images this rank takes in this step: its share of `batch` images, the same for any world size.

    So a training that goes on with more or fewer ranks sees the same data. Each epoch has its own order.
    """
    epoch, place = divmod(step, images // batch)
    order = np.random.default_rng([SEED, epoch]).permutation(images)
    return torch.from_numpy(order[place * batch : (place + 1) * batch][rank::world])


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
    torch.set_num_threads(1)  # this network is tiny: more threads only get into each other's way
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")  # workers may share a GPU

    # Done once in the life of a process, whatever becomes of the others.
    train_x, train_y, test_x, test_y = (tensor.to(device) for tensor in load_images())
    model = build_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    state = edl.State(model=model, optimizer=optimizer, step=0)

    @edl.run
    def train(state: edl.State) -> None:
        """Called for each new world, with the state as it was at the last commit."""
        here = edl.context()
        print(
            f"rank {here.rank} of {here.world_size} (process {os.getpid()}, round {here.round}, {device}) "
            f"goes on after step {state.step}",
            flush=True,
        )
        parallel = edl.parallel(model)  # a new one for each world
        with step_logger(options.step_log) as log_step:
            while state.step < options.steps:
                mine = my_images(state.step, options.batch, len(train_x), here.rank, here.world_size).to(device)
                loss = nn.functional.cross_entropy(parallel(train_x[mine]), train_y[mine])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # gradients are averaged over all ranks in here
                optimizer.step()
                state.step += 1
                log_step(state.step, loss.item())
                if here.rank == 0 and state.step % 10 == 0:
                    print(
                        f"step {state.step} of {options.steps}, world {here.world_size}, loss {loss.item():.4f}",
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
        with torch.no_grad():
            scores = model(test_x)
            final_loss = nn.functional.cross_entropy(scores, test_y).item()
            accuracy = (scores.argmax(1) == test_y).float().mean().item()
        print(f"final loss {final_loss:.4f} accuracy {accuracy:.4f}", flush=True)
        result = {"steps": state.step, "loss": final_loss, "accuracy": accuracy, "world": edl.context().world_size}
        options.workdir.mkdir(parents=True, exist_ok=True)
        (options.workdir / "result.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
