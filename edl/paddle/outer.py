"""``LocalSGD`` and ``DiLoCo`` for Paddle. Outer steps are computed with NumPy in the host's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from edl.arithmetic.outer_step import OuterRule, buckets
from edl.errors import StateError
from edl.paddle import group
from edl.paddle.arrays import fill, kind
from edl.paddle.comm import broadcast
from edl.paddle.ddp import Parallel
from edl.paddle.framework import FRAMEWORK
from edl.paddle.logical import buffers as buffers_of
from edl.worker.local_steps import Every, OuterSteps, refuse_new

_WIDE = ("float32", "float64")


class LocalSGD(OuterSteps):
    """Local SGD: each worker trains on its own, and every ``every`` inner steps the models are averaged::

        outer = edl.LocalSGD(model, every=8)
        state = edl.State(model=model, outer=outer)  # without the inner optimizer, which belongs to each worker
        ...
            optimizer.step()
            if outer.step():
                state.commit()

    ``every``: a number, or a function of ``inner_steps``. ``keep_progress``: whether survivors of a fault keep their
    inner steps.
    """

    def __init__(self, model: Any, *, every: Every, keep_progress: bool = True) -> None:
        super().__init__(PaddleReplica(model), every, OuterRule(1.0, 0.0), "", keep_progress)


class DiLoCo(OuterSteps):
    """DiLoCo: as ``LocalSGD``, and SGD with Nesterov momentum applies the average of the workers' changes. The defaults
    are the values of the paper (arXiv 2311.08105)."""

    def __init__(
        self,
        model: Any,
        *,
        every: Every = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        keep_progress: bool = True,
    ) -> None:
        super().__init__(PaddleReplica(model), every, OuterRule(outer_lr, outer_momentum), "", keep_progress)


class PaddleReplica:
    """Implements ``edl.worker.local_steps.Replica`` for a layer; arrays are NumPy's."""

    def __init__(self, model: Any) -> None:
        if isinstance(model, Parallel):
            raise StateError(
                "local steps were given the result of edl.parallel, whose workers communicate in each step: give the "
                "plain layer, and train that"
            )
        self._model = model
        trained = [(name, one) for name, one in model.named_parameters() if not one.stop_gradient]
        self.names = [name for name, _ in trained]
        self._parameters = [one for _, one in trained]
        if not trained:
            raise StateError("local steps were given a layer without trained parameters")
        for name, one in trained:
            if kind(one) not in _WIDE:
                raise StateError(
                    f"local steps: {name} is trained in {kind(one)}, and Paddle's optimizers keep other values for "
                    "such parameters; train in float32, with paddle.amp.auto_cast(level='O1') for speed"
                )

    @property
    def workers(self) -> int:
        """Ranks of the ring."""
        return group.size()

    @property
    def rank(self) -> int:
        """Own rank in the ring."""
        ring = group.current()
        return 0 if ring is None else ring.rank

    def check(self, objects: Mapping[str, Any]) -> None:
        """The layer must be in the state, optimizers of its parameters must not."""
        if not any(one is self._model for one in objects.values()):
            raise StateError("the model of local steps is missing in the State: State(model=model, outer=outer, …)")
        mine = {id(one) for one in self._parameters}
        for name, obj in objects.items():
            held = obj._parameter_list if isinstance(obj, paddle.optimizer.Optimizer) else None
            parts = [part for one in held or () for part in (one["params"] if isinstance(one, dict) else [one])]
            if any(id(one) in mine for one in parts):
                raise StateError(
                    f"state.{name}: with local steps each worker has an inner optimizer of its own, which differs from "
                    "the others'; leave it out of the State"
                )

    def check_wire(self, wire: str) -> None:
        """Arrays are sent in their own type: the ring adds 16-bit floats up in 32 bits, and sends those."""

    def read(self) -> list[Any]:
        """Copies in the host's memory."""
        refuse_new(self.names, (name for name, one in self._model.named_parameters() if not one.stop_gradient))
        return [np.array(one.numpy()) for one in self._parameters]

    def write(self, arrays: Sequence[Any]) -> None:
        """Copy into the parameters."""
        for parameter, array in zip(self._parameters, arrays, strict=True):
            fill(parameter, array)

    def rounded(self, number: int, array: Any) -> Any:
        """The same array, since parameters have its type."""
        return array

    def place(self, number: int, array: Any) -> Any:
        """The same array: it stays in the host's memory."""
        return array

    def zeros(self, array: Any) -> Any:
        """Zeros of the same type."""
        return np.zeros_like(array)

    def _buffers(self) -> list[Any]:
        return [one for one in buffers_of(self._model) if kind(one) in _WIDE]

    def read_buffers(self) -> list[Any]:
        """Copies in the host's memory."""
        return [np.array(one.numpy()) for one in self._buffers()]

    def write_buffers(self, arrays: Sequence[Any]) -> None:
        """Copy into the buffers."""
        for buffer, array in zip(self._buffers(), arrays, strict=True):
            fill(buffer, array)

    def _all(self) -> list[Any]:
        return [*self._model.parameters(), *self._model.buffers()]

    def copy(self) -> list[Any]:
        """Copies in the host's memory."""
        return [np.array(one.numpy()) for one in self._all()]

    def set(self, saved: Sequence[Any]) -> None:
        """Give all parameters and buffers the values of ``copy``."""
        for one, values in zip(self._all(), saved, strict=True):
            fill(one, values)

    def send_from_first(self) -> None:
        """Broadcast from rank 0, one by one: this happens once per job."""
        for one in self._all():
            broadcast(one)

    def sum_over_workers(self, arrays: list[Any], wire: str) -> list[Any]:
        """One sum per bucket. The result replaces the given arrays' values."""
        ring = group.current()
        if ring is None or ring.world_size == 1:
            return arrays
        for dtype in {one.dtype: None for one in arrays}:
            same = [one for one in arrays if one.dtype == dtype]
            for members in buckets([one.nbytes for one in same]):
                parts = [same[number] for number in members]
                flat = np.concatenate([one.reshape(-1) for one in parts])
                ring.all_reduce(flat)
                at = 0
                for one in parts:
                    one[...] = flat[at : at + one.size].reshape(one.shape)
                    at += one.size
        return arrays

    def exchange(self, data: bytes) -> list[bytes]:
        """Exchange bytes over the ring."""
        found: list[bytes] = FRAMEWORK.exchange(data)
        return found
