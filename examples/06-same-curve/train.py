"""Recognise handwritten digits with the same loss curve at any size of the job.

`--global-batch` keeps each step's samples, however many workers share them; `edl.accumulate` weighs their gradients so
that the step is the same. With `--logical-ranks` it is the same bit for bit. Without either the batch grows with the
workers, and `--lr-rule` says what becomes of the learning rate. All these are options of `python -m edl.launch`.
"""

import argparse
import csv
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import edl.torch as edl


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curve", type=Path, default=Path("runs/same-curve.csv"), help="rank 0 writes the losses here")
    parser.add_argument("--steps", type=int, default=200, help="steps of the whole training")
    parser.add_argument("--batch", type=int, default=32, help="images that a worker takes at once")
    parser.add_argument("--lr", type=float, default=0.05, help="for the size that the job begins with")
    parser.add_argument("--step-time", type=float, default=0.0, help="sleep this many seconds a step, to watch it")
    return parser.parse_args()


def main() -> None:
    options = read_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    data = torch.utils.data.TensorDataset(images, torch.tensor(digits.target))
    # The last step of an epoch is smaller; "exact" adds nothing to it, whatever the number of workers.
    sampler = edl.EDLDistributedSampler(data, shuffle=True, seed=3, tail="exact")
    loader = edl.DataLoader(data, batch_size=options.batch, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    edl.scale_lr(optimizer)  # each step with the LR times the factor of --lr-rule
    state = edl.State(model=model, optimizer=optimizer, loader=loader, noise=edl.AdaScale(), step=0, samples=0)

    @edl.run
    def train(state: edl.State) -> None:
        """Called for each new world."""
        here = edl.context()
        print(f"rank {here.rank} of {here.world_size} goes on after step {state.step}", flush=True)
        ddp = edl.parallel(model)
        while state.step < options.steps:
            for step in edl.accumulate(loader, ddp):  # the rest of the epoch
                for x, y in step:  # this worker's micro-batches
                    step.backward(nn.functional.cross_entropy(ddp(x), y))
                optimizer.step()
                optimizer.zero_grad()
                state.step += 1
                state.samples += step.samples
                loss = step.mean_loss()  # over all samples of the step, the same on all workers
                if here.rank == 0:
                    append(options.curve, [state.step, state.samples, here.world_size, loss.hex(), f"{loss:.6f}"])
                state.commit()
                if state.step >= options.steps:
                    break
                time.sleep(options.step_time)

    train(state)
    if edl.context().rank == 0:
        with torch.no_grad():
            accuracy = (model(images).argmax(1) == torch.tensor(digits.target)).float().mean().item()
        print(f"{state.step} steps, {state.samples} samples, accuracy {accuracy:.4f}", flush=True)


def append(file: Path, row: list[object]) -> None:
    """A step that is done again after a fault has two lines; the later one counts."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", newline="") as out:
        csv.writer(out).writerow(row)


if __name__ == "__main__":
    main()
