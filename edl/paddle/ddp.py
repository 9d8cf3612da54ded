"""Data parallelism over the current round's group: gradients are averaged before ``backward()`` returns.

Paddle's own DataParallel averages inside the C++ engine, where a lost peer aborts the process. Here the engine's hooks
only record that a gradient has been computed; the averaging follows in Python, before ``backward()`` returns to the
script, so a lost peer raises an exception that the script can see.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle.base import core

from edl.paddle import group
from edl.paddle.arrays import fill, from_memory, kind, memory
from edl.paddle.comm import broadcast
from edl.worker.ring import OutOfStep, Ring

BUCKET_BYTES = 25 << 20
ALONE_BYTES = 1 << 20
"""A gradient of at least this size is averaged in place; smaller ones are gathered first."""
KINDS = ("float32", "float16", "bfloat16", "float64")
SPARSE = 128
_HOOKS = "_edl_hooks"
SHARDS = "_edl_shards"
"""Where a layer, and its optimizer, refer to what ``group_sharded_parallel`` has made of them."""

_nn: Any = paddle.nn
_backward = threading.local()
_unaveraged: weakref.WeakSet[Parallel] = weakref.WeakSet()
"""Models that have been called since their gradients were averaged."""
_made = 0


def parallel(layer: Any) -> Parallel:
    """Make a layer train on all ranks: ``model = edl.paddle.parallel(model)``; nothing else changes.

    Call it once; the result is used in every round. All ranks must run the same backward passes; parameters that some
    or all ranks do not use are allowed.
    """
    if isinstance(layer, Parallel):
        return layer
    known = vars(layer).get(SHARDS)
    return Parallel(layer) if known is None else known.model


class Parallel(_nn.Layer):  # type: ignore[misc]
    """Behaves like the layer it was made from; ``state_dict`` has the same names."""

    def __init__(self, layer: Any) -> None:
        global _made
        super().__init__()
        _watch_backward()
        # It is neither a sublayer nor a copy: everything about the layer's contents refers to the original.
        object.__setattr__(self, "layer", layer)
        for shared in ("_parameters", "_sub_layers", "_buffers", "_non_persistable_buffer_names_set"):
            object.__setattr__(self, shared, layer.__dict__[shared])
        _made += 1
        self._order = _made
        self._syncs = True
        self._flat: dict[str, Any] = {}
        """By type, a buffer for small gradients, as large as the largest so far."""
        self.training = layer.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "layer" not in self.__dict__:
                raise
            return getattr(self.__dict__["layer"], name)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Call the layer, and prepare for a backward pass when training."""
        if self.layer.training and paddle.is_grad_enabled():
            self._prepare()
        return self.layer(*arguments, **named)

    def train(self, mode: bool = True) -> Parallel:
        """Set training mode, as for any layer."""
        self.layer.train() if mode else self.layer.eval()
        self.training = mode
        return self

    def eval(self) -> Parallel:
        """Set evaluation mode, as for any layer."""
        return self.train(False)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context only accumulate gradients on each rank; the next pass outside averages the
        sum."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def average_gradients(self) -> None:
        """Average the current gradients, after all passes have been made in ``no_sync``. All ranks must call it."""
        ring = group.current()
        if ring is not None and ring.world_size > 1:
            # A pass that creates an empty gradient must not trigger averaging itself.
            with self.no_sync():
                self._average_all(ring)

    # --- before the pass -----------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        hooks = vars(self.layer).setdefault(_HOOKS, _LayerHooks())
        hooks.model = weakref.ref(self)
        hooks.add(self.layer.parameters())
        ring = group.current()
        if ring is not None and ring.world_size > 1:
            _unaveraged.add(self)
        if ring is not None and (hooks.agreed is None or hooks.agreed() is not ring):
            if hooks.agreed is not None:  # what an interrupted step has left; restoring clears it in the state only
                for parameter in self.layer.parameters():
                    parameter.clear_gradient(False)
            # New world: ranks that have initialized their own values take those of rank 0. Restored values are equal
            # anyway.
            if ring.world_size > 1:
                with all_or_nobody(ring):
                    for tensor in self._first_values():
                        broadcast(tensor)
            hooks.agreed = weakref.ref(ring)

    def _first_values(self) -> Iterable[Any]:
        """What all ranks take from rank 0 in a new world."""
        return (*self.layer.parameters(), *self.layer.buffers())

    def _awaited(self, ring: Ring) -> bool:
        """Whether the other ranks wait for the gradients of a pass in this round that has begun here."""
        agreed = vars(self.layer)[_HOOKS].agreed
        return self._syncs and agreed is not None and agreed() is ring

    # --- after the pass ------------------------------------------------------------------------------------------

    def _average_all(self, ring: Ring) -> None:
        with all_or_nobody(ring):
            self._average(ring)
        _unaveraged.discard(self)
        ring.pay()

    def _average(self, ring: Ring) -> None:
        self._average_these(ring, self._agreed(ring))

    def _agreed(self, ring: Ring) -> list[tuple[Any, Any, int]]:
        """The parameters that any rank has used, with this rank's gradient, if any, and how it is described; from the
        last layer to the first, the order in which they were computed."""
        parameters = [parameter for parameter in self.layer.parameters() if not parameter.stop_gradient]
        gradients = [parameter.grad for parameter in parameters]
        ours = np.array([_flag(gradient) for gradient in gradients], np.uint8)
        flags = ours.copy()
        ring.all_reduce(flags, "max")  # parameters used by any rank
        for parameter, mine, flag in zip(parameters, ours, flags, strict=True):
            if mine not in (0, flag):
                raise OutOfStep(f"the gradient of {parameter.name} has another type on another rank")
        found = reversed(list(zip(parameters, gradients, flags.tolist(), strict=True)))
        return [(parameter, gradient, flag) for parameter, gradient, flag in found if flag]

    def _average_these(self, ring: Ring, found: Iterable[tuple[Any, Any, int]]) -> None:
        buckets: dict[str, _Bucket] = {}
        for parameter, gradient, flag in found:
            if flag & SPARSE:
                _average_sparse(ring, parameter, gradient)
            else:
                gradient = _zero_gradient(parameter, KINDS[flag - 1]) if gradient is None else gradient
                self._average_dense(ring, buckets, gradient, KINDS[flag - 1])
        for name, bucket in buckets.items():
            self._average_bucket(ring, name, bucket)

    def _average_dense(self, ring: Ring, buckets: dict[str, _Bucket], gradient: Any, name: str) -> None:
        """Average a gradient now if it is large, else when enough of its type have been gathered."""
        array = memory(gradient)
        if array is not None and array.nbytes >= ALONE_BYTES:
            ring.all_reduce(array, "mean", bfloat16=name == "bfloat16")
            return
        bucket = buckets.setdefault(name, _Bucket())
        bucket.gradients.append(gradient)
        bucket.arrays.append(gradient.numpy().reshape(-1) if array is None else array.reshape(-1))
        bucket.size += bucket.arrays[-1].nbytes
        if bucket.size >= BUCKET_BYTES:
            self._average_bucket(ring, name, buckets.pop(name))

    def _average_bucket(self, ring: Ring, name: str, bucket: _Bucket) -> None:
        dtype = bucket.arrays[0].dtype
        count = bucket.size // dtype.itemsize
        if name not in self._flat or self._flat[name].size < count:
            self._flat[name] = np.empty(count, dtype)
        flat = self._flat[name][:count]
        np.concatenate(bucket.arrays, out=flat)
        ring.all_reduce(flat, "mean", bfloat16=name == "bfloat16")
        at = 0
        for gradient, array in zip(bucket.gradients, bucket.arrays, strict=True):
            part = flat[at : at + array.size]
            at += array.size
            if gradient.place.is_cpu_place():
                np.copyto(array, part)
            else:
                fill(gradient, part.reshape(gradient.shape))


