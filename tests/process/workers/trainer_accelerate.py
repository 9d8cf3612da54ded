"""A loop with Accelerate in ``EDLLoop``. Writes a line for each step, the samples of each step, and the trained model's
numbers at the end."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from edl.integrations.accelerate import EDLLoop
from tests.process.workers import trainer_script

options = trainer_script.parser().parse_args()
"""``--steps`` is rounded down to whole epochs."""


def parts() -> dict[str, Any]:
    """What is trained, the same in each process."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(options.dropout), nn.Linear(8, 1))
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return {"model": net, "optimizer": adam, "scheduler": torch.optim.lr_scheduler.ExponentialLR(adam, 0.99)}


def train_epochs(loop: EDLLoop, rows: Any, accelerator: Accelerator) -> tuple[Any, Any]:
    """Train in one world until the end; returns the prepared model and scheduler."""
    model, optimizer, batches, scheduler = loop.prepare(accelerator)
    for _ in loop.epochs(options.steps // -(-options.samples // options.global_batch)):
        model.train()
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(((model(batch) - batch.sum(1, keepdim=True)) ** 2).mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                loop.state.done += 1
                rank, world = accelerator.process_index, accelerator.num_processes
                trainer_script.log(options, loop.state.done, rank, world, rows.read)
                rows.read = []
    return model, scheduler


def main() -> None:
    trainer_script.wait_until_free(options.folder)
    torch.set_num_threads(1)
    trained = parts()
    rows: Any = trainer_script.Rows(options.samples)
    loader = DataLoader(rows, batch_size=options.batch, shuffle=True)
    loop = EDLLoop(**trained, loader=loader, global_batch=options.global_batch, done=0)

    def train() -> Accelerator:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate)
        train_epochs(loop, rows, accelerator)
        return accelerator

    accelerator = loop.run(train)
    weights, rate = trained["model"].state_dict(), trained["scheduler"].get_last_lr()
    trainer_script.write_result(options.folder, accelerator.process_index, loop.state.done, weights, rate=rate)


if __name__ == "__main__":
    main()
