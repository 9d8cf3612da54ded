"""``accumulate`` for Paddle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle

from edl.arithmetic.adascale import AdaScale
from edl.errors import StateError
from edl.paddle import group
from edl.paddle.arrays import fill
from edl.paddle.ddp import Parallel
from edl.paddle.framework import FRAMEWORK
from edl.paddle.logical import LogicalModel, buffers
from edl.worker.accumulate import Step, begin
from edl.worker.steps import StepLoader


def accumulate(
    loader: StepLoader, model: Any, *, noise: AdaScale | None = None, seed: int = 0, first_step: int = 0
) -> Iterator[Step]:
    """The rest of the loader's epoch, step by step::

        for step in edl.accumulate(loader, parallel):
            for batch in step:
                step.backward(loss_function(parallel(batch.x), batch.y))  # the mean over the micro-batch
            optimizer.step()
            optimizer.clear_grad()
            state.commit()

    After a step's last ``backward`` the gradients are those of the mean loss over all samples of the step, on all
    workers. ``model``: made by ``edl.parallel``, or the plain one on a single worker. With ``--logical-ranks`` either.

    ``noise``: where AdaScale's measurements go, if not in the ``State``. ``seed``: of the logical ranks' random
    numbers; ``first_step``: steps made before this loop, for scripts without a ``State``.
    """
    trainee = PaddleTrainee(model)
    return begin(loader, trainee, lambda: LogicalModel(trainee.layer), noise, seed, first_step)


class PaddleTrainee:
    """``edl.worker.accumulate.Trainee`` for a layer, in ``edl.paddle.Parallel`` or plain.

    The averaging follows the last backward pass; the passes themselves never exchange anything.
    """

    def __init__(self, model: Any) -> None:
        self._wrapper = model if isinstance(model, Parallel) else None
        self.layer: Any = model.layer if isinstance(model, Parallel) else model
        self._parameters = [one for one in self.layer.parameters() if not one.stop_gradient]
        self.workers = group.size() if self._wrapper is not None else 1
        self._squares: list[float] = []
        self._hooks: list[Any] = []

    def check_workers(self) -> None:
        """A plain layer averages nothing."""
        if self._wrapper is None and group.size() > 1:
            raise StateError(
                f"accumulate() was given a plain layer on {group.size()} workers: wrap it, edl.parallel(model)"
            )

    def apart(self) -> contextlib.AbstractContextManager[Any]:
        """As ``no_sync``."""
        return self._wrapper.no_sync() if self._wrapper is not None else contextlib.nullcontext()

    together = apart

    def backward(self, loss: Any, factor: float) -> None:
        """Multiplying the loss by 1 would only cost time."""
        self._squares = []
        (loss if factor == 1.0 else loss * factor).backward()

    def backward_of_nothing(self, loss: Any) -> None:
        """Not needed: the others wait for the averaging only."""

    def conclude(self) -> None:
        """Average."""
        if self._wrapper is not None:
            self._wrapper.average_gradients()

    def value(self, loss: Any, factor: float) -> Any:
        """A tensor of its own."""
        return (loss.detach() * factor).reshape([])

    def listen(self) -> None:
        """By hooks, since ``.grad`` holds the sum of several passes."""
        if not self._hooks:
            hook = self._hear
            self._hooks = [parameter.register_hook(hook) for parameter in self._parameters]

    def _hear(self, gradient: Any) -> None:
        self._squares.append(_square(gradient))

    def heard(self) -> float:
        """All squares are numbers already."""
        return sum(self._squares)

    def square(self) -> float:
        """Of ``.grad``."""
        return sum(_square(one.grad) for one in self._parameters if one.grad is not None)

    def exchange(self, data: bytes) -> list[bytes]:
        """Over the ring; a plain layer is alone."""
        found: list[bytes] = FRAMEWORK.exchange(data) if self._wrapper is not None else [data]
        return found

    def copy_buffers(self) -> list[Any]:
        """A copy of each."""
        return [np.array(buffer.numpy()) for buffer in buffers(self.layer)]

    def set_buffers(self, saved: list[Any]) -> None:
        """In place."""
        for buffer, values in zip(buffers(self.layer), saved, strict=True):
            fill(buffer, values)

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _square(gradient: Any) -> float:
    if gradient.is_selected_rows():
        gradient = paddle.Tensor(_merged(gradient))
    wide = gradient.detach().astype("float64").reshape([-1])
    return float((wide * wide).sum())


def _merged(gradient: Any) -> Any:
    """The rows of an embedding's gradient, each once."""
    rows, places = np.unique(np.asarray(gradient.rows(), np.int64), return_inverse=True)
    values = gradient.numpy()
    merged = np.zeros((len(rows), *values.shape[1:]), np.float64)
    np.add.at(merged, places.reshape(-1), values)
    return merged
