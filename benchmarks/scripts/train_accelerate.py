"""A loop with Accelerate, with its own checkpoints and resume, as one writes it for torchrun."""

from __future__ import annotations

import shutil

import torch
from accelerate import Accelerator

from benchmarks.scripts.trainer_parts import CHECKPOINT_EVERY, Log, arguments, loader, net

args = arguments()
log = Log(args)
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
plain = net()
model, optimizer, batches = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.01), loader())
log.world(accelerator.process_index, accelerator.num_processes)
kept = args.workdir / "checkpoint"
step = 0
if kept.exists():
    accelerator.load_state(str(kept))
    step = int((kept / "step").read_text())
while step < args.steps:
    batches.set_epoch(step // len(batches))
    for (rows,) in accelerator.skip_first_batches(batches, step % len(batches)):
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        log.step(step)
        if step % CHECKPOINT_EVERY == 0:
            draft = args.workdir / f"draft-{step}"
            accelerator.save_state(str(draft))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (draft / "step").write_text(str(step))
                shutil.rmtree(kept, ignore_errors=True)
                draft.rename(kept)
