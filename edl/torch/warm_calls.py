"""``Calls`` of ``edl.torch.warm_up`` on torch's devices: calls only, no decisions.

They change nothing that a script can see: no random number is drawn, and dtype, device and grad mode are given.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from edl.torch import nccl

_SIDE = 64
"""Rows of the matrices."""
_TIMEOUT = timedelta(seconds=60)


def nccl_of_one() -> Any:
    """An NCCL backend of this process alone. It is no process group: ``torch.distributed`` does not know it."""
    nccl.set_up(os.environ)  # noqa: TID251  torch's own settings
    backend: Any = dist.ProcessGroupNCCL
    return backend(PrefixStore("edl/warm-up", HashStore()), 0, 1, timeout=_TIMEOUT)


class DeviceCalls:
    """``Calls`` on one device."""

    def __init__(self, device: torch.device, backend_of_one: Callable[[], Any] = nccl_of_one) -> None:
        self._device = device
        self._backend_of_one = backend_of_one

    def open(self) -> None:
        """A kernel that adds two numbers, the first of this process."""
        with self._on_device():
            self._ones(1).add_(1).tolist()

    def multiply(self) -> None:
        """Autograd runs the backward pass on a thread of its own, with its own handle of cuBLAS."""
        with self._on_device():
            factor = self._ones(_SIDE, _SIDE).requires_grad_()
            (factor @ factor).sum().backward()  # type: ignore[no-untyped-call]
            assert factor.grad is not None  # noqa: S101
            factor.grad[0, 0].item()

    def reduce(self) -> None:
        """Its threads end in the background."""
        with self._on_device():
            backend = self._backend_of_one()
            try:
                value = self._ones(1)
                backend.allreduce([value]).wait()
                value.tolist()
            finally:
                held = [backend]
                del backend
                threading.Thread(target=_free, args=(held,), name="edl-warm-up").start()

    def _ones(self, *shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.float32, device=self._device)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        current = torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()
        with torch.inference_mode(False), torch.enable_grad(), current:
            yield


def _free(held: list[Any]) -> None:
    if hasattr(held[0], "abort"):
        with contextlib.suppress(RuntimeError):
            held[0].abort()
    held.clear()
