"""``group_sharded_parallel``: training with optimizer state, gradients and parameters in rows (ZeRO 1, 2 and 3).

Paddle's own runs on accelerators only, and its groups end with a lost peer. This one exchanges over the ring of the
round, in Python: gradients when the backward pass is over, parameters when the optimizer has made its step. No
collective may run inside Paddle's engine (see ``edl.paddle.ddp``), so with ``p_g_os`` the parameters are not gathered
layer by layer: they are whole from the forward pass to the step, and in rows between steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import paddle

from edl.errors import StateError
from edl.paddle import clipping
from edl.paddle.arrays import memory
from edl.paddle.clipping import RowClip
from edl.paddle.ddp import KINDS, SHARDS, SPARSE, Parallel
from edl.paddle.shards import LEVELS, Shards, of, sparse
from edl.worker.ring import Ring

NUMBERS: dict[Any, tuple[str, ...]] = {
    paddle.optimizer.SGD: (),
    paddle.optimizer.Momentum: (),
    paddle.optimizer.Adagrad: (),
    paddle.optimizer.Adadelta: (),
    paddle.optimizer.RMSProp: (),
    paddle.optimizer.Adam: ("beta1_pow_acc", "beta2_pow_acc"),
    paddle.optimizer.AdamW: ("beta1_pow_acc", "beta2_pow_acc"),
    paddle.optimizer.Adamax: ("beta1_pow_acc",),
    paddle.optimizer.NAdam: (),
    paddle.optimizer.RAdam: (),
}
"""Optimizers that treat each element on its own, with those of their values that are one number for each parameter."""
_DECAYS = (paddle.regularizer.L1Decay, paddle.regularizer.L2Decay)


def group_sharded_parallel(model: Any, optimizer: Any, level: str, scaler: Any = None) -> tuple[Any, Any, Any]:
    """Make a layer and its optimizer train on all ranks, each of which keeps only its rows of what ``level`` names::

        model, optimizer, _ = edl.paddle.group_sharded_parallel(model, optimizer, "os_g")
        state = edl.paddle.State(model=model, optimizer=optimizer, sharded=True, step=0)

    Call it once, before ``State``, with an optimizer that has made no step; the results are used in every round. The
    optimizer is the given one, changed in place, and the layer keeps the names of its ``state_dict``.

    ``level``: ``os``, the optimizer's state; ``os_g``, gradients too: ``parameter.grad`` is None after ``backward()``;
    ``p_g_os``, parameters too: they are gathered by the first forward pass after a step, also one in evaluation, which
    all ranks must make, and released by the next ``optimizer.step()``. ``scaler`` is returned as it is.

    Raises ``StateError`` for an optimizer whose rows do not determine its update (norms of whole tensors, as of Lamb
    and Lars), and for whatever else cannot be sharded.
    """
    layer = model.layer if isinstance(model, Parallel) else model
    if level not in LEVELS:
        raise ValueError(f"level={level!r}: one of {', '.join(LEVELS)}")
    groups = _groups(optimizer)
    _check_optimizer(optimizer)
    _check_layer(layer, [one for each in groups for one in each])
    if scaler is not None and scaler.is_enable():
        raise StateError("scaler: an enabled GradScaler is not supported, since each rank would see only its rows")
    shards = Shards(layer, optimizer, level, groups)
    _set_clips(optimizer, shards)
    shards.model = GroupSharded(layer, shards)
    object.__setattr__(layer, SHARDS, shards)
    kind = type(optimizer)
    optimizer.__class__ = type(f"GroupSharded{kind.__name__}", (_Optimizer, kind), {})
    setattr(optimizer, SHARDS, shards)
    optimizer.clear_gradients = optimizer.clear_grad  # Paddle's refers to the method of the class before
    return shards.model, optimizer, scaler


class GroupSharded(Parallel):
    """As ``Parallel``, for a layer whose optimizer is sharded."""

    def __init__(self, layer: Any, shards: Shards) -> None:
        super().__init__(layer)
        object.__setattr__(self, "_shards", shards)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the layer, which is not sharded. Raises ``StateError`` while the parameters are in rows."""
        return copy.deepcopy(self.layer, memo)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Call the layer with whole parameters."""
        self.get_all_parameters()
        return super().forward(*arguments, **named)

    def get_all_parameters(self) -> None:
        """Gather the parameters, which ``p_g_os`` keeps in rows between steps; all ranks must call it. The next step
        releases them."""
        self._shards.enter()
        self._shards.gather()

    def _first_values(self) -> Iterable[Any]:
        cut = () if self._shards.fresh else [part.whole for part in self._shards.parts]
        equal = set(map(id, cut))  # gathered from the same rows
        return [one for one in super()._first_values() if id(one) not in equal]

    def _average(self, ring: Ring) -> None:
        rest, found = [], []
        for parameter, gradient, flag in self._agreed(ring):
            part = self._shards.part(parameter)
            if part is not None and flag & SPARSE:
                raise sparse(parameter)
            if part is None or self._shards.level == "os":
                rest.append((parameter, gradient, flag))
            else:
                found.append((part, gradient, KINDS[flag - 1]))
        self._shards.reduce(ring, found)
        self._average_these(ring, rest)


class _Optimizer:
    """Mixed into the class of a sharded optimizer."""

    def step(self) -> None:
        """Update this rank's rows, and let all ranks have them; a collective."""
        of_this(self).step(super().step)  # type: ignore[misc]

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """As for any optimizer."""
        of_this(self).clear_gradients(set_to_zero)

    def minimize(
        self, loss: Any, startup_program: Any = None, parameters: Any = None, no_grad_set: Any = None
    ) -> tuple[list[Any], list[Any]]:
        """``step()``; the other arguments are refused."""
        if parameters is not None or no_grad_set is not None:
            raise StateError("minimize(): a sharded optimizer updates all its parameters; call step()")
        self.step()
        return [], []

    def state_dict(self) -> Any:
        """In a world of one rank as for any optimizer. Raises ``StateError`` in others."""
        if of_this(self).size > 1:
            raise StateError(
                "state_dict(): this rank has only its rows of the optimizer's state: keep the optimizer in "
                "State(sharded=True), and read its checkpoints with edl.paddle.load_checkpoint"
            )
        return super().state_dict()  # type: ignore[misc]

    def set_state_dict(self, state_dict: Any) -> None:
        """Raises ``StateError``."""
        raise StateError("set_state_dict(): the state of a sharded optimizer is restored by State(sharded=True)")


