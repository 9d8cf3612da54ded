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
    from accelerate.state import GradientState
    from accelerate.utils import send_to_device

    from edl.integrations.accelerate_world import check_size, forget_world, is_current, keep_types, plain
    from edl.integrations.sharded_loop import Build, ShardedLoop
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

    ``build``: in place of ``model``, ``optimizer`` and ``scheduler``, for FSDP2. It is called in each world and returns
    them by name, with the world's ``accelerator``; ``train`` is given that.
    ``loader``: a ``DataLoader`` with a sampler of single indices. ``global_batch``: samples of each step over all
    workers, in a world of any size. Without it: the job's ``--global-batch``, or else that of the first world.
    ``seed``: of the order of samples. ``copy_every``: copy the state only after every n-th step. ``save_every``: after
    every so many steps also write it to ``--checkpoint-dir``; 0: never. ``more``: further objects and values of the
    state, as for ``edl.State``; they are attributes of ``state``.

    Without edl's launcher ``train`` is called once, nothing is kept, and a note on stderr says so.
    """

    def __init__(self, *, loader: Any, model: Any = None, optimizer: Any = None, scheduler: Any = None,
                 build: Build | None = None, global_batch: int = 0, seed: int = 0, copy_every: int = 1,
                 save_every: int = 0, **more: Any) -> None:  # fmt: skip
        """Raises ``StateError`` for a wrong argument, or when the process is in a world already."""
        check_options("EDLLoop", global_batch=global_batch, copy_every=copy_every, save_every=save_every)
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        trained = {name: one for name, one in given.items() if one is not None}
        _check_trained(trained, build)
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
        self._sharded = None if build is None else ShardedLoop(build)
        self.state = edl.State(
            build=None if self._sharded is None else self._shard, copy_every=copy_every, loop=self._progress,
            random=numbers, **trained, **more,
        )  # fmt: skip

    def run(self, train: Callable[..., Result]) -> Result:
        """Call ``train`` in each world, until it returns. It creates an ``Accelerator``, or is given that of ``build``,
        calls ``prepare`` and iterates over ``epochs``."""
        if not self.active:
            if self._sharded is not None:
                self._sharded.make(elastic=False)
            return self._call(train)

        @edl.run
        def in_world(_: edl.State) -> Result:
            if self._sharded is None:
                self._leave_world()
            self._loader = None
            self._boundary.enter(self._progress.step)
            result = self._call(train)
            self._progress.finished = True
            self._boundary.finish(self.state)
            return result

        result: Result = in_world(self.state)
        return result

    def _leave_world(self) -> None:
        forget_world()
        for one in self.state._objects.values():  # the script may prepare further models
            if isinstance(one, torch.nn.Module):
                plain(one)

    def _shard(self, _: Any) -> dict[str, Any]:
        assert self._sharded is not None, "the caller"  # noqa: S101
        return self._sharded.make(elastic=True)

    def _call(self, train: Callable[..., Result]) -> Result:
        return train() if self._sharded is None else train(self._sharded.accelerator)

    def prepare(self, accelerator: Any) -> tuple[Any, ...]:
        """Model, optimizer and loader for this world, and the scheduler if there is one, as ``accelerator.prepare``
        returns them. The scheduler makes one step with each of the optimizer, in a world of any size.

        Raises ``StateError`` for an ``Accelerator`` whose state or steps edl cannot keep.
        """
        if not is_current(accelerator):
            raise StateError(
                "this Accelerator was created before this world: create it in the function that EDLLoop.run calls"
            )
        refuse(accelerator, self._given, sharded=self._sharded is not None)
        if self.active:
            check_size(accelerator, edl.context().world_size, "Accelerator(cpu=True)")
        batches = self._batches(accelerator)
        if self._sharded is None:
            keep_types(accelerator)
            model, optimizer = accelerator.prepare(plain(self._model), self._optimizer)
            schedule = self._scheduler
        else:
            _, model, optimizer, schedule = self._sharded.take(accelerator)
        self._progress.use(accelerator.scaler)
        self._weight_losses(accelerator)
        if schedule is None:
            return model, optimizer, batches
        scheduler = AcceleratedScheduler(
            schedule, [optimizer], step_with_optimizer=accelerator.step_scheduler_with_optimizer,
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


def _check_trained(given: dict[str, Any], build: Build | None) -> None:
    """Raise ``StateError`` unless there is either a model with its optimizer or a function that builds them."""
    if build is not None and given:
        raise StateError(f"EDLLoop(build=..., {', '.join(given)}=...): build returns them; leave these out")
    if build is None and not {"model", "optimizer"} <= given.keys():
        raise StateError("EDLLoop needs model and optimizer, or for FSDP2 build, a function that returns them")


def refuse(accelerator: Any, loader: Any, *, sharded: bool) -> None:
    """Raise ``StateError`` for what edl cannot keep or divide. ``sharded``: the model was built for FSDP2."""
    kind = accelerator.distributed_type.value
    reasons = {
        "FSDP, whose model belongs to one world: use fsdp_version=2, and give EDLLoop a function build in place of "
        "model and optimizer": kind == "FSDP" and not sharded,
        f"{kind}, whose state is distributed: use DDP, or FSDP2 with EDLLoop(build=...)":
        kind not in ("NO", "FSDP") and not kind.startswith("MULTI_"),
        "split_batches=True: batch_size is the size of each worker's batches": accelerator.split_batches,
        "sync_with_dataloader=False: the last step of an epoch may be smaller than the others":
        not accelerator.gradient_state.sync_with_dataloader,
    }  # fmt: skip
    if not hasattr(loader, "batch_sampler") or not hasattr(loader, "batch_size"):
        reasons[f"a loader that is a {type(loader).__name__}: give a torch.utils.data.DataLoader"] = True
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise StateError(f"EDLLoop cannot continue a loop with {'; '.join(found)}")
