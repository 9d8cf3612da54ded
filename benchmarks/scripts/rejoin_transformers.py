"""``train_transformers.py`` with ``EDLCallback``: its state outlives each world."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from benchmarks.scripts.train_transformers import OUT, Tokens
from benchmarks.scripts.trainer_parts import arguments
from benchmarks.scripts.transformers_parts import StepLog
from edl.integrations.transformers import EDLCallback


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    elastic = EDLCallback(global_batch=16)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    settings = TrainingArguments(
        OUT, max_steps=args.steps, per_device_train_batch_size=8, save_strategy="no", logging_steps=100,
        report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=Tokens(), callbacks=[elastic, StepLog(args)])
    trainer.train()


if __name__ == "__main__":
    main()
