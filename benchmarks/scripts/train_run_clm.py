"""A language model from a text file, in the manner of Hugging Face's example ``run_clm``: its arguments, ``datasets``,
blocks of tokens, and ``Trainer`` with the last checkpoint of the output directory. A token is a byte, because a
tokenizer would have to be downloaded."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.scripts.transformers_parts import StepLog


@dataclass
class ModelArguments:
    """Which model to make."""

    model_type: str = field(default="gpt2")
    config_overrides: str = field(default="", metadata={"help": "such as n_layer=2,n_head=2"})


@dataclass
class DataArguments:
    """What to train it on."""

    train_file: str = field()
    block_size: int = field(default=32, metadata={"help": "tokens in a row"})


@dataclass
class LogArguments:
    """What the benchmark adds: the step log, and its last step."""

    workdir: Path = field()
    steps: int = field(default=200)
    pause_ms: float = field(default=10.0)


def encode(examples: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    """Each line as its bytes."""
    return {"input_ids": [list(text.encode() + b"\n") for text in examples["text"]]}


def blocks(size: int) -> Any:
    """A function that joins rows of tokens and cuts them into blocks of this size; the rest is dropped."""

    def cut(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        tokens = list(itertools.chain.from_iterable(examples["input_ids"]))
        rows = [tokens[begin : begin + size] for begin in range(0, len(tokens) - size + 1, size)]
        return {"input_ids": rows, "labels": [list(row) for row in rows]}

    return cut


def last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint of an output directory that may not exist yet."""
    return get_last_checkpoint(str(folder)) if folder.is_dir() else None


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments, LogArguments))
    model_args, data_args, training_args, log_args = parser.parse_args_into_dataclasses()
    training_args.max_steps = log_args.steps
    torch.set_num_threads(1)
    set_seed(training_args.seed)
    raw = load_dataset("text", data_files={"train": data_args.train_file})["train"]
    with training_args.main_process_first(desc="encode and group"):
        tokens = raw.map(encode, batched=True, remove_columns=raw.column_names)
        rows = tokens.map(blocks(data_args.block_size), batched=True)
    config = CONFIG_MAPPING[model_args.model_type]()
    config.update_from_string(model_args.config_overrides)
    trainer = Trainer(
        AutoModelForCausalLM.from_config(config), training_args, train_dataset=rows,
        data_collator=default_data_collator, callbacks=[StepLog(argparse.Namespace(**vars(log_args)))],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=last_checkpoint(Path(training_args.output_dir)))
    trainer.save_model()


if __name__ == "__main__":
    main()
