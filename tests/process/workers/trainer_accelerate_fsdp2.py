"""A loop with Accelerate in ``EDLLoop`` whose model FSDP2 shards, on the CPU. Writes a line for each step, the samples
of each step, and the trained model's numbers at the end."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader

from edl.integrations.accelerate import EDLLoop
from tests.process.workers import trainer_script
from tests.process.workers.trainer_accelerate import options, parts, train_epochs
from tests.support.accelerate_on_cpu import shard_on_cpu


def build() -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=50)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate, fsdp_plugin=plugin)
    return {"accelerator": accelerator, **parts()}


def main() -> None:
    trainer_script.wait_until_free(options.folder)
    shard_on_cpu()
    torch.set_num_threads(1)
    rows: Any = trainer_script.Rows(options.samples)
    loader = DataLoader(rows, batch_size=options.batch, shuffle=True)
    loop = EDLLoop(build=build, loader=loader, global_batch=options.global_batch, done=0)

    def train(accelerator: Accelerator) -> dict[str, Any]:
        model, scheduler = train_epochs(loop, rows, accelerator)
        whole = {name: one.full_tensor() for name, one in model.state_dict().items()}
        return {"rank": accelerator.process_index, "weights": whole, "rate": scheduler.get_last_lr()}

    ended = loop.run(train)
    trainer_script.write_result(options.folder, step=loop.state.done, **ended)


if __name__ == "__main__":
    main()
