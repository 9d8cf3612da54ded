"""A loop with Accelerate in ``EDLLoop``. Writes a line for each step, the samples of each step, and the trained model's
numbers at the end."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

from edl.integrations.accelerate import EDLLoop


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60, help="rounded down to whole epochs")
    parser.add_argument("--batch", type=int, default=4, help="samples of each worker at once")
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--dropout", type=float, default=0.0)
    return parser.parse_args()


options = read_arguments()


class Rows(Dataset[torch.Tensor]):
    """Rows of numbers. Notes which of them were read."""

    def __init__(self) -> None:
        self.rows = torch.randn(options.samples, 8, generator=torch.Generator().manual_seed(3))
        self.read: list[int] = []

    def __len__(self) -> int:
        return int(options.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return self.rows[index]


def log(accelerator: Accelerator, step: int, rows: Rows) -> None:
    """Write a line for a step, in the form that the harness reads, and the step's samples."""
    number = int(os.environ.get("EDL_ROUND", "1"))
    node = os.environ.get("EDL_NODE_ID", "none")
    rank = accelerator.process_index
    line = {"t": time.monotonic(), "step": step, "rank": rank, "world": accelerator.num_processes, "round": number,
            "pid": os.getpid(), "node": node}  # fmt: skip
    place = f"{node}.{number}.{rank}.{os.getpid()}"
    with (options.folder / f"{place}.steps").open("a") as file:
        file.write(json.dumps(line) + "\n")
    with (options.folder / f"{place}.samples").open("a") as file:
        file.write(json.dumps([step, rows.read]) + "\n")
    rows.read = []
    if not (options.folder / "hurry").exists():
        time.sleep(options.pause)


def main() -> None:
    while (options.folder / "held").exists():  # a replacement that takes its time
        time.sleep(0.05)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = Rows()
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(options.dropout), nn.Linear(8, 1))
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
    decay = torch.optim.lr_scheduler.ExponentialLR(adam, 0.99)
    loader = DataLoader(rows, batch_size=options.batch, shuffle=True)
    loop = EDLLoop(model=net, optimizer=adam, scheduler=decay, loader=loader, global_batch=options.global_batch,
                   done=0)  # fmt: skip
    per_epoch = -(-options.samples // options.global_batch)

    def train() -> Accelerator:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate)
        model, optimizer, batches, scheduler = loop.prepare(accelerator)
        for _ in loop.epochs(options.steps // per_epoch):
            model.train()
            for batch in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(((model(batch) - batch.sum(1, keepdim=True)) ** 2).mean())
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    loop.state.done += 1
                    log(accelerator, loop.state.done, rows)
        return accelerator

    accelerator = loop.run(train)
    numbers = torch.cat([value.flatten() for value in net.state_dict().values()]).double()
    result = {"step": loop.state.done, "sum": float(numbers.sum()), "norm": float(numbers.norm()),
              "rate": decay.get_last_lr()}  # fmt: skip
    (options.folder / f"rank-{accelerator.process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
