"""A torch model as needed by logical ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from edl.errors import StateError
from edl.torch.framework import current
from edl.torch.random_state import RandomState, reseed

_SMALL = (torch.float16, torch.bfloat16)
"""Types that are added up in 32 bits."""


class LogicalModel:
    """Implements ``edl.worker.accumulate.LogicalRankModel``. Gradients are flattened and grouped by device and type."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._random = RandomState()
        self.workers = dist.get_world_size() if dist.is_initialized() else 1
        self._parameters: list[torch.nn.Parameter] = []
        self._kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        self._note_trained()

    def _note_trained(self) -> None:
        self._parameters = [one for one in self._model.parameters() if one.requires_grad]
        self._kinds = {}
        for number, parameter in enumerate(self._parameters):
            dtype = torch.float32 if parameter.dtype in _SMALL else parameter.dtype
            self._kinds.setdefault((parameter.device, dtype), []).append(number)

    # --- random numbers ----------------------------------------------------------------------------------------------

    def random(self) -> dict[str, Any]:
        """States of torch's and Python's generators, and of numpy's if it has been imported."""
        return self._random.state_dict()

    def set_random(self, saved: dict[str, Any]) -> None:
        """Restore the states returned by ``random``."""
        self._random.load_state_dict(saved)

    def reseed(self, key: bytes) -> None:
        """Seed each generator from its own part of the key."""
        reseed(key)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Clear the gradients. The script may have frozen or unfrozen parameters since the last step."""
        self._note_trained()
        for parameter in self._parameters:
            parameter.grad = None

    def take(self) -> tuple[bytes, list[torch.Tensor]]:
        """Take the gradients, one array per device and type. Unused parameters count as 0."""
        used = bytes(one.grad is not None for one in self._parameters)
        arrays = []
        for (device, dtype), numbers in self._kinds.items():
            pieces = [self._piece(self._parameters[number]) for number in numbers]
            arrays.append(torch.cat([piece.to(device, dtype) for piece in pieces]))
        for parameter in self._parameters:
            parameter.grad = None
        return used, arrays

    def _piece(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter.grad is None:
            return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        if parameter.grad.layout != torch.strided:
            raise StateError("--logical-ranks needs dense gradients: sparse=False for embeddings")
        return parameter.grad.reshape(-1)

    def give(self, used: bytes, arrays: list[torch.Tensor]) -> None:
        """Set the gradients; they are views of the arrays if types and memory formats are equal."""
        for numbers, array in zip(self._kinds.values(), arrays, strict=True):
            at = 0
            for number in numbers:
                parameter = self._parameters[number]
                piece = array[at : at + parameter.numel()]
                at += parameter.numel()
                parameter.grad = _formatted(piece.view(parameter.shape), parameter) if used[number] else None

    def squared(self, arrays: list[torch.Tensor]) -> float:
        """The squared norm. Waits for the device."""
        flat = (torch.view_as_real(array).flatten() if array.is_complex() else array for array in arrays)
        return sum(float(array.dot(array)) for array in flat)

    # --- among the workers -------------------------------------------------------------------------------------------

    def exchange(self, data: bytes) -> list[bytes]:
        """Exchange bytes over the default group."""
        return current().exchange(data)

    def sizes(self) -> list[int]:
        """Number of elements of each kind."""
        return [sum(self._parameters[number].numel() for number in numbers) for numbers in self._kinds.values()]

    def blank(self, array: int, rows: int, columns: int) -> torch.Tensor:
        """An uninitialized array of one kind, of this shape."""
        device, dtype = list(self._kinds)[array]
        return torch.empty((rows, columns), dtype=dtype, device=device)

    def gather(self, sent: torch.Tensor) -> list[torch.Tensor]:
        """Gather an array from all workers over the default group."""
        came = [torch.empty_like(sent) for _ in range(self.workers)]
        dist.all_gather(came, sent)
        return came

    def send_buffers(self, saved: list[torch.Tensor], root: int) -> None:
        """Set the buffers to those of rank ``root``, sent as bytes, one message per device."""
        buffers = list(self._model.buffers())
        if self.workers > 1:
            saved = [one.clone(memory_format=torch.contiguous_format) for one in saved]
            for device in dict.fromkeys(one.device for one in saved):
                here = [one for one in saved if one.device == device and one.numel()]
                flat = torch.cat([_bytes(one) for one in here])
                dist.broadcast(flat, root)
                for one, part in zip(here, torch.split(flat, [_bytes(one).numel() for one in here]), strict=True):
                    _bytes(one).copy_(part)
        with torch.no_grad():
            for buffer, values in zip(buffers, saved, strict=True):
                buffer.copy_(values)


def _formatted(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient in the type and memory format of its parameter, as autograd makes it: fused optimizers read both as
    they lie in memory."""
    if parameter.is_contiguous():
        return gradient.to(parameter.dtype)
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor as bytes; for other tensors a copy."""
    return tensor.reshape(-1).view(torch.uint8)