def of_this(optimizer: Any) -> Shards:
    """The shards of a sharded optimizer."""
    found = of(optimizer)
    assert found is not None, "set with the class"  # noqa: S101
    return found


def _groups(optimizer: Any) -> list[list[Any]]:
    groups = getattr(optimizer, "_param_groups", None) or []
    return [list(each["params"]) for each in groups] if groups and isinstance(groups[0], dict) else [list(groups)]


def _check_optimizer(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if of(optimizer) is not None:
        raise StateError("the optimizer is sharded already: call group_sharded_parallel once")
    if type(optimizer) not in NUMBERS:
        known = ", ".join(kind.__name__ for kind in NUMBERS)
        raise StateError(f"a {name} cannot be sharded, because rows may not determine its update: use one of {known}")
    if optimizer._use_multi_tensor or optimizer._use_fusion_storage:
        raise StateError(f"this {name} joins tensors (use_multi_tensor or fused storage), which cannot be sharded")
    if optimizer._accumulators or optimizer._accumulators_holder or optimizer._master_weights:
        raise StateError(f"this {name} has made steps or loaded a state: call group_sharded_parallel before")


def _check_layer(layer: Any, trained: list[Any]) -> None:
    if of(layer) is not None:
        raise StateError("the layer is sharded already: call group_sharded_parallel once, with all its parameters")
    if type(layer).set_state_dict is not paddle.nn.Layer.set_state_dict:
        raise StateError(f"a {type(layer).__name__} cannot be sharded: it has a set_state_dict() of its own")
    known = set(map(id, layer.parameters()))
    for parameter in trained:
        if id(parameter) not in known:
            raise StateError(f"the optimizer trains {parameter.name}, which is not a parameter of the layer")
        if memory(parameter) is None:
            raise StateError(f"{parameter.name} is on {parameter.place}: only parameters on the CPU can be sharded")
        decay = getattr(parameter, "regularizer", None)
        if decay is not None and type(decay) not in _DECAYS:
            raise StateError(f"the regularizer of {parameter.name}, a {type(decay).__name__}, cannot be sharded")
    for name, part in layer.named_sublayers(include_self=True):
        if isinstance(part, paddle.nn.Embedding) and getattr(part, "_sparse", False):
            raise StateError(f"the gradient of {name or 'the embedding'} is sparse: sparse=False for embeddings")


def _set_clips(optimizer: Any, shards: Shards) -> None:
    """Have norms computed over the rows of all ranks."""
    decay = optimizer.regularization
    if decay is not None and type(decay) not in _DECAYS:
        raise StateError(f"weight_decay: a {type(decay).__name__} cannot be sharded: use L1Decay or L2Decay")
    groups = optimizer._param_groups
    if groups and isinstance(groups[0], dict):
        for number, each in enumerate(groups):
            if (clip := _row_clip(each.get("grad_clip"))) is not None:
                each["grad_clip"] = shards.clips[number] = clip
    elif (clip := _row_clip(optimizer._grad_clip)) is not None:
        optimizer._grad_clip = shards.clips[0] = clip


def _row_clip(clip: Any) -> RowClip | None:
    """What replaces a clip; None if it may stay."""
    if clip is None or type(clip) in clipping.ELEMENT_WISE:
        return None
    if type(clip) not in clipping.BY_NORM:
        raise StateError(f"grad_clip: a {type(clip).__name__} cannot be sharded: use ClipGradByGlobalNorm")
    return RowClip(clip)
