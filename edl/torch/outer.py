"""``LocalSGD`` and ``DiLoCo`` for PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from edl.arithmetic.outer_step import OuterRule, buckets
from edl.errors import StateError
from edl.torch.cuda import wait_for
from edl.torch.ddp import plain
from edl.torch.framework import current
from edl.worker.local_steps import Every, OuterSteps, refuse_new

_WIRES = {"": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LocalSGD(OuterSteps):
    """Local SGD: each worker trains on its own, and every ``every`` inner steps the models are averaged::

        outer = edl.LocalSGD(model, every=8)
        state = edl.State(model=model, outer=outer)  # without the inner optimizer, which belongs to each worker
        ...
            optimizer.step()
            if outer.step():
                state.commit()

    ``every``: a number, or a function of ``inner_steps``. ``wire``: type in which changes of parameters are sent,
    ``float32``, ``bfloat16`` or ``float16``; empty for that of the parameters, or ``float32`` if it is smaller.
    ``keep_progress``: whether survivors of a fault keep their inner steps.
    """

    def __init__(self, model: torch.nn.Module, *, every: Every, wire: str = "", keep_progress: bool = True) -> None:
        super().__init__(TorchReplica(model), every, OuterRule(1.0, 0.0), wire, keep_progress)


class DiLoCo(OuterSteps):
    """DiLoCo: as ``LocalSGD``, and SGD with Nesterov momentum applies the average of the workers' changes. The defaults
    are the values of the paper (arXiv 2311.08105)."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        every: Every = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        wire: str = "",
        keep_progress: bool = True,
    ) -> None:
        super().__init__(TorchReplica(model), every, OuterRule(outer_lr, outer_momentum), wire, keep_progress)


class TorchReplica:
    """Implements ``edl.worker.local_steps.Replica`` for a module."""

    def __init__(self, model: torch.nn.Module) -> None:
        if isinstance(model, DistributedDataParallel) or hasattr(model, "set_requires_gradient_sync"):
            raise StateError(
                f"local steps were given a {type(model).__name__}, whose workers communicate in each step: give the "
                "plain model, and train that"
            )
        self._model = model
        trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        self.names = [name for name, _ in trained]
        self._parameters = [one for _, one in trained]
        if not trained:
            raise StateError("local steps were given a model without trained parameters")

    @property
    def workers(self) -> int:
        """Ranks of the default group."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """Own rank in the default group."""
        return dist.get_rank() if dist.is_initialized() else 0

    def check(self, objects: Mapping[str, Any]) -> None:
        """The model must be in the state, optimizers of its parameters must not."""
        if not any(plain(one) is self._model for one in objects.values()):
            raise StateError("the model of local steps is missing in the State: State(model=model, outer=outer, …)")
        mine = {id(one) for one in self._parameters}
        for name, obj in objects.items():
            groups = obj.param_groups if isinstance(obj, torch.optim.Optimizer) else ()
            if any(id(one) in mine for group in groups for one in group["params"]):
                raise StateError(
                    f"state.{name}: with local steps each worker has an inner optimizer of its own, which differs from "
                    "the others'; leave it out of the State"
                )

    def check_wire(self, wire: str) -> None:
        """The types that gloo and NCCL add up."""
        if wire not in _WIRES:
            raise StateError(f"wire={wire!r}: one of {', '.join(name for name in _WIRES if name)}")

    def read(self) -> list[torch.Tensor]:
        """Copies; 16-bit floats become float32."""
        refuse_new(self.names, (name for name, one in self._model.named_parameters() if one.requires_grad))
        return [_wide(one.detach()) for one in self._parameters]

    def write(self, arrays: Sequence[torch.Tensor]) -> None:
        """Copy into the parameters."""
        with torch.no_grad():
            for parameter, array in zip(self._parameters, arrays, strict=True):
                parameter.copy_(array)

    def rounded(self, number: int, array: torch.Tensor) -> torch.Tensor:
        """To the parameter's type and back."""
        dtype = self._parameters[number].dtype
        return array if array.dtype == dtype else array.to(dtype).to(array.dtype)

    def place(self, number: int, array: Any) -> torch.Tensor:
        """On the parameter's device."""
        parameter = self._parameters[number]
        placed: torch.Tensor = torch.as_tensor(array).to(parameter.device, _wide_type(parameter.dtype))
        return placed

    def zeros(self, array: torch.Tensor) -> torch.Tensor:
        """Zeros on the same device."""
        return torch.zeros_like(array)

    def _buffers(self) -> list[torch.Tensor]:
        return [one for one in self._model.buffers() if one.is_floating_point()]

    def read_buffers(self) -> list[torch.Tensor]:
        """Copies, as of parameters."""
        return [_wide(one) for one in self._buffers()]

    def write_buffers(self, arrays: Sequence[torch.Tensor]) -> None:
        """Copy into the buffers."""
        for buffer, array in zip(self._buffers(), arrays, strict=True):
            buffer.copy_(array)

    def _all(self) -> list[torch.Tensor]:
        return [one.detach() for one in (*self._model.parameters(), *self._model.buffers())]

    def copy(self) -> list[torch.Tensor]:
        """Copies in their own types."""
        return [one.clone() for one in self._all()]

    def set(self, saved: Sequence[torch.Tensor]) -> None:
        """Give all parameters and buffers the values of ``copy``."""
        for one, values in zip(self._all(), saved, strict=True):
            one.copy_(values)

    def send_from_first(self) -> None:
        """Broadcast from rank 0, one by one: this happens once per job."""
        for one in self._all():
            values = one.contiguous()
            dist.broadcast(values, 0)
            one.copy_(values)

    def sum_over_workers(self, arrays: list[torch.Tensor], wire: str) -> list[torch.Tensor]:
        """One sum per bucket. The result replaces the given arrays' values. Waits for the device, so the next
        ``exchange`` refuses what an abort has spoilt."""
        if self.workers == 1:
            return arrays
        kinds = {(one.device, one.dtype): None for one in arrays}
        for device, dtype in kinds:
            same = [one for one in arrays if (one.device, one.dtype) == (device, dtype)]
            sent = dtype if dtype.is_complex else _WIRES[wire] or dtype  # no shorter type has an imaginary part
            for group in buckets([one.numel() * sent.itemsize for one in same]):
                parts = [same[number] for number in group]
                flat = torch.cat([one.reshape(-1).to(sent) for one in parts])
                dist.all_reduce(flat)
                at = 0
                for one in parts:
                    one.copy_(flat[at : at + one.numel()].view_as(one))
                    at += one.numel()
        for device in {one.device for one in arrays}:
            wait_for(device)  # NCCL's calls return before their sums exist
        return arrays

    def exchange(self, data: bytes) -> list[bytes]:
        """Exchange bytes over the default group."""
        return current().exchange(data)


def _wide_type(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= torch.float32.itemsize else torch.float32


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(_wide_type(tensor.dtype), copy=True)
