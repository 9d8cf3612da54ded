"""Recognise handwritten digits with plain PyTorch DistributedDataParallel.

Nothing in here knows about edl: the same file runs under `python`, `torchrun` and `python -m edl.launch`. All it does
for fault tolerance is what any long training does: write a checkpoint now and then, and continue from it when started.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SEED = 7


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, default=Path("runs/digits-torch"), help="shared by all nodes")
    parser.add_argument("--steps", type=int, default=400, help="global steps of the whole training")
    parser.add_argument("--batch", type=int, default=96, help="images per global step, over all ranks together")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--step-time", type=float, default=0.0, help="sleep this many seconds a step, to watch it")
    parser.add_argument("--step-log", type=Path, metavar="DIR", help="write one JSON line per finished step here")
    return parser.parse_args()


def told(name: str, default: int) -> int:
    """What the launcher told this process through the environment."""
    return int(os.environ.get(name) or default)


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


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write beside the old checkpoint, then rename: a crash at any moment leaves one complete file."""
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """How many steps are done: 0 without a checkpoint."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True, map_location=next(model.parameters()).device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
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
    torch.set_num_threads(1)  # this network is tiny: more threads only get into each other's way
    rank, world = told("RANK", 0), told("WORLD_SIZE", 1)  # without a launcher we are alone
    on_gpu = torch.cuda.device_count() >= told("LOCAL_WORLD_SIZE", 1)  # a card for each local rank, else all on CPU
    device = torch.device("cuda", told("LOCAL_RANK", 0)) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")

    train_x, train_y, test_x, test_y = (tensor.to(device) for tensor in load_images())
    model = build_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    checkpoint = options.workdir / "checkpoint.pt"
    # Everyone has loaded before anyone can finish a step and overwrite the file, because a step needs all ranks.
    done = load_checkpoint(checkpoint, model, optimizer)
    print(f"rank {rank} of {world} (process {os.getpid()}, {device}) starts after step {done}", flush=True)
    parallel = DistributedDataParallel(model) if dist.is_initialized() else model
    log_step = step_logger(options.step_log, rank, world)

    for step in range(done, options.steps):
        mine = my_images(step, options.batch, len(train_x), rank, world).to(device)
        loss = nn.functional.cross_entropy(parallel(train_x[mine]), train_y[mine])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # DDP averages the gradients over all ranks in here
        optimizer.step()
        log_step(step + 1, loss.item())
        if rank == 0 and ((step + 1) % options.checkpoint_every == 0 or step + 1 == options.steps):
            save_checkpoint(checkpoint, model, optimizer, step + 1)
            print(f"step {step + 1} of {options.steps}, world {world}, loss {loss.item():.4f}", flush=True)
        time.sleep(options.step_time)

    if rank == 0:
        with torch.no_grad():
            scores = model(test_x)
            final_loss = nn.functional.cross_entropy(scores, test_y).item()
            accuracy = (scores.argmax(1) == test_y).float().mean().item()
        print(f"final loss {final_loss:.4f} accuracy {accuracy:.4f}", flush=True)
        result = {"steps": options.steps, "loss": final_loss, "accuracy": accuracy, "world": world}
        (options.workdir / "result.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
