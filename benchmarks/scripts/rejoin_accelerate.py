"""``train_accelerate.py`` with ``EDLLoop``: its state outlives each world."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from benchmarks.scripts.trainer_parts import BATCH, Log, arguments, loader, net
from edl.integrations.accelerate import EDLLoop

args = arguments()
log = Log(args)
torch.set_num_threads(1)
plain = net()
loop = EDLLoop(
    model=plain, optimizer=torch.optim.SGD(plain.parameters(), lr=0.01), loader=loader(), global_batch=2 * BATCH, step=0
)


def train() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, batches = loop.prepare(accelerator)
    log.world(accelerator.process_index, accelerator.num_processes)
    for _ in loop.epochs(-(-args.steps // len(batches))):
        for (rows,) in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(rows).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                loop.state.step += 1
                log.step(loop.state.step)


loop.run(train)
