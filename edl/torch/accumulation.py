"""``accumulate`` for PyTorch: steps of several micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from edl.arithmetic.adascale import AdaScale
from edl.errors import StateError
from edl.torch.ddp import plain
from edl.torch.framework import current
from edl.torch.logical import LogicalModel
from edl.worker.accumulate import Step, begin, found_scaler
from edl.worker.steps import StepLoader


def accumulate(
    loader: StepLoader,
    model: torch.nn.Module,
    *,
    noise: AdaScale | None = None,
    seed: int = 0,
    first_step: int = 0,
    scaler: torch.amp.GradScaler | None = None,
) -> Iterator[Step]:
    """Iterate over the rest of the loader's epoch, step by step::

        for step in edl.accumulate(loader, ddp):
            for batch in step:
                step.backward(loss_function(ddp(batch.x), batch.y))  # the mean over the micro-batch
            optimizer.step()
            optimizer.zero_grad()
            state.commit()

    After a step's last ``backward`` the gradients are those of the mean loss over all samples of the step, on all
    workers. ``model``: made by ``edl.parallel``, or a plain module on a single worker; with ``--logical-ranks`` either.

    ``noise``: receives AdaScale's measurements, if it is not in the ``State``. ``seed``: for the random numbers of
    logical ranks; ``first_step``: number of steps made before this loop, for scripts without a ``State``. ``scaler``:
    scales the losses that ``step.backward`` gets, if it is not in the ``State``. Raises ``StateError`` for a model that
    is sharded, or plain on several workers.
    """
    wrapped = TorchModel(model, found_scaler(scaler, torch.amp.GradScaler, torch.amp.GradScaler.is_enabled))
    return begin(loader, wrapped, lambda: LogicalModel(wrapped.plain), noise, seed, first_step)


class TorchModel:
    """Implements ``edl.worker.accumulate.DataParallelModel`` for a module, plain or in ``DistributedDataParallel``."""

    def __init__(self, model: torch.nn.Module, scaler: torch.amp.GradScaler | None = None) -> None:
        if hasattr(model, "set_requires_gradient_sync"):
            raise StateError("accumulate() is not possible with fully_shard, whose gradients are not whole")
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        self._wrapper = model if isinstance(model, DistributedDataParallel) else None
        self.plain: torch.nn.Module = plain(model)
        self._parameters = [one for one in self.plain.parameters() if one.requires_grad]
        self.workers = dist.get_world_size(self._wrapper.process_group) if self._wrapper is not None else 1
        self._scaler = scaler
        self._squares: list[torch.Tensor] = []
        self._hooks: list[Any] = []

    def check_workers(self) -> None:
        """Refuse a plain model on several workers, since its gradients would not be averaged. Raises ``StateError``."""
        if self._wrapper is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise StateError(
                f"accumulate() was given a plain model on {dist.get_world_size()} workers: wrap it, "
                "edl.parallel(model), inside the function that run calls"
            )

    def apart(self) -> contextlib.AbstractContextManager[Any]:
        """Passes in this context are not averaged: DDP's ``no_sync``."""
        return self._wrapper.no_sync() if self._wrapper is not None else contextlib.nullcontext()

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """Passes in this context are averaged, as DDP does by default."""
        return contextlib.nullcontext()

    def must_average(self) -> bool:
        """With ``static_graph`` DDP fails if ``no_sync`` is around its first pass, in which it records the graph."""
        ddp: Any = self._wrapper
        return ddp is not None and ddp.static_graph and not getattr(ddp, "_static_graph_delay_allreduce_enqueued", True)

    def backward(self, loss: torch.Tensor, factor: float) -> None:
        """Run a backward pass. The multiplication is skipped for factor 1 to save time."""
        self._squares = []
        torch.autograd.backward(loss if factor == 1.0 else loss * factor)

    def backward_of_nothing(self, loss: torch.Tensor) -> None:
        """Run a backward pass whose gradients are 0: DDP waits for its hooks, and SyncBatchNorm for gradients of the
        other workers, so the pass itself is needed. The hooks are for NaN and infinity, which stay so times 0."""
        with contextlib.ExitStack() as hooks:
            for parameter in self._parameters:
                hooks.callback(parameter.register_hook(torch.zeros_like).remove)
            torch.autograd.backward(loss, torch.zeros_like(loss))

    def conclude(self) -> None:
        """Nothing to do: DDP has averaged in the last pass."""

    def value(self, loss: torch.Tensor, factor: float) -> torch.Tensor:
        """The weighted loss as a tensor on its device, without waiting for the device."""
        scale = self._scale()
        return loss.detach() * factor if scale is None else loss.detach() * factor / scale

    def loss_scale(self) -> float:
        """What the gradient scaler multiplies losses by. Waits for the device."""
        scale = self._scale()
        return 1.0 if scale is None else float(scale)

    def _scale(self) -> torch.Tensor | None:
        """The loss scale on its device, where ``get_scale()`` would wait; None if no loss has been scaled."""
        used = self._scaler is not None and self._scaler.is_enabled()
        return self._scaler._get_scale_async() if used else None  # type: ignore[union-attr]

    def listen(self) -> None:
        """Measure each pass with hooks, since ``.grad`` holds the sum of several passes."""
        if not self._hooks:
            hook = self._hear
            self._hooks = [parameter.register_hook(hook) for parameter in self._parameters]

    def _hear(self, gradient: torch.Tensor) -> None:
        self._squares.append(_square(gradient))

    def heard(self) -> float:
        """The squared norm of the last pass's gradients. Waits for the device."""
        return _total(self._squares)

    def square(self) -> float:
        """The squared norm of ``.grad``. Waits for the device."""
        return _total([_square(one.grad) for one in self._parameters if one.grad is not None])

    def exchange(self, data: bytes) -> list[bytes]:
        """Exchange bytes over the default group; for a plain model only this worker's are returned."""
        return current().exchange(data) if self._wrapper is not None else [data]

    def copy_buffers(self) -> list[torch.Tensor]:
        """A copy of each buffer of the model."""
        return [buffer.detach().clone() for buffer in self.plain.buffers()]

    def set_buffers(self, saved: list[torch.Tensor]) -> None:
        """Overwrite the model's buffers in place."""
        with torch.no_grad():
            for buffer, values in zip(self.plain.buffers(), saved, strict=True):
                buffer.copy_(values)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _square(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    values = torch.view_as_real(values) if values.is_complex() else values
    wide = values.detach().float() if values.element_size() < _FLOAT32_BYTES else values.detach()
    return wide.reshape(-1).dot(wide.reshape(-1))


def _total(squares: list[torch.Tensor]) -> float:
    if not squares:
        return 0.0
    device = squares[0].device
    return float(torch.stack([square.to(device, torch.float64) for square in squares]).sum())


_FLOAT32_BYTES = 4
