"""``accumulate`` for Paddle: steps of several micro-batches."""

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
from edl.paddle.shards import of
from edl.worker.accumulate import Step, begin, found_scaler
from edl.worker.steps import StepLoader


def accumulate(
    loader: StepLoader,
    model: Any,
    *,
    noise: AdaScale | None = None,
    seed: int = 0,
    first_step: int = 0,
    scaler: Any = None,
) -> Iterator[Step]:
    """Iterate over the rest of the loader's epoch, step by step::

        for step in edl.accumulate(loader, parallel):
            for batch in step:
                step.backward(loss_function(parallel(batch.x), batch.y))  # the mean over the micro-batch
            optimizer.step()
            optimizer.clear_grad()
            state.commit()

    After a step's last ``backward`` the gradients are those of the mean loss over all samples of the step, on all
    workers. ``model``: made by ``edl.parallel``, or a plain layer on a single worker; with ``--logical-ranks`` either.

    ``noise``: receives AdaScale's measurements, if it is not in the ``State``. ``seed``: for the random numbers of
    logical ranks; ``first_step``: number of steps made before this loop, for scripts without a ``State``. ``scaler``:
    scales the losses that ``step.backward`` gets, if it is not in the ``State``. Raises ``StateError`` for a plain
    layer on several workers.
    """
    kind: Any = paddle.amp.AmpScaler
    wrapped = PaddleModel(model, found_scaler(scaler, kind, kind.is_enable))
    return begin(loader, wrapped, lambda: LogicalModel(wrapped.layer), noise, seed, first_step)


class PaddleModel:
    """Implements ``edl.worker.accumulate.DataParallelModel`` for a layer, plain or in ``edl.paddle.Parallel``.

    Gradients are averaged after the last backward pass; the passes themselves exchange nothing.
    """

    def __init__(self, model: Any, scaler: Any = None) -> None:
        self._scaler = scaler
        self._wrapper = model if isinstance(model, Parallel) else None
        self.layer: Any = model.layer if isinstance(model, Parallel) else model
        self._parameters = [one for one in self.layer.parameters() if not one.stop_gradient]
        self.workers = group.size() if self._wrapper is not None else 1
        self._squares: list[float] = []
        self._hooks: list[Any] = []

    def check_workers(self) -> None:
        """Refuse a plain layer on several workers, since its gradients would not be averaged. Raises ``StateError``."""
        if self._wrapper is None and group.size() > 1:
            raise StateError(
                f"accumulate() was given a plain layer on {group.size()} workers: wrap it, edl.parallel(model)"
            )

    def apart(self) -> contextlib.AbstractContextManager[Any]:
        """Passes in this context are not averaged: ``no_sync`` of ``Parallel``."""
        return self._wrapper.no_sync() if self._wrapper is not None else contextlib.nullcontext()

    together = apart

    def must_average(self) -> bool:
        """Never: no pass averages."""
        return False

    def backward(self, loss: Any, factor: float) -> None:
        """Run a backward pass. The multiplication is skipped for factor 1 to save time."""
        self._squares = []
        (loss if factor == 1.0 else loss * factor).backward()

    def backward_of_nothing(self, loss: Any) -> None:
        """Nothing to do: other workers wait only for the averaging."""

    def conclude(self) -> None:
        """Average the gradients over all workers, once per step."""
        if self._wrapper is not None:
            self._wrapper.average_gradients()

    def value(self, loss: Any, factor: float) -> Any:
        """The weighted loss as a separate tensor."""
        return (loss.detach() * (factor / self.loss_scale())).reshape([])

    def loss_scale(self) -> float:
        """What the gradient scaler multiplies losses by."""
        kept = self._scaler.state_dict() if self._scaler is not None else {}  # empty if it is disabled
        return float(np.asarray(kept["scale"]).reshape(-1)[0]) if kept else 1.0

    def listen(self) -> None:
        """Measure each pass with hooks, since ``.grad`` holds the sum of several passes."""
        if not self._hooks:
            hook = self._hear
            self._hooks = [parameter.register_hook(hook) for parameter in self._parameters]

    def _hear(self, gradient: Any) -> None:
        self._squares.append(_square(gradient))

    def heard(self) -> float:
        """The squared norm of the last pass's gradients."""
        return sum(self._squares)

    def square(self) -> float:
        """The squared norm of ``.grad``, also where each rank has its rows of it; then a collective."""
        mine = sum(_square(one.grad) for one in self._parameters if one.grad is not None)
        if (shards := of(self.layer)) is None or shards.level == "os" or shards.size == 1:
            return mine
        rows = sum(
            _square(part.row.grad) for part in shards.parts if part.row is not None and part.row.grad is not None
        )
        return mine + sum(float(one) for one in self.exchange(repr(rows).encode()))

    def exchange(self, data: bytes) -> list[bytes]:
        """Exchange bytes over the ring; for a plain layer only this worker's are returned."""
        found: list[bytes] = FRAMEWORK.exchange(data) if self._wrapper is not None else [data]
        return found

    def copy_buffers(self) -> list[Any]:
        """A copy of each buffer of the layer."""
        return [np.array(buffer.numpy()) for buffer in buffers(self.layer)]

    def set_buffers(self, saved: list[Any]) -> None:
        """Overwrite the layer's buffers in place."""
        for buffer, values in zip(buffers(self.layer), saved, strict=True):
            fill(buffer, values)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _square(gradient: Any) -> float:
    if gradient.is_selected_rows():
        gradient = paddle.Tensor(_merged(gradient))
    wide = gradient.detach().astype("float64").reshape([-1])
    return float((wide * wide).sum())


def _merged(gradient: Any) -> Any:
    """The rows of an embedding's gradient, with duplicates added up."""
    rows, places = np.unique(np.asarray(gradient.rows(), np.int64), return_inverse=True)
    values = gradient.numpy()
    merged = np.zeros((len(rows), *values.shape[1:]), np.float64)
    np.add.at(merged, places.reshape(-1), values)
    return merged
