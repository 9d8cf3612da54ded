"""``State`` and ``run`` for Paddle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import paddle
from paddle.optimizer.lr import LRScheduler

from edl.errors import StateError
from edl.paddle import scheduler_state
from edl.paddle.ddp import Parallel
from edl.paddle.framework import FRAMEWORK
from edl.paddle.logical import buffers
from edl.paddle.optimizer_state import capture, load
from edl.worker import state as core
from edl.worker import tree
from edl.worker.local_steps import OuterSteps
from edl.worker.loop import make_run
from edl.worker.modes import TRAINING, Mode

run = make_run(FRAMEWORK)
_REFUSED = frozenset({
    "LookAhead", "ModelAverage", "GradientMergeOptimizer", "HybridParallelOptimizer", "DygraphShardingOptimizer",
    "DygraphShardingOptimizerV2", "GroupShardedOptimizerStage2", "GroupShardedStage2", "GroupShardedStage3",
    "PipelineLayer", "PipelineParallel", "ShardingParallel", "TensorParallel",
})  # fmt: skip


class State(core.BaseState):
    """The state of a training script that must not be lost: ``State(model=model, optimizer=optimizer, epoch=0)``.

    It accepts layers, optimizers, LR schedulers, other objects with ``state_dict``, tensors, arrays and plain values.
    Raises ``StateError`` for ``sharded=True`` and for objects that cannot be saved.
    """

    def __init__(self, *, sharded: bool = False, copy_every: int = 1, **values: Any) -> None:
        if sharded:
            # Paddle 3.3's distributed checkpoint can be read by more than one process only with CUDA.
            raise StateError("sharded=True: sharded state is not possible with Paddle, only with PyTorch")
        super().__init__(FRAMEWORK, values, sharded=sharded, copy_every=copy_every)
        for name, obj in self._objects.items():
            _refuse(name, obj)

    def _structure(self, obj: Any) -> str:
        if not isinstance(obj, paddle.nn.Layer):
            return ""
        return "\n".join(f"{name} {list(one.shape)} {one.dtype}" for name, one in obj.named_parameters())

    def _layers(self) -> dict[str, Any]:
        """The layers in the state, by their names."""
        return {name: value for name, value in self._objects.items() if isinstance(value, paddle.nn.Layer)}

    def _strict(self, name: str, obj: Any) -> frozenset[str]:
        if isinstance(obj, paddle.nn.Layer):
            own = set(map(id, buffers(obj)))
            return frozenset(f"{name}.{path}" for path, one in obj.named_parameters() if id(one) not in own)
        return frozenset({name}) if isinstance(obj, (paddle.optimizer.Optimizer, OuterSteps)) else frozenset()

    def _modes(self) -> Iterator[Mode]:
        for name, layer in self._layers().items():
            if isinstance(layer, Parallel):
                yield name, layer, TRAINING
                layer = layer.layer  # which is not among the wrapper's sublayers
            parts = layer.named_sublayers(include_self=True)
            yield from ((f"{name}.{path}", part, TRAINING) for path, part in parts)
            yield from ((f"{name}.{path}", part, "stop_gradient") for path, part in layer.named_parameters())

    def _capture_object(self, name: str, obj: Any) -> Any:
        if isinstance(obj, paddle.optimizer.Optimizer):
            return capture(obj, self._layers())
        if isinstance(obj, LRScheduler):
            return scheduler_state.capture(obj)
        found = obj.state_dict()
        return dict(found) if isinstance(obj, paddle.nn.Layer) else found

    def _load_object(self, name: str, obj: Any, plain: Any) -> None:
        if isinstance(obj, paddle.optimizer.Optimizer):
            load(obj, self._layers(), plain, self._owned)
        elif isinstance(obj, paddle.nn.Layer):
            _load_layer(obj, plain, self._owned)
        elif isinstance(obj, LRScheduler):
            scheduler_state.load(obj, self._owned(plain))
        else:
            super()._load_object(name, obj, plain)
            if isinstance(obj, paddle.amp.GradScaler):  # may be left by an interrupted step
                getattr(obj, "_optimizer_states", {}).clear()

    def _load_value(self, name: str, live: Any, plain: Any) -> Any:
        return _load_value(self._owned(plain), live)


def _refuse(name: str, obj: Any) -> None:
    """Refuse optimizers that wrap another one and hide its state, and Fleet's, which distribute it over the workers.
    Raises ``StateError``."""
    for kind in type(obj).__mro__:
        if kind.__name__ in _REFUSED and kind.__module__.startswith("paddle."):
            raise StateError(
                f"state.{name}: a {type(obj).__name__} cannot be kept, because it holds or spreads the state of an "
                "optimizer or layer; keep that one, and use edl.parallel for the model"
            )


def _load_layer(layer: Any, plain: Any, owned: Callable[[Any], Any]) -> None:
    """Restore a layer. Paddle's own method copies into the existing tensors; a layer with its own method may keep its
    argument and gets a copy."""
    own = layer.state_dict()
    missing, unexpected = own.keys() - plain.keys(), plain.keys() - own.keys()
    if missing or unexpected:
        raise ValueError(f"it lacks the saved {sorted(unexpected)[:5]}, and {sorted(missing)[:5]} were not saved")
    for key, tensor in own.items():
        if list(tensor.shape) != list(plain[key].shape):
            raise ValueError(f"{key}: saved as {list(plain[key].shape)}, now {list(tensor.shape)}")
    usual = getattr(layer.set_state_dict, "__func__", None) is paddle.nn.Layer.set_state_dict
    layer.set_state_dict(plain if usual else owned(plain))
    for parameter in layer.parameters():
        parameter.clear_gradient(False)  # may be left by an interrupted backward pass


def _load_value(plain: Any, live: Any) -> Any:
    """The restored value, on the device of the existing one. A trained tensor (a leaf that requires a gradient) is
    filled in place, since optimizers refer to it. Others are replaced by new ones, since the existing one may be part
    of anything."""
    if isinstance(plain, paddle.Tensor) and isinstance(live, paddle.Tensor):
        if live.is_leaf and not live.stop_gradient:
            if list(live.shape) != list(plain.shape):
                raise ValueError(f"saved as a tensor of shape {list(plain.shape)}, now its shape is {list(live.shape)}")
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
