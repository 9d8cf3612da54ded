"""The loop of ``EDLModel.fit``: in each world it continues where the last commit was made.

Paddle's own loop begins with the first epoch, in one world; this one makes the same calls of the same callbacks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.hapi.callbacks import config_callbacks
from paddle.io import DataLoader, Dataset, DistributedBatchSampler

import edl.paddle as edl
from edl.integrations.callback_states import CallbackStates
from edl.integrations.fit_batches import FitBatches, TrainData
from edl.integrations.fit_parts import DividedEvaluation, WeightedLoss
from edl.integrations.loop_progress import LoopProgress
from edl.integrations.replacing import replacing
from edl.integrations.step_boundary import StepBoundary
from edl.integrations.step_split import StepSplit, split_in_world


@dataclass(frozen=True, slots=True)
class FitOptions:
    """What ``fit`` was asked for, besides the train data."""

    epochs: int
    eval_data: Any
    eval_batch_size: int
    eval_freq: int
    num_workers: int
    accumulate: int
    """``accumulate_grad_batches``: batches, as callbacks count them, of a step."""
    num_iters: int | None
    """Most batches of the training."""
    callbacks: Any
    callback_options: dict[str, Any]
    """For Paddle's own callbacks."""


class FitLoop:
    """Trains one model; created when ``fit`` is called."""

    def __init__(
        self, model: Any, data: TrainData, options: FitOptions, *, global_batch: int, copy_every: int, save_every: int
    ) -> None:
        self._model = model
        self._data = data
        self._options = options
        self._global_batch = global_batch
        self._network: Any = edl.parallel(model.network)
        self._loss = WeightedLoss(model._loss)
        self._progress = LoopProgress()
        self._kept = CallbackStates(model)
        numbers = edl.RandomState()
        self._boundary = StepBoundary(numbers, save_every)
        self._batches: FitBatches
        """Of this world."""
        self._logs: dict[str, Any] = {}
        if model._adapter._amp_level != "O0" and model._scaler is None:
            model._scaler = paddle.amp.GradScaler(**model._adapter._amp_configs)
        self._state = edl.State(
            copy_every=copy_every, model=model.network, optimizer=model._optimizer, loop=self._progress,
            callbacks=self._kept, random=numbers,
        )  # fmt: skip

    def run(self) -> None:
        """Train to the end, through all worlds."""

        @edl.run
        def in_world(_: edl.State) -> None:
            model = self._model
            self._boundary.enter(self._progress.step)
            self._progress.use(getattr(model, "_scaler", None))
            if self._progress.finished:
                return
            attributes = {"network": self._network, "_loss": self._loss, "_update_inputs": self._update_inputs}
            with replacing(model, attributes):
                self._train()
            self._progress.finished = True
            self._boundary.finish(self._state)

        in_world(self._state)

    # --- one world ---------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        model, progress, options = self._model, self._progress, self._options
        model.stop_training, model.num_iters = False, None
        model._reset_metrics()
        self._batches = FitBatches(self._data, self._split())
        steps, epochs, limit = self._lengths()
        callbacks: Any = config_callbacks(
            options.callbacks, model=model, epochs=epochs, steps=self._batches_before(steps),
            metrics=model._metrics_name(), **options.callback_options,
        )  # fmt: skip
        self._kept.use(callbacks)
        self._logs = {}
        callbacks.on_begin("train")
        while progress.epoch < epochs:
            callbacks.on_epoch_begin(progress.epoch)
            self._kept.restore()
            self._epoch(callbacks, min(steps, progress.step_in_epoch + limit - progress.step))
            callbacks.on_epoch_end(progress.epoch, self._logs)
            if options.eval_data is not None and progress.epoch % options.eval_freq == 0:
                self._evaluate(callbacks)
            progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0
            if self._stops() or progress.step >= limit:
                break
        callbacks.on_end("train", self._logs)

    def _epoch(self, callbacks: Any, steps: int) -> None:
        progress = self._progress
        with contextlib.closing(self._batches.epoch(progress.epoch, progress.step_in_epoch)) as batches:
            for step in range(progress.step_in_epoch, steps):
                if not self._boundary.first() and self._boundary.due(progress.step):
                    self._boundary.commit(self._state, progress.step)
                self._step(callbacks, step, batches)
                progress.step_in_epoch, progress.step = step + 1, progress.step + 1
        self._model._reset_metrics()

    def _step(self, callbacks: Any, step: int, batches: Iterator[Any]) -> None:
        """One step, in as many micro-batches as this world needs. Callbacks see as many batches as in any world."""
        indices, model, logs = self._batches.indices, self._model, self._logs
        count = indices.split.count(step, indices.samples)
        _apply_rate(model._optimizer)
        first, end = self._batches_before(step), self._batches_before(step) + self._batches_of(count)
        for number in range(first, end - 1):
            callbacks.on_batch_begin("train", number, logs)
            callbacks.on_batch_end("train", number, logs)
        callbacks.on_batch_begin("train", end - 1, logs)
        micros = indices.split.micro_batches(count)
        losses: list[list[float]] = []
        for micro in range(micros):
            batch = paddle.utils.flatten(next(batches))
            at = step * indices.split.accumulation + micro
            # train_batch adds up the gradients of batches; each worker's sum is averaged.
            share = indices.split.weight(at, indices.samples) / indices.split.accumulation
            self._loss.weight = share * (end - first)
            last = micro == micros - 1
            inputs = len(model._inputs)
            with contextlib.nullcontext() if last else self._network.no_sync():
                model.train_batch(batch[:inputs], batch[inputs:], update=last)
            losses.append(self._loss.seen)
        self._loss.weight = 1.0
        values: list[Any] = [[sum(each) / micros for each in zip(*losses, strict=True)]]
        for metric in model._metrics:
            found = metric.accumulate()
            values += found if isinstance(found, (list, tuple)) else [found]
        logs.update(zip(model._metrics_name(), values, strict=True))
        logs["step"], logs["batch_size"] = end - 1, -(-count // (end - first))
        callbacks.on_batch_end("train", end - 1, logs)

    def _evaluate(self, callbacks: Any) -> None:
        model, given = self._model, self._options.eval_data
        loader, divided = given, None
        if isinstance(given, Dataset):
            place = edl.context()
            sampler = DistributedBatchSampler(
                given, self._options.eval_batch_size, num_replicas=place.world_size, rank=place.rank
            )
            loader = DataLoader(given, batch_sampler=sampler, num_workers=self._options.num_workers,
                                places=model._place, return_list=True)  # fmt: skip
            if place.world_size > 1:
                divided = DividedEvaluation(self._network, len(given))
        callbacks.on_begin("eval", {"steps": model._len_data_loader(loader), "metrics": model._metrics_name()})
        model._test_dataloader = loader
        with replacing(model, {"divided": divided}):
            found = model._run_one_epoch(loader, callbacks, "eval", {})
        model._test_dataloader = None
        callbacks.on_end("eval", found)

    def _update_inputs(self) -> None:
        """Paddle's method reads the names of the inputs from the network's ``forward``."""
        with replacing(self._model, {"network": self._network.layer}):
            type(self._model)._update_inputs(self._model)

    def _stops(self) -> bool:
        """Whether a callback of any worker asks for the end."""
        stop = paddle.to_tensor([int(bool(self._model.stop_training))])
        return bool(edl.all_reduce(stop, "max").item())

    # --- arithmetic --------------------------------------------------------------------------------------------------

    def _split(self) -> StepSplit:
        here = edl.context()
        return split_in_world(
            self._progress, here.rank, here.world_size, given=self._global_batch or edl.settings().global_batch,
            micro_batch=self._data.batch_size, accumulation=self._options.accumulate,
        )  # fmt: skip

    def _lengths(self) -> tuple[int, int, int]:
        """Steps of an epoch, number of epochs, and most steps of the training."""
        steps, options = self._batches.indices.steps, self._options
        if options.num_iters is None:
            return steps, options.epochs, steps * options.epochs
        limit = -(-options.num_iters // options.accumulate)
        return steps, -(-limit // steps), limit

    def _batches_of(self, count: int) -> int:
        """Number of batches, as callbacks count them, of a step of so many samples."""
        return -(-count * self._options.accumulate // self._progress.global_batch)

    def _batches_before(self, step: int) -> int:
        """Number of batches, as callbacks count them, of an epoch's steps before this one."""
        indices = self._batches.indices
        full, rest = divmod(min(step * self._progress.global_batch, indices.samples), self._progress.global_batch)
        return full * self._options.accumulate + (self._batches_of(rest) if rest else 0)


def _apply_rate(optimizer: Any) -> None:
    """Paddle 3.3's ``ReduceLROnPlateau`` changes the number, but not the tensor that the optimizer reads. An optimizer
    that was restored has both, so a change of the world would change the training."""
    if isinstance(optimizer._learning_rate, float):
        optimizer.set_lr(optimizer._learning_rate)
