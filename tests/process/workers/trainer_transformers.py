"""Transformers' ``Trainer`` with ``EDLCallback``: a small GPT-2 with random weights. Writes a line for each step, the
samples of each step, and the trained model's numbers at the end."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from edl.integrations.transformers import EDLCallback
from tests.process.workers import trainer_script

parser = trainer_script.parser()
parser.add_argument("--without-edl", action="store_true", help="the trainer's own checkpoints instead")
parser.add_argument("--save-steps", type=int, default=40, help="0: the trainer saves no checkpoints of its own")
options = parser.parse_args()


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
        trainer_script.log(options, state.global_step, args.process_index, args.world_size, Tokens.read)
        Tokens.read = []


def gpt() -> GPT2LMHeadModel:
    """A model with random weights."""
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=options.dropout, embd_pdrop=options.dropout, attn_pdrop=options.dropout,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def arguments(**more: Any) -> TrainingArguments:
    """The trainer's arguments; ``more``: further ones."""
    return TrainingArguments(
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
        **more,
    )


def write(trainer: Trainer, done: Any, weights: Any) -> None:
    """Write how the training has ended."""
    trainer_script.write_result(
        options.folder,
        trainer.args.process_index,
        done.global_step,
        weights,
        loss=done.training_loss,
        rate=trainer.lr_scheduler.get_last_lr() if trainer.lr_scheduler else [],
        logs=[log["loss"] for log in trainer.state.log_history if "loss" in log],
    )


def main() -> None:
    trainer_script.wait_until_free(options.folder)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    callbacks = [Log()] if options.without_edl else [EDLCallback(global_batch=options.global_batch), Log()]
    trainer = Trainer(model=gpt(), args=arguments(), train_dataset=Tokens(), callbacks=callbacks)
    resume = options.without_edl and any((options.folder / "out").glob("checkpoint-*"))
    done = trainer.train(resume_from_checkpoint=resume)
    write(trainer, done, trainer.model.state_dict())


if __name__ == "__main__":
    main()
