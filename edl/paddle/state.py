"""``State`` and ``run`` for Paddle."""

from __future__ import annotations

from typing import Any

import paddle

from edl.errors import StateError
from edl.paddle.framework import FRAMEWORK
from edl.paddle.optimizer_state import capture, load
from edl.worker import state as core
from edl.worker.loop import make_run

run = make_run(FRAMEWORK)


class State(core.State):
    """What a training script must not lose: ``State(model=model, optimizer=optimizer, epoch=0)``.

    Layers, optimizers, LR schedulers, anything else with ``state_dict``, tensors, arrays and plain values.
    """

    def __init__(self, *, sharded: bool = False, copy_every: int = 1, **values: Any) -> None:
        if sharded:
            # Paddle 3.3's distributed checkpoint needs CUDA to be read by more than one process.
            raise StateError("sharded=True: sharded state is not possible with Paddle, only with PyTorch")
        super().__init__(FRAMEWORK, values, sharded=sharded, copy_every=copy_every)

    def _layers(self) -> dict[str, Any]:
        """The layers that are kept, by the names they are kept under."""
        return {name: value for name, value in self._objects.items() if isinstance(value, paddle.nn.Layer)}

    def _capture_object(self, name: str, obj: Any) -> Any:
        if isinstance(obj, paddle.optimizer.Optimizer):
            return capture(obj, self._layers())
        return obj.state_dict()

    def _load_object(self, name: str, obj: Any, plain: Any) -> None:
        if isinstance(obj, paddle.optimizer.Optimizer):
            load(obj, self._layers(), plain)
        elif isinstance(obj, paddle.nn.Layer):
            _load_layer(obj, plain)
        else:
            super()._load_object(name, obj, plain)


def _load_layer(layer: Any, plain: Any) -> None:
    own = layer.state_dict()
    missing, unexpected = own.keys() - plain.keys(), plain.keys() - own.keys()
    if missing or unexpected:
        raise ValueError(f"it lacks {sorted(unexpected)[:5]} and has {sorted(missing)[:5]}, which were not saved")
    for key, tensor in own.items():
        if list(tensor.shape) != list(plain[key].shape):
            raise ValueError(f"{key}: saved as {list(plain[key].shape)}, now {list(tensor.shape)}")
    layer.set_state_dict(plain)  # copies
    for parameter in layer.parameters():
        parameter.clear_gradient(False)  # what an interrupted backward pass has left
