"""A Paddle layer as needed by logical ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from edl.errors import StateError
from edl.paddle import group
from edl.paddle.arrays import fill, kind
from edl.paddle.framework import FRAMEWORK
from edl.paddle.random_state import RandomState, reseed

_SMALL = ("float16", "bfloat16")
"""Types that are added up in 32 bits."""


def buffers(layer: Any) -> list[Any]:
    """Tensors that forward passes change, including statistics that Paddle stores as parameters without gradient, which
    are vectors. Frozen matrices, which may be large, are left out."""
    kept = [one for one in layer.parameters() if one.stop_gradient and len(one.shape) <= 1]
    return [*layer.buffers(), *kept]


class LogicalModel:
    """Implements ``edl.worker.accumulate.LogicalRankModel``. Gradients are flattened and grouped by type in the host's
    memory."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._random = RandomState()
        self.workers = group.size()
        self._parameters: list[Any] = []
        self._kinds: dict[str, list[int]] = {}
        self._note_trained()

    def _note_trained(self) -> None:
        self._parameters = [one for one in self._layer.parameters() if not one.stop_gradient]
        self._kinds = {}
        for number, parameter in enumerate(self._parameters):
            name = "float32" if kind(parameter) in _SMALL else kind(parameter)
            self._kinds.setdefault(name, []).append(number)

    # --- random numbers ----------------------------------------------------------------------------------------------

    def random(self) -> dict[str, Any]:
        """States of Paddle's, numpy's and Python's generators."""
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
            parameter.clear_gradient(False)

    def take(self) -> tuple[bytes, list[Any]]:
        """Take the gradients, one array per type. Unused parameters count as 0."""
        used = bytes(one.grad is not None for one in self._parameters)
        arrays = [
            np.concatenate([self._piece(self._parameters[number], name) for number in numbers])
            for name, numbers in self._kinds.items()
        ]
        for parameter in self._parameters:
            parameter.clear_gradient(False)
        return used, arrays

    def _piece(self, parameter: Any, name: str) -> Any:
        gradient = parameter.grad
        if gradient is None:
            return np.zeros(parameter.size, name)
        if gradient.is_selected_rows():
            raise StateError("--logical-ranks needs dense gradients: sparse=False for embeddings")
        wide = gradient.astype(name) if kind(gradient) != name else gradient
        return wide.numpy().reshape(-1)

    def give(self, used: bytes, arrays: list[Any]) -> None:
        """Set the gradients as separate tensors."""
        for numbers, array in zip(self._kinds.values(), arrays, strict=True):
            at = 0
            for number in numbers:
                parameter = self._parameters[number]
                size = int(parameter.size)
                piece = array[at : at + size]
                at += size
                if used[number]:
                    values = paddle.to_tensor(piece.reshape(parameter.shape), place=parameter.place)
                    parameter.grad = values.astype(parameter.dtype)
                else:
                    parameter.clear_gradient(False)

    def squared(self, arrays: list[Any]) -> float:
        """The squared norm, computed in 64 bits."""
        return sum(float(np.square(array, dtype=np.float64).sum()) for array in arrays)

    # --- among the workers -------------------------------------------------------------------------------------------

    def exchange(self, data: bytes) -> list[bytes]:
        """Exchange bytes over the ring of the round."""
        found: list[bytes] = FRAMEWORK.exchange(data)
        return found

    def sizes(self) -> list[int]:
        """Number of elements of each kind."""
        return [sum(int(self._parameters[number].size) for number in numbers) for numbers in self._kinds.values()]

    def blank(self, array: int, rows: int, columns: int) -> Any:
        """An uninitialized array of one kind, of this shape."""
        return np.empty((rows, columns), list(self._kinds)[array])

    def gather(self, sent: Any) -> Any:
        """Gather an array from all workers over the ring of the round."""
        ring = group.current()
        return [sent] if ring is None else ring.all_gather(sent)

    def send_buffers(self, saved: list[Any], root: int) -> None:
        """Set the buffers to those of rank ``root``, sent as bytes in one message."""
        ring = group.current()
        if ring is not None and ring.world_size > 1:
            flat = np.frombuffer(bytearray(b"".join(one.tobytes() for one in saved)), np.uint8)
            ring.broadcast(flat, root)
            at, received = 0, []
            for one in saved:
                received.append(np.frombuffer(flat[at : at + one.nbytes], one.dtype).reshape(one.shape))
                at += one.nbytes
            saved = received
        for buffer, values in zip(buffers(self._layer), saved, strict=True):
            fill(buffer, values)
