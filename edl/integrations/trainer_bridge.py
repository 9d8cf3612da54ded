"""One ``Trainer`` of Transformers through all worlds of a job.

In each world the trainer gets a new ``Accelerator`` on the group that edl has formed, and ``Trainer.train`` is called
again. It continues as from a checkpoint, but reads from what edl has restored: the methods that would read files are
replaced while it trains.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import TrainOutput

import edl.torch as edl
from edl.errors import StateError
from edl.integrations.replacing import replacing
from edl.integrations.step_batches import FixedStepLoader, step_loader
from edl.integrations.step_boundary import StepBoundary
from edl.integrations.step_split import StepSplit, split_in_world
from edl.integrations.trainer_progress import TrainerProgress
from edl.integrations.trainer_world import enter_world, is_sharded, place, shard

Train = Callable[..., TrainOutput]


class TrainerBridge:
    """Trains one trainer; created when ``trainer.train()`` is called."""

    def __init__(self, trainer: Any, train: Train, *, global_batch: int, copy_every: int, save_every: int) -> None:
        """``train``: the trainer's own method. Raises ``StateError`` for a trainer that cannot continue."""
        refuse(trainer)
        self._trainer = trainer
        self._train = train
        self._global_batch = global_batch
        self._accumulation: int = trainer.args.gradient_accumulation_steps
        self._optimizer: Any = None
        self._progress = TrainerProgress(trainer)
        numbers = edl.RandomState()
        self._boundary = StepBoundary(numbers, save_every)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._sharded = is_sharded(trainer.args)
        trained: dict[str, Any] = {}
        if not self._sharded:
            optimizer = trainer.create_optimizer()
            self._optimizer = getattr(optimizer, "optimizer", optimizer)  # without Accelerate's wrapper
            trained = {"model": trainer.model, "optimizer": self._optimizer}
        self.state = edl.State(
            build=self._shard if self._sharded else None, copy_every=copy_every, **trained, progress=self._progress,
            random=numbers,
        )  # fmt: skip

    def run(self, resume: Any, ignore_keys: Any) -> TrainOutput:
        """Train to the end, through all worlds. ``resume``: where to begin if no commit is in memory."""

        @edl.run
        def in_world(_: edl.State) -> TrainOutput:
            return self._in_world(resume, ignore_keys)

        output: TrainOutput = in_world(self.state)
        return output

    # --- one world ---------------------------------------------------------------------------------------------------

    def _shard(self, _: Any) -> dict[str, Any]:
        """Called in each world before the state is restored, if the model is sharded."""
        self._optimizer = None  # its parameters are those of the last world's model
        model, self._optimizer = shard(self._trainer)
        return {"model": model, "optimizer": self._optimizer}

    def _in_world(self, resume: Any, ignore_keys: Any) -> TrainOutput:
        trainer, progress = self._trainer, self._progress
        self._boundary.enter(0)
        if not self._sharded:
            enter_world(trainer)
            place(trainer, self._optimizer)
        if progress.output:
            return self._already_finished()
        split = self._split()
        trainer.args.gradient_accumulation_steps = split.accumulation
        replaced: dict[str, Any] = {
            "get_train_dataloader": self._loader_maker(trainer.get_train_dataloader, split),
            "get_batch_samples": self._at_boundaries(trainer.get_batch_samples),
            "model_init": None,  # the model exists, and is restored
        }
        options: dict[str, Any] = {}
        if progress.restored is not None:
            position = progress.position()
            self._boundary.committed = position["global_step"]
            resume = self._write_position(position)
            replaced |= self._instead_of_reading()
            # Else each world would begin its epoch again, and with an evaluation that early stopping counts.
            options = {"ignore_data_skip": False, "eval_on_start": False}
        try:
            with replacing(trainer, replaced), replacing(trainer.args, options):
                output = self._train(trainer, resume_from_checkpoint=resume, ignore_keys_for_eval=ignore_keys)
        finally:
            self._forget_folder()
        progress.finish(output)
        self._boundary.finish(self.state)
        return output

    def _already_finished(self) -> TrainOutput:
        trainer = self._trainer
        trainer.state = TrainerState(**self._progress.position())
        trainer.state.is_local_process_zero = trainer.is_local_process_zero()
        trainer.state.is_world_process_zero = trainer.is_world_process_zero()
        return self._progress.result()

    def _split(self) -> StepSplit:
        here = edl.context()
        return split_in_world(
            self._progress, here.rank, here.world_size, given=self._global_batch or edl.settings().global_batch,
            micro_batch=self._trainer.args.train_batch_size, accumulation=self._accumulation,
        )  # fmt: skip

    def _loader_maker(self, original: Callable[[], DataLoader[Any]], split: StepSplit) -> Callable[[], FixedStepLoader]:
        args = self._trainer.args

        def make() -> FixedStepLoader:
            # A sampler that groups by length depends on the accumulation: with this world's it would be another order.
            with replacing(args, {"gradient_accumulation_steps": self._accumulation}):
                given = original()
            return step_loader(
                given, split, drop_last=args.dataloader_drop_last, seed=args.data_seed, step=self._boundary.committed
            )

        return make

    def _at_boundaries(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The trainer calls the method before each step, when all work of the step before is done: logging,
        evaluation, its own checkpoints."""

        def get_batch_samples(*arguments: Any, **named: Any) -> Any:
            self._before_step()
            return original(*arguments, **named)

        return get_batch_samples

    def _before_step(self) -> None:
        step: int = self._trainer.state.global_step
        if self._boundary.first():
            self._progress.begin()
            self._forget_folder()
        elif self._boundary.due(step):
            self._progress.begun = True
            self._boundary.commit(self.state, step)

    # --- restoring ---------------------------------------------------------------------------------------------------

    def _write_position(self, position: dict[str, Any]) -> str:
        """A folder with the one file of a checkpoint that a trainer reads by itself."""
        self._folder = tempfile.TemporaryDirectory(prefix="edl-trainer-")
        (Path(self._folder.name) / TRAINER_STATE_NAME).write_text(json.dumps(position))
        return self._folder.name

    def _forget_folder(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _instead_of_reading(self) -> dict[str, Any]:
        """Replacements of the methods by which a trainer reads a checkpoint. Model and optimizer are restored already;
        creating the scheduler overwrites the optimizer's learning rates."""
        options = [{name: value for name, value in group.items() if name != "params"}
                   for group in self._optimizer.param_groups]  # fmt: skip

        def load_scheduler(_: Any) -> None:
            self._progress.restore_scheduler()
            for group, kept in zip(self._optimizer.param_groups, options, strict=True):
                group.update(kept)

        return {
            "_load_from_checkpoint": _nothing,
            "_load_optimizer_and_scheduler": load_scheduler,
            "_load_scaler": lambda _: self._progress.restore_scaler(),
            "_load_rng_state": _nothing,
            "_load_callback_state": _nothing,
        }


def refuse(trainer: Any) -> None:
    """Raise ``StateError`` for a trainer whose state or steps edl cannot keep."""
    args = trainer.args
    reasons = {
        "DeepSpeed, which has checkpoints of its own": trainer.is_deepspeed_enabled,
        "FSDP and a model: a sharded model belongs to one world; give Trainer model_init, a function that returns it, "
        "in place of model": is_sharded(args) and trainer.model_init is None,
        "FSDP of XLA": bool(args.fsdp) and args.fsdp_config.get("xla", False),
        "a model that is spread over devices or processes": trainer.is_model_parallel
        or getattr(trainer, "is_distributed_loading_by_transformers", False),
        "auto_find_batch_size=True: each worker would find another size": args.auto_find_batch_size,
        "batch_rebalance, whose batches are for one number of workers": getattr(args, "train_sampling_strategy", "")
        == "batch_rebalance",
        "split_batches=True: per_device_train_batch_size is the size of each worker's batches":
        args.accelerator_config.split_batches,
    }  # fmt: skip
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise StateError(f"EDLCallback cannot continue a Trainer with {'; '.join(found)}")


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for a method that reads a file of a checkpoint: everything is restored already."""
