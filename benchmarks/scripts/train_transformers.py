"""The ``Trainer`` of Transformers with its own checkpoints and resume, as one writes it for torchrun: a tiny GPT-2 on
random tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.scripts.trainer_parts import arguments
from benchmarks.scripts.transformers_parts import StepLog

OUT = "out"


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same in each process."""

    def __init__(self) -> None:
        self._rows = torch.randint(0, 256, (4096, 32), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    settings = TrainingArguments(
        OUT, max_steps=args.steps, per_device_train_batch_size=8, save_steps=args.checkpoint_every, save_total_limit=3,
        logging_steps=100, report_to="none", disable_tqdm=True, use_cpu=True, ddp_backend="gloo",
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=Tokens(), callbacks=[StepLog(args)])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(OUT) if Path(OUT).exists() else None)


if __name__ == "__main__":
    main()
