"""Transformers' ``Trainer`` with ``EDLCallback``: a small GPT-2 with random weights. Writes a line for each step, the
samples of each step, and the trained model's numbers at the end."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from edl.integrations.transformers import EDLCallback


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4, help="samples of each worker at once")
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--without-edl", action="store_true", help="the trainer's own checkpoints instead")
    parser.add_argument("--save-steps", type=int, default=0)
    return parser.parse_args()


options = read_arguments()


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Lines of numbers that count up. Notes which of them were read."""

    read: ClassVar[list[int]] = []

    def __len__(self) -> int:
        return int(options.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        line = (torch.arange(16) * (1 + index % 3) + index) % 32
        return {"input_ids": line, "labels": line}


class Log(TrainerCallback):  # type: ignore[misc]
    """Writes a line for each step, in the form that the harness reads, and the step's samples."""

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        number = int(os.environ.get("EDL_ROUND", "1"))
        node = os.environ.get("EDL_NODE_ID", "none")
        line = {"t": time.monotonic(), "step": state.global_step, "rank": args.process_index, "world": args.world_size,
                "round": number, "pid": os.getpid(), "node": node}  # fmt: skip
        place = f"{node}.{number}.{args.process_index}.{os.getpid()}"
        with (options.folder / f"{place}.steps").open("a") as file:
            file.write(json.dumps(line) + "\n")
        with (options.folder / f"{place}.samples").open("a") as file:
            file.write(json.dumps([state.global_step, Tokens.read]) + "\n")
        Tokens.read = []
        if not (options.folder / "hurry").exists():
            time.sleep(options.pause)


def main() -> None:
    while (options.folder / "held").exists():  # a replacement that takes its time
        time.sleep(0.05)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    callbacks = [Log()] if options.without_edl else [EDLCallback(global_batch=options.global_batch), Log()]
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=options.dropout, embd_pdrop=options.dropout, attn_pdrop=options.dropout,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(options.folder / "out"),
        use_cpu=True,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        max_steps=options.steps,
        save_strategy="steps" if options.save_steps else "no",
        save_steps=options.save_steps or 500,
        logging_steps=10,
        learning_rate=1e-2,
        adam_epsilon=1e-5,  # the gradient of the keys' bias is 0 but for rounding, which Adam would make steps of
        warmup_steps=5,
        lr_scheduler_type="cosine",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Tokens(), callbacks=callbacks)
    resume = options.without_edl and any((options.folder / "out").glob("checkpoint-*"))
    done = trainer.train(resume_from_checkpoint=resume)
    numbers = torch.cat([value.flatten() for value in trainer.model.state_dict().values()]).double()
    result = {"step": done.global_step, "loss": done.training_loss, "sum": float(numbers.sum()),
              "norm": float(numbers.norm()), "rate": trainer.lr_scheduler.get_last_lr() if trainer.lr_scheduler else [],
              "logs": [log["loss"] for log in trainer.state.log_history if "loss" in log]}  # fmt: skip
    (options.folder / f"rank-{trainer.args.process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
