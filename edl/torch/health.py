"""The matrix product of a health check with torch, on each GPU or else on the processor; see
``edl.worker.probe.product``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from edl.worker.probe.product import SEEDS, WRONG, WrongProduct, largest_sum, timed

GPU_FACTOR = 4
"""On a GPU the matrices have this many times as many rows."""


def devices(slots: int) -> Iterator[TorchDevice]:
    """The devices of this node that workers use. ``slots``: if there are as many devices, each has one."""
    number = torch.cuda.device_count()
    if not number:
        yield TorchDevice(torch.device("cpu"), "cpu, torch", -1)
    for index in range(number):
        name = torch.cuda.get_device_name(index)
        yield TorchDevice(torch.device("cuda", index), f"{name}, torch", index if number == slots else -1)


class TorchDevice:
    """One device; a ``ProbedDevice``."""

    def __init__(self, device: torch.device, kind: str, slot: int) -> None:
        self.kind = kind
        self.slot = slot
        self._device = device

    def product_s(self, size: int) -> float:
        """See ``ProbedDevice``. The product is verified on the processor."""
        gpu = self._device.type == "cuda"
        size *= GPU_FACTOR if gpu else 1
        first, second = (_matrix(size, seed) for seed in SEEDS)
        a, b = (one.to(self._device, torch.float32) for one in (first, second))

        def multiply() -> torch.Tensor:
            found = a @ b
            if gpu:
                torch.cuda.synchronize(self._device)
            return found

        result = multiply()
        _verify(result.cpu(), first, second)
        return timed(multiply, lambda again: torch.equal(again, result))


def _matrix(size: int, seed: int) -> torch.Tensor:
    """The matrix of ``edl.worker.probe.product.entry``."""
    rows, columns = torch.arange(size).unsqueeze(1), torch.arange(size)
    return (131 * rows + 31 * columns + 5 * rows * columns + seed) % 17 - 8


def _verify(result: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    if not bool((result.abs() <= largest_sum(len(result))).all()):
        raise WrongProduct(f"{WRONG}: not numbers, or too large ones")
    whole = result.to(torch.int64)
    if not torch.equal(whole.to(torch.float32), result):
        raise WrongProduct(f"{WRONG}: not whole numbers")
    weights = 7919 * torch.arange(len(result)) % 1_000_003 + 1
    differs = torch.mv(whole, weights) != torch.mv(first, torch.mv(second, weights))
    if bool(differs.any()):
        rows = torch.nonzero(differs).flatten().tolist()
        raise WrongProduct(f"{WRONG}: {len(rows)} of {len(result)} rows, the first is {rows[0]}")
