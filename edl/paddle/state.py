"""``State`` and ``run`` for Paddle."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import paddle
from paddle.optimizer.lr import LRScheduler

from edl.checkpoint.reading.assembly import LOCAL
from edl.checkpoint.reading.memory_parts import MemoryParts
from edl.checkpoint.reading.reader import Folder
from edl.checkpoint.reading.saved_parts import SavedParts
from edl.errors import StateError
from edl.paddle import group, scheduler_state, sharded_state
from edl.paddle.arrays import check_fit
from edl.paddle.ddp import Parallel
from edl.paddle.framework import FRAMEWORK
from edl.paddle.logical import buffers
from edl.paddle.optimizer_state import capture, load
from edl.paddle.shards import of
from edl.wire.local import Seat
from edl.worker import state as core
from edl.worker import tree
from edl.worker.contents import is_own
from edl.worker.link import Link
from edl.worker.local_steps import OuterSteps
from edl.worker.loop import make_run
from edl.worker.modes import TRAINING, Mode
from edl.worker.session import Session

run = make_run(FRAMEWORK)
_REFUSED = frozenset({
    "LookAhead", "ModelAverage", "GradientMergeOptimizer", "HybridParallelOptimizer", "DygraphShardingOptimizer",
    "DygraphShardingOptimizerV2", "GroupShardedOptimizerStage2", "GroupShardedStage2", "GroupShardedStage3",
    "PipelineLayer", "PipelineParallel", "ShardingParallel", "TensorParallel",
})  # fmt: skip


class State(core.BaseState):
    """The state of a training script that must not be lost: ``State(model=model, optimizer=optimizer, epoch=0)``.

    It accepts layers, optimizers, LR schedulers, other objects with ``state_dict``, tensors, arrays and plain values.
    ``sharded=True``: the optimizer comes from ``group_sharded_parallel``, and each worker saves its rows; the result
    can be restored at any world size. Raises ``StateError`` for objects that cannot be saved.
    """

    def __init__(self, *, sharded: bool = False, copy_every: int = 1, **values: Any) -> None:
        super().__init__(FRAMEWORK, values, sharded=sharded, copy_every=copy_every)
        for name, obj in self._objects.items():
            _refuse(name, obj)
        _check_sharded(self._objects, sharded)

    @property
    def _why_restarted(self) -> str:
        return ""  # rows are cut anew in the same process

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
        if self._sharded and (shards := of(obj)) is not None:
            if obj is shards.optimizer:
                return sharded_state.capture_optimizer(shards, obj, self._layers())
            return sharded_state.capture_layer(shards, obj)
        if isinstance(obj, paddle.optimizer.Optimizer):
            return capture(obj, self._layers())
        if isinstance(obj, LRScheduler):
            return scheduler_state.capture(obj)
        found = obj.state_dict()
        return dict(found) if isinstance(obj, paddle.nn.Layer) else found

    def _load_object(self, name: str, obj: Any, plain: Any) -> None:
        if self._sharded and (shards := of(obj)) is not None:
            if obj is shards.optimizer:
                sharded_state.load_optimizer(shards, obj, self._layers(), plain, self._owned)
            else:
                sharded_state.load_layer(shards, obj, plain)
        elif isinstance(obj, paddle.optimizer.Optimizer):
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

    def _is_part(self, path: str) -> bool:
        if not self._sharded:
            return False
        name, _, rest = path.partition(".")
        shards = of(self._objects.get(name))
        # A worker without rows of a parameter has none of its numbers either.
        numbers = shards is not None and shards.optimizer is self._objects[name] and rest.startswith("parameters.")
        return numbers or path.endswith(f".{LOCAL}")

    def _replicated(self, structure: Any) -> Any:
        if not self._sharded:
            return structure
        cut = {name for name, obj in self._objects.items() if (shards := of(obj)) and obj is shards.optimizer}
        return {
            name: {key: part for key, part in kept.items() if key != "parameters"}
            if name in cut
            else sharded_state.without_parts(kept)
            for name, kept in structure.items()
        }

    def _restore_sharded(self, folder: str) -> None:
        self._load_parts(Folder(folder))

    def _recut(self, link: Link, seat: Seat, job: str) -> None:
        self._load_parts(MemoryParts(link, seat, job))

    def _load_parts(self, parts: SavedParts) -> None:
        objects = {name: obj for name, obj in self._objects.items() if not is_own(obj)}
        compare = functools.partial(self._compare_parts, parts.what)
        ring = group.current()
        rank, size = (0, 1) if ring is None else (ring.rank, ring.world_size)
        found = sharded_state.read(parts, objects, self._values, rank, size, compare, self._loading)
        for name, obj in objects.items():
            with self._loading(name, found.meta):
                self._load_object(name, obj, found.objects[name])
        for name, value in found.values.items():
            with self._loading(name, found.meta):
                self._values[name] = self._load_value(name, self._values[name], value)
        self._reset_lacking(found.values)

    def _restore(self, session: Session, seat: Seat) -> None:
        super()._restore(session, seat)
        for shards in {id(found): found for obj in self._objects.values() if (found := of(obj))}.values():
            if shards.level != "p_g_os":
                shards.gather()  # the script may use its layer before the next forward pass
        session.check()


def _check_sharded(objects: dict[str, Any], sharded: bool) -> None:
    """Refuse an optimizer that is sharded in a state that is not, and a state without one. Raises ``StateError``."""
    found = {name: shards for name, obj in objects.items() if (shards := of(obj)) is not None}
    if sharded and not found:
        raise StateError(
            "sharded=True: nothing in this state is sharded; edl.paddle.group_sharded_parallel shards a layer and its "
            "optimizer"
        )
    for name, shards in found.items():
        if not sharded:
            raise StateError(f"state.{name} is sharded by group_sharded_parallel: pass sharded=True to State")
        if not any(of(obj) is shards and obj is not shards.optimizer for obj in objects.values()):
            raise StateError(f"state.{name}: a sharded optimizer needs its model in the same State")


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
    usual = getattr(layer.set_state_dict, "__func__", None) is paddle.nn.Layer.set_state_dict
    for key, tensor in own.items():
        if usual or list(tensor.shape) != list(plain[key].shape):  # another method may convert types
            check_fit(tensor, plain[key], key)
    layer.set_state_dict(plain if usual else owned(plain))
    for parameter in layer.parameters():
        parameter.clear_gradient(False)  # may be left by an interrupted backward pass


def _load_value(plain: Any, live: Any) -> Any:
    """The restored value, on the device of the existing one. A trained tensor (a leaf that requires a gradient) is
    filled in place, since optimizers refer to it. Others are replaced by new ones, since the existing one may be part
    of anything."""
    if isinstance(plain, paddle.Tensor) and isinstance(live, paddle.Tensor):
        if live.is_leaf and not live.stop_gradient:
            check_fit(live, plain, "the tensor")
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
