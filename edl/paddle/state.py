"""``State`` and ``run`` for Paddle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import paddle

from edl.errors import StateError
from edl.paddle.framework import FRAMEWORK
from edl.paddle.optimizer_state import capture, load
from edl.worker import state as core
from edl.worker import tree
from edl.worker.loop import make_run

run = make_run(FRAMEWORK)
_REFUSED = frozenset({
    "LookAhead", "ModelAverage", "GradientMergeOptimizer", "HybridParallelOptimizer", "DygraphShardingOptimizer",
    "DygraphShardingOptimizerV2", "GroupShardedOptimizerStage2", "GroupShardedStage2", "GroupShardedStage3",
    "PipelineLayer", "PipelineParallel", "ShardingParallel", "TensorParallel",
})  # fmt: skip


class State(core.State):
    """What a training script must not lose: ``State(model=model, optimizer=optimizer, epoch=0)``.

    Layers, optimizers, LR schedulers, anything else with ``state_dict``, tensors, arrays and plain values.
    """

    def __init__(self, *, sharded: bool = False, copy_every: int = 1, **values: Any) -> None:
        if sharded:
            # Paddle 3.3's distributed checkpoint needs CUDA to be read by more than one process.
            raise StateError("sharded=True: sharded state is not possible with Paddle, only with PyTorch")
        super().__init__(FRAMEWORK, values, sharded=sharded, copy_every=copy_every)
        for name, obj in self._objects.items():
            _refuse(name, obj)

    def _structure(self, obj: Any) -> str:
        if not isinstance(obj, paddle.nn.Layer):
            return ""
        return "\n".join(f"{name} {list(one.shape)} {one.dtype}" for name, one in obj.named_parameters())

    def _layers(self) -> dict[str, Any]:
        """The layers that are kept, by the names they are kept under."""
        return {name: value for name, value in self._objects.items() if isinstance(value, paddle.nn.Layer)}

    def _strict(self, name: str, obj: Any) -> frozenset[str]:
        if isinstance(obj, paddle.nn.Layer):
            return frozenset(f"{name}.{path}" for path, _ in obj.named_parameters())
        return frozenset({name}) if isinstance(obj, paddle.optimizer.Optimizer) else frozenset()

    def _capture_object(self, name: str, obj: Any) -> Any:
        if isinstance(obj, paddle.optimizer.Optimizer):
            return capture(obj, self._layers())
        found = obj.state_dict()
        return dict(found) if isinstance(obj, paddle.nn.Layer) else found

    def _load_object(self, name: str, obj: Any, plain: Any) -> None:
        if isinstance(obj, paddle.optimizer.Optimizer):
            load(obj, self._layers(), plain, self._owned)
        elif isinstance(obj, paddle.nn.Layer):
            _load_layer(obj, plain, self._owned)
        else:
            super()._load_object(name, obj, plain)
            if isinstance(obj, paddle.amp.GradScaler):  # an interrupted step's: the next one's count as unscaled else
                getattr(obj, "_optimizer_states", {}).clear()

    def _load_value(self, name: str, live: Any, plain: Any) -> Any:
        return _load_value(self._owned(plain), live)


def _refuse(name: str, obj: Any) -> None:
    """Optimizers around another one keep that one's state out of sight, and Fleet's spread it over the workers."""
    for kind in type(obj).__mro__:
        if kind.__name__ in _REFUSED and kind.__module__.startswith("paddle."):
            raise StateError(
                f"state.{name}: a {type(obj).__name__} cannot be kept, because it holds or spreads what another "
                "optimizer or layer keeps; keep that one, and use edl.parallel for the model"
            )


def _load_layer(layer: Any, plain: Any, owned: Callable[[Any], Any]) -> None:
    """Paddle's own way copies into the tensors there are. A layer with a way of its own may keep what it gets."""
    own = layer.state_dict()
    missing, unexpected = own.keys() - plain.keys(), plain.keys() - own.keys()
    if missing or unexpected:
        raise ValueError(f"it lacks {sorted(unexpected)[:5]} and has {sorted(missing)[:5]}, which were not saved")
    for key, tensor in own.items():
        if list(tensor.shape) != list(plain[key].shape):
            raise ValueError(f"{key}: saved as {list(plain[key].shape)}, now {list(tensor.shape)}")
    usual = getattr(layer.set_state_dict, "__func__", None) is paddle.nn.Layer.set_state_dict
    layer.set_state_dict(plain if usual else owned(plain))
    for parameter in layer.parameters():
        parameter.clear_gradient(False)  # what an interrupted backward pass has left


def _load_value(plain: Any, live: Any) -> Any:
    """What a value becomes: on the device of the one before. A tensor that is trained (a leaf that takes a gradient)
    is filled, since optimizers hold on to it. Others are new ones: what is there may be part of anything."""
    if isinstance(plain, paddle.Tensor) and isinstance(live, paddle.Tensor):
        if live.is_leaf and not live.stop_gradient:
            if list(live.shape) != list(plain.shape):
                raise ValueError(f"kept as a tensor of {list(plain.shape)}, it is one of {list(live.shape)} now")
            live.set_value(plain)
            live.clear_gradient(False)
            return live
        return plain if live.place._equals(plain.place) else plain.to(live.place)
    if isinstance(plain, dict):
        found = live if isinstance(live, dict) else {}
        return tree.like_dict(plain, ((key, _load_value(part, found.get(key))) for key, part in plain.items()))
    if isinstance(plain, (list, tuple, deque)):
        same = isinstance(live, (list, tuple, deque)) and len(live) == len(plain)
        return tree.like_list(plain, [_load_value(part, live[at] if same else None) for at, part in enumerate(plain)])
    return plain