@contextmanager
def all_or_nobody(ring: Ring) -> Iterator[None]:
    """Abort the ring when this rank fails between two calls; the ring itself does so only for a failure within a call.
    Otherwise the other ranks would wait, with gradients of which only some are averaged. Nothing may be computed from
    them in this round."""
    try:
        yield
    except BaseException as error:
        ring.abort(f"a collective failed ({type(error).__name__}: {error})")
        raise


class _Bucket:
    """Small gradients of one type."""

    def __init__(self) -> None:
        self.gradients: list[Any] = []
        self.arrays: list[Any] = []
        self.size = 0


def _flag(gradient: Any) -> int:
    """How a rank describes a gradient to the others; 0 for none. Raises ``TypeError`` for an unsupported type."""
    if gradient is None:
        return 0
    name = kind(gradient)
    if name not in KINDS:
        raise TypeError(f"gradients of {name} cannot be averaged")
    return 1 + KINDS.index(name) | (SPARSE if gradient.is_selected_rows() else 0)


def _zero_gradient(parameter: Any, name: Any) -> Any:
    """A zero gradient for a parameter that other ranks have used, but not this one."""
    parameter.grad = paddle.zeros(parameter.shape, dtype=name)
    return parameter.grad


def _average_sparse(ring: Ring, parameter: Any, gradient: Any) -> None:
    """Average an embedding's gradient: each rank gets all ranks' rows. A row may occur more than once, as usual."""
    if gradient is None:
        # The only way to create an empty gradient of this kind.
        nothing = paddle.zeros([0], dtype="int64")
        paddle.nn.functional.embedding(nothing, parameter, sparse=True).sum().backward()
        gradient = parameter.grad
    rows = np.asarray(gradient.rows(), np.int64)
    values = np.ascontiguousarray(gradient.numpy())
    all_rows = [np.frombuffer(data, np.int64) for data in ring.all_gather_bytes(rows.tobytes())]
    width = tuple(parameter.shape[1:])
    pieces = [np.frombuffer(data, values.dtype) for data in ring.all_gather_bytes(values.tobytes())]
    joined = np.concatenate([piece.reshape(-1, *width) for piece in pieces])
    if kind(gradient) == "bfloat16":
        with paddle.no_grad():
            joined = (from_memory(joined, "bfloat16") / ring.world_size).numpy()
    else:
        joined /= joined.dtype.type(ring.world_size)
    selected = gradient.get_selected_rows()
    selected.get_tensor().set(joined, paddle.CPUPlace())
    selected.set_rows(np.concatenate(all_rows).tolist())
    selected.sync_index()


