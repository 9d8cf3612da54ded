"""A loop with Accelerate in ``EDLLoop`` whose model FSDP2 shards, on the CPU. Writes a line for each step, the samples
of each step, and the trained model's numbers at the end."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader

from edl.integrations.accelerate import EDLLoop
from tests.process.workers import trainer_script
from tests.support.accelerate_on_cpu import shard_on_cpu

options = trainer_script.parser().parse_args()
"""``--steps`` is rounded down to whole epochs."""


def build() -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=50)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate, fsdp_plugin=plugin)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(options.dropout), nn.Linear(8, 1))
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
    decay = torch.optim.lr_scheduler.ExponentialLR(adam, 0.99)
    return {"accelerator": accelerator, "model": net, "optimizer": adam, "scheduler": decay}


def main() -> None:
    trainer_script.wait_until_free(options.folder)
    shard_on_cpu()
    torch.set_num_threads(1)
    rows: Any = trainer_script.Rows(options.samples)
    loader = DataLoader(rows, batch_size=options.batch, shuffle=True)
    loop = EDLLoop(build=build, loader=loader, global_batch=options.global_batch, done=0)
    per_epoch = -(-options.samples // options.global_batch)

    def train(accelerator: Accelerator) -> dict[str, Any]:
        rows.read = []  # without those of a step that was interrupted
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
                    trainer_script.log(
                        options, loop.state.done, accelerator.process_index, accelerator.num_processes, rows.read
                    )
                    rows.read = []
        whole = {name: one.full_tensor() for name, one in model.state_dict().items()}
        return {"rank": accelerator.process_index, "weights": whole, "rate": scheduler.get_last_lr()}

    ended = loop.run(train)
    trainer_script.write_result(options.folder, step=loop.state.done, **ended)


if __name__ == "__main__":
    main()
