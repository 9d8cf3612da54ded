"""One ``Trainer`` of Lightning through all worlds of a job.

In each world Lightning's ``fit`` runs again, on the group that edl has formed. It resumes as from a checkpoint, which
is the state that edl has restored. Nothing here imports Lightning: it has two packages of the same content.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

import edl.torch as edl
from edl.errors import StateError
from edl.integrations.lightning_afresh import FirstCounts
from edl.integrations.lightning_progress import WEIGHTS, LightningProgress
from edl.integrations.lightning_refusals import in_steps, refuse
from edl.integrations.replacing import replacing
from edl.integrations.step_batches import BoundaryLoader, boundary_loader
from edl.integrations.step_boundary import StepBoundary
from edl.integrations.step_split import StepSplit, split_in_world

COMMIT = "edl's newest commit"
"""Where the trainer resumes from, in place of a path; it prints it."""
_TRAINING = "train"
"""Lightning's name of the stage."""


class LightningBridge:
    """Trains one trainer; created when ``trainer.fit()`` is called."""

    def __init__(self, trainer: Any, module: Any, *, global_batch: int, copy_every: int, save_every: int) -> None:
        """Raises ``StateError`` for a trainer that cannot continue."""
        refuse(trainer, module)
        self._trainer = trainer
        self._module = module
        self._global_batch = global_batch
        self._given = {name: getattr(trainer, name) for name in
                       ("accumulate_grad_batches", "limit_train_batches", "val_check_interval")}  # fmt: skip
        """The script's own settings, which count batches."""
        self.progress = LightningProgress(trainer, module)
        self._first_counts = FirstCounts(trainer)
        numbers = edl.RandomState()
        self._boundary = StepBoundary(numbers, save_every)
        self._loader: BoundaryLoader | None = None
        self._validate_every = 0
        """Steps between validations; 0: as Lightning does without edl."""
        self.state = _State(copy_every=copy_every, training=self.progress, random=numbers)
        self.state.parameters_of(module)

    def run(self, fit: Callable[..., None], arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Train to the end, through all worlds. ``fit`` and its arguments are Lightning's."""
        call = inspect.signature(fit).bind(*arguments, **named)
        given: str | None = call.arguments.get("ckpt_path")

        @edl.run
        def in_world(_: edl.State) -> None:
            call.arguments["ckpt_path"] = COMMIT if self.progress.begun else given
            self._in_world(lambda: fit(*call.args, **call.kwargs))

        in_world(self.state)

    def weight(self) -> float:
        """What to multiply the loss of the current batch with; see ``StepSplit.weight``."""
        return self._loader.weight() if self._loader is not None else 1.0

    # --- one world ---------------------------------------------------------------------------------------------------

    def _in_world(self, fit: Callable[[], None]) -> None:
        trainer, progress, loop = self._trainer, self.progress, self._trainer.fit_loop.epoch_loop
        self._boundary.enter(progress.step)
        self._first_counts.begin(from_nothing=not progress.begun)
        self._loader, forward = None, vars(self._module).get("forward")
        trainer.training, trainer.should_stop = True, progress.should_stop
        with contextlib.ExitStack() as replaced:
            for owner, attributes in (
                (trainer, {**self._given, "num_sanity_val_steps": 0} if progress.begun else dict(self._given)),
                (trainer._data_connector, {"_prepare_dataloader": self._dividing(trainer._data_connector)}),
                (trainer._signal_connector, {"register_signal_handlers": _nothing}),  # the launcher ends its workers
                (loop, {"reset": self._at_position(loop), "_should_check_val_fx": self._counting_steps(loop)}),
            ):
                replaced.enter_context(replacing(owner, attributes))
            try:
                fit()
            finally:
                self._leave(forward)
        progress.loaded, progress.begun, progress.finished = None, True, True
        self._boundary.finish(self.state)

    def _leave(self, forward: Any) -> None:
        """Undo what an interrupted ``fit`` has left, so that it can run again."""
        trainer, module = self._trainer, self._module
        trainer.fit_loop.teardown()
        trainer.strategy.model = module  # without the wrapper of this world
        module._current_fx_name = None
        if trainer.validating or trainer.sanity_checking:
            trainer.fit_loop.epoch_loop.val_loop._module_mode.restore(module)
        if forward is None:  # a wrapper that failed may have left its own
            vars(module).pop("forward", None)
        else:
            module.forward = forward

    def _before_step(self) -> None:
        """The loader calls it before it reads the first batch of a step: all work of the step before is done."""
        trainer, progress = self._trainer, self.progress
        assert self._loader is not None, "the caller"  # noqa: S101
        progress.step_in_epoch = self._loader.steps_taken
        if self._boundary.first():
            progress.loaded = None
            # Lightning leaves out some work in an epoch that it resumes, because it has no metrics then.
            trainer.fit_loop._restarting = trainer.fit_loop.epoch_loop._restarting = False
        elif self._boundary.due(trainer.global_step):
            progress.begun = True
            self._boundary.commit(self.state, trainer.global_step)

    # --- replacements of Lightning's methods -------------------------------------------------------------------------

    def _dividing(self, connector: Any) -> Callable[..., Any]:
        """Instead of injecting a ``DistributedSampler`` into the train loader, divide its steps."""
        original = connector._prepare_dataloader

        def prepare(dataloader: Any, shuffle: bool, mode: Any) -> Any:
            return self._divide(dataloader) if mode == _TRAINING else original(dataloader, shuffle=shuffle, mode=mode)

        return prepare

    def _at_position(self, loop: Any) -> Callable[[], None]:
        """After Lightning has restored its counts of batches, set them to those of a world of this size."""
        original = loop.reset

        def reset() -> None:
            original()
            if self._boundary.preparing and self._loader is not None:
                batches, current = self._loader.batches, loop.batch_progress.current
                ended = self._is_after_epoch(loop)
                done = len(batches) if ended else batches.start * batches.split.accumulation
                current.ready = current.started = current.processed = current.completed = done

        return reset

    def _counting_steps(self, loop: Any) -> Callable[[Any], bool]:
        """Have the interval of validations counted in steps, and none repeated that was due at the commit."""
        original, trainer = loop._should_check_val_fx, self._trainer

        def should_validate(fetcher: Any) -> bool:
            if self._boundary.preparing:
                return self._is_after_epoch(loop)  # it is not made again, but only then does the trainer end the epoch
            if self._validate_every and self._loader is not None:
                taken, size = self._loader.taken, self._loader.batches.split.accumulation
                whole = trainer.check_val_every_n_epoch is None
                step = trainer.global_step if whole else -(-taken // size)
                due = not loop._should_accumulate() and step % self._validate_every == 0
                trainer.val_check_batch = 1 if due else sys.maxsize  # every batch, or none
            return bool(original(fetcher))

        return should_validate

    def _is_after_epoch(self, loop: Any) -> bool:
        """Whether the trainer resumes from a checkpoint of its own that was written after the last step of an epoch, in
        the validation there: no step of this epoch is left, but its end is."""
        middle: bool = self._trainer.fit_loop.restarted_mid_epoch
        return bool(middle and loop.restarted_on_last and loop.batch_progress.is_last_batch)

    # --- the train loader --------------------------------------------------------------------------------------------

    def _divide(self, given: Any) -> BoundaryLoader:
        trainer, progress, boundary = self._trainer, self.progress, self._boundary
        if not isinstance(given, DataLoader):
            raise StateError(f"the train loader is a {type(given).__name__}: give a torch.utils.data.DataLoader")
        if self._loader is not None and trainer.fit_loop._combined_loader is None and boundary.preparing:
            raise StateError("there are several train loaders, and edl keeps one position: combine the data sets")
        loader = boundary_loader(
            given, self._split(given.batch_size or 1), drop_last=given.drop_last,
            seed=int(os.environ.get("PL_GLOBAL_SEED", "0")), step=boundary.committed,
        )  # fmt: skip
        self._loader, batches = loader, loader.batches
        batches.limit = self._limit(batches.steps)
        batches.start = progress.step_in_epoch if boundary.preparing else 0
        loader.before_step = self._before_step
        trainer.accumulate_grad_batches = batches.split.accumulation
        self._validate_every = self._validations(batches.steps)
        return loader

    def _split(self, micro_batch: int) -> StepSplit:
        here = edl.context()
        return split_in_world(
            self.progress, here.rank, here.world_size, given=self._global_batch or edl.settings().global_batch,
            micro_batch=micro_batch, accumulation=self._given["accumulate_grad_batches"],
        )  # fmt: skip

    def _limit(self, steps: int) -> int:
        """The steps of an epoch under ``limit_train_batches``, which is not applied again by Lightning."""
        given = self._given["limit_train_batches"]
        self._trainer.limit_train_batches = 1.0
        if isinstance(given, float):
            return steps if given == 1.0 else max(1, int(steps * given))
        return in_steps("limit_train_batches", given, self._given["accumulate_grad_batches"])

    def _validations(self, steps: int) -> int:
        """The steps between validations under ``val_check_interval``; 0 where Lightning's own way is right."""
        given, trainer = self._given["val_check_interval"], self._trainer
        if not isinstance(given, (int, float)) or (isinstance(given, float) and given == 1.0):
            return 0
        trainer.val_check_interval = 1.0
        if isinstance(given, float):
            return max(1, int(steps * given))
        every = in_steps("val_check_interval", given, self._given["accumulate_grad_batches"])
        if every > steps and trainer.check_val_every_n_epoch is not None:
            raise StateError(
                f"val_check_interval={given} is {every} steps, and an epoch has {steps}: choose a smaller one, or "
                "check_val_every_n_epoch=None to count over epochs"
            )
        return every


class _State(edl.State):
    """A state that compares the parameters among the workers, although they are inside of a checkpoint."""

    _module: Any = None

    def parameters_of(self, module: Any) -> None:
        """The module whose parameters must be equal on all workers."""
        object.__setattr__(self, "_module", module)

    def _strict(self, name: str, obj: Any) -> frozenset[str]:
        if not isinstance(obj, LightningProgress):
            return super()._strict(name, obj)
        return frozenset(f"{name}.checkpoint.{WEIGHTS}.{path}" for path, _ in self._module.named_parameters())


def _nothing() -> None:
    """Stand in for a method that does nothing under edl."""