class _LayerHooks:
    """What a layer keeps for all wrappers that scripts make of it, perhaps one in each round. Its parameters have one
    hook each, for the wrapper that was called last: hooks cannot be removed."""

    def __init__(self) -> None:
        self.model: weakref.ref[Parallel] | None = None
        self.agreed: weakref.ref[Ring] | None = None
        """The ring over which all ranks have taken the same values."""
        self._hooked: dict[int, Any] = {}

    def add(self, parameters: list[Any]) -> None:
        """Hook those that are trained and have no hook yet."""
        before, self._hooked = self._hooked, {}
        for parameter in parameters:
            if id(parameter) in before or not parameter.stop_gradient:
                self._hooked[id(parameter)] = parameter
                if id(parameter) not in before:
                    parameter._register_backward_hook(functools.partial(_came, self))

    def __reduce__(self) -> Any:
        return _LayerHooks, ()  # a copy of the layer has parameters of its own


def _came(hooks: _LayerHooks) -> None:
    """Called by the engine from C++, so the script could not catch an exception raised here."""
    model = hooks.model() if hooks.model is not None else None
    if model is not None and model._syncs:
        _touched().add(model)


def _touched() -> set[Parallel]:
    found: set[Parallel] | None = getattr(_backward, "touched", None)
    if found is None:
        found = _backward.touched = set()
    return found


def _watch_backward() -> None:
    """Make every backward pass end with averaging. Nested passes (recomputation) belong to the outer one."""
    original: Callable[..., Any] = core.eager.run_backward
    if getattr(original, "_edl", False):
        return

    @functools.wraps(original)
    def run_backward(*arguments: Any, **named: Any) -> Any:
        depth = _backward.depth = getattr(_backward, "depth", 0) + 1
        ring = group.current() if depth == 1 else None
        try:
            result = _run(original, ring, *arguments, **named)
            if ring is not None and ring.world_size > 1:
                for model in sorted(_touched(), key=lambda model: model._order):
                    model._average_all(ring)
            return result
        finally:
            _backward.depth = depth - 1
            if depth == 1:
                _touched().clear()

    run_backward._edl = True  # type: ignore[attr-defined]
    core.eager.run_backward = run_backward


def _run(original: Callable[..., Any], ring: Ring | None, *arguments: Any, **named: Any) -> Any:
    """Run a backward pass over whose gradients the ranks of this ring then average."""
    try:
        return original(*arguments, **named)
    except Exception as error:
        if ring is not None and any(model._awaited(ring) for model in list(_unaveraged)):
            ring.owe(error)
        raise
