"""The matrix product of a health check with Paddle, on each GPU or else on the processor; see
``edl.worker.probe.product``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import paddle

from edl.worker.probe.product import SEEDS, NumpyDevice, timed, verify

GPU_FACTOR = 4
"""On a GPU the matrices have this many times as many rows."""


def devices(slots: int) -> Iterator[PaddleDevice]:
    """The devices of this node that workers use. ``slots``: if there are as many devices, each has one."""
    number = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    if not number:
        yield PaddleDevice(paddle.CPUPlace(), "cpu, paddle", -1, gpu=False)
    for index in range(number):
        name = paddle.device.cuda.get_device_name(index)
        yield PaddleDevice(paddle.CUDAPlace(index), f"{name}, paddle", index if number == slots else -1, gpu=True)


class PaddleDevice:
    """One device; a ``ProbedDevice``."""

    def __init__(self, place: Any, kind: str, slot: int, *, gpu: bool) -> None:
        self.kind = kind
        self.slot = slot
        self._place = place
        self._gpu = gpu

    def product_s(self, size: int) -> float:
        """See ``ProbedDevice``. The product is verified on the processor."""
        size *= GPU_FACTOR if self._gpu else 1
        first, second = (NumpyDevice(numpy).matrix(size, seed) for seed in SEEDS)
        a, b = (paddle.to_tensor(one.astype("float32"), place=self._place) for one in (first, second))

        def multiply() -> Any:
            found = a @ b
            if self._gpu:
                paddle.device.cuda.synchronize(self._place)
            return found

        result = multiply()
        verify(numpy, result.numpy(), first, second)
        return timed(multiply, lambda again: bool(paddle.equal_all(again, result)))
