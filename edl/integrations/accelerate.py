"""``EDLLoop``: a training loop of your own with Accelerate continues from memory when the world changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from edl.integrations.versions import TestedVersions

try:
    import accelerate
    import torch
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import extract_model_from_parallel, send_to_device
except ImportError as error:
    raise ImportError(
        f"edl.integrations.accelerate cannot be used here ({error}): pip install 'edl[accelerate]'"
    ) from error

import edl.torch as edl
from edl.errors import StateError
from edl.integrations.loop_progress import LoopProgress
from edl.integrations.placeless import give_up_place, is_worker
from edl.integrations.step_batches import BoundaryLoader, boundary_loader
from edl.integrations.step_boundary import StepBoundary, check_options
from edl.integrations.step_split import split_in_world
from edl.worker.session import note

TESTED = (TestedVersions("accelerate", "1.15", "1.16"), accelerate.__version__)
Result = TypeVar("Result")


class EDLLoop:
    """Model, optimizer, scheduler and train loader of a loop with Accelerate, and its position. Create it before the
    ``Accelerator``, with objects that are not prepared; ``run(train)`` calls ``train`` once in each world.

    ``loader``: a ``DataLoader`` with a sampler of single indices. ``global_batch``: samples of each step over all
    workers, in a world of any size. Without it: the job's ``--global-batch``, or else that of the first world.
    ``seed``: of the order of samples. ``copy_every``: copy the state only after every n-th step. ``save_every``: after
    every so many steps also write it to ``--checkpoint-dir``; 0: never. ``more``: further objects and values of the
    state, as for ``edl.State``; they are attributes of ``state``.

    Without edl's launcher ``train`` is called once, nothing is kept, and a note on stderr says so.
    """

    def __init__(self, *, model: Any, optimizer: Any, loader: Any, scheduler: Any = None, global_batch: int = 0,
                 seed: int = 0, copy_every: int = 1, save_every: int = 0, **more: Any) -> None:  # fmt: skip
        """Raises ``StateError`` for a wrong argument, or when the process is in a world already."""
        check_options("EDLLoop", global_batch=global_batch, copy_every=copy_every, save_every=save_every)
        self.active = is_worker(os.environ)
        """Whether edl's launcher has started this process."""
        if self.active:
            tested, installed = TESTED
            tested.warn(installed)
            give_up_place(os.environ, "EDLLoop", grouped=torch.distributed.is_initialized())
        else:
            note("EDLLoop keeps nothing, because edl-run has not started this process")
        self._model, self._optimizer, self._scheduler, self._given = model, optimizer, scheduler, loader
        self._global_batch = global_batch
        self._seed = seed
        self._loader: BoundaryLoader | None = None
        numbers = edl.RandomState()
        self._boundary = StepBoundary(numbers, save_every)
        self._progress = LoopProgress()
        scheduled = {} if scheduler is None else {"scheduler": scheduler}
        self.state = edl.State(
            copy_every=copy_every, model=model, optimizer=optimizer, loop=self._progress, random=numbers, **scheduled,
            **more,
        )  # fmt: skip

    def run(self, train: Callable[[], Result]) -> Result:
        """Call ``train`` in each world, until it returns. It creates an ``Accelerator``, calls ``prepare`` and iterates
        over ``epochs``."""
        if not self.active:
            return train()

        @edl.run
        def in_world(_: edl.State) -> Result:
            AcceleratorState._reset_state(reset_partial_state=True)  # the singletons of the last world
            GradientState._reset_state()
            self._loader = None
            self._boundary.enter(self._progress.step)
            result = train()
            self._progress.finished = True
            self.state.commit()
            return result

        result: Result = in_world(self.state)
        return result

    def prepare(self, accelerator: Any) -> tuple[Any, ...]:
        """Model, optimizer and loader for this world, and the scheduler if there is one, as ``accelerator.prepare``
        returns them. The scheduler makes one step with each of the optimizer, in a world of any size.

        Raises ``StateError`` for an ``Accelerator`` whose state or steps edl cannot keep.
        """
        refuse(accelerator, self._given)
        if self.active and accelerator.num_processes != edl.context().world_size:
            raise StateError(
                f"this Accelerator has {accelerator.num_processes} processes, and the world has "
                f"{edl.context().world_size}: create it inside of the function that EDLLoop.run calls"
            )
        batches = self._batches(accelerator)
        # Mixed precision has wrapped forward() in the last world.
        plain = extract_model_from_parallel(self._model, keep_fp32_wrapper=False, keep_torch_compile=False)
        model, optimizer = accelerator.prepare(plain, self._optimizer)
        self._progress.use(accelerator.scaler)
        self._weight_losses(accelerator)
        if self._scheduler is None:
            return model, optimizer, batches
        scheduler = AcceleratedScheduler(
            self._scheduler, [optimizer], step_with_optimizer=accelerator.step_scheduler_with_optimizer,
            split_batches=True,  # else it would make as many steps as there are workers
        )  # fmt: skip
        accelerator._schedulers.append(scheduler)
        return model, optimizer, batches, scheduler

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs that are left of so many. Iterate over the loader once in each."""
        progress = self._progress
        if self._loader is None:
            raise StateError("EDLLoop.epochs() was called before EDLLoop.prepare(accelerator)")
        while progress.epoch < count and not progress.finished:
            self._loader.set_epoch(progress.epoch)
            yield progress.epoch
            progress.epoch += 1
            self._loader.batches.start = 0

    # --- one world ---------------------------------------------------------------------------------------------------

    def _batches(self, accelerator: Any) -> _Batches:
        progress, given = self._progress, self._given
        split = split_in_world(
            progress, accelerator.process_index, accelerator.num_processes,
            given=self._global_batch or (edl.settings().global_batch if self.active else 0),
            micro_batch=given.batch_size or 1, accumulation=accelerator.gradient_accumulation_steps,
        )  # fmt: skip
        loader = boundary_loader(given, split, drop_last=given.drop_last, seed=self._seed,
                                 step=self._boundary.committed)  # fmt: skip
        loader.batches.start = progress.step_in_epoch
        loader.before_step = self._before_step if self.active else None
        accelerator.gradient_accumulation_steps = split.accumulation
        self._loader = loader
        return _Batches(loader, accelerator.device)

    def _weight_losses(self, accelerator: Any) -> None:
        original, loader = accelerator.backward, self._loader
        assert loader is not None, "made before"  # noqa: S101

        def backward(loss: Any, **named: Any) -> None:
            weight = loader.weight()
            original(loss if weight == 1.0 else loss * weight, **named)

        accelerator.backward = backward

    def _before_step(self) -> None:
        """The loader calls it before it reads the first batch of a step: the step before is done."""
        progress = self._progress
        assert self._loader is not None, "the caller"  # noqa: S101
        progress.step_in_epoch = self._loader.steps_taken
        if not self._boundary.first():
            progress.step += 1
            self._boundary.commit(self.state, progress.step)


class _Batches(DataLoaderStateMixin):  # type: ignore[misc]  # the package is not typed
    """The train loader for the loop, on the device; says to Accelerate which batch is the last one of an epoch."""

    def __init__(self, loader: BoundaryLoader, device: Any) -> None:
        self._loader = loader
        self._device = device
        self.dataset = loader.dataset
        self.gradient_state = GradientState()

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self.reset()
        self.remainder = 0  # nothing is filled up
        self.gradient_state._add_dataloader(self)
        try:
            for batch in self._loader:
                self.end_of_dataloader = self._loader.taken == len(self._loader)
                yield send_to_device(batch, self._device)
        finally:
            self.end()


def refuse(accelerator: Any, loader: Any) -> None:
    """Raise ``StateError`` for what edl cannot keep or divide."""
    kind = accelerator.distributed_type.value
    reasons = {
        f"{kind}, whose state is distributed: use edl.State(build=...) without Accelerate":
        kind != "NO" and not kind.startswith("MULTI_"),
        "split_batches=True: batch_size is the size of each worker's batches": accelerator.split_batches,
        "sync_with_dataloader=False: the last step of an epoch may be smaller than the others":
        not accelerator.gradient_state.sync_with_dataloader,
    }  # fmt: skip
    if not hasattr(loader, "batch_sampler") or not hasattr(loader, "batch_size"):
        reasons[f"a loader that is a {type(loader).__name__}: give a torch.utils.data.DataLoader"] = True
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise StateError(f"EDLLoop cannot continue a loop with {'; '.join(found)}")
