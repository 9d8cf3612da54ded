"""Transformers' Trainer on a small model with random weights, as one writes it for torchrun."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Lines of numbers that count up."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        line = (torch.arange(16) + index) % 32
        return {"input_ids": line, "labels": line}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=str(folder / "out"),
            use_cpu=True,
            per_device_train_batch_size=8,
            max_steps=6,
            save_steps=3,
            learning_rate=1e-3,
            report_to=[],
            disable_tqdm=True,
            seed=0,
        ),
        train_dataset=Tokens(),
    )
    done = trainer.train()
    seen = {
        "mode": str(trainer.args.parallel_mode),
        "rank": trainer.args.process_index,
        "world": trainer.args.world_size,
        "steps": done.global_step,
        "loss": done.training_loss,
        "saved": sorted(path.name for path in (folder / "out").glob("checkpoint-*")),
    }
    (folder / f"rank-{seen['rank']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
