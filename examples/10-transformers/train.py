"""Transformers' Trainer, elastically: a small GPT-2 with random weights learns to count. Nothing is downloaded."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from edl.integrations.transformers import EDLCallback


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Lines of numbers that count up, in steps of one to three."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        line = (torch.arange(16) * (1 + index % 3) + index) % 32
        return {"input_ids": line, "labels": line}


def main() -> None:
    elastic = EDLCallback(global_batch=32)  # before TrainingArguments
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    args = TrainingArguments(
        output_dir="runs/transformers", per_device_train_batch_size=8, num_train_epochs=10, learning_rate=1e-3,
        logging_steps=20, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=Counting(), callbacks=[elastic])
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model()


if __name__ == "__main__":
    main()
