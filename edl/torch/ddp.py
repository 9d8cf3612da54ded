"""DistributedDataParallel across rounds.

A DDP depends on its process group: its reducer hooks the gradients of the model's parameters and sends them through
that group. The parameters outlive the round, but the group does not. So at the end of a round every reducer is removed
together with its hooks, even if the script still holds the DDP. (Its hooks would otherwise continue to collect
gradients for a group that no longer exists. And a DDP that outlives its group sometimes hangs when it is freed.)
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from edl.errors import StateError
from edl.torch import backward_end
from edl.worker import session as sessions

_armed: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_equal = False
"""Whether all workers have restored the same state."""
_FROZEN = "_edl_frozen"
"""The attribute with the parameters, and their names, that were frozen when a wrapper was made."""
_LASTING = ("mixed_precision", "delay_all_reduce_named_params")
"""Options of ``DistributedDataParallel``, both of them experiments of torch."""
_TAKES_INIT_SYNC = "init_sync" in inspect.signature(DistributedDataParallel.__init__).parameters


def parallel(model: torch.nn.Module, **options: Any) -> DistributedDataParallel:
    """``DistributedDataParallel(model, **options)`` for this round, without broadcasting the parameters.

    Call it inside ``train``, once per round, on the plain model. Parameters are sent from rank 0 when a job starts
    without a checkpoint, and of a model that is not all in the ``State``; otherwise all workers have restored the same
    values. ``device_ids`` is set automatically on CUDA. Raises ``StateError`` for options that leave something on the
    model when their world ends.
    """
    if lasting := [name for name in _LASTING if options.get(name) is not None]:
        raise StateError(
            f"edl.parallel({lasting[0]}=…): DistributedDataParallel would hook the model for it, and the hooks outlive "
            "the world and its group; leave it out (for mixed precision use torch.autocast)"
        )
    if isinstance(model, DistributedDataParallel):
        model = model.module
    device = next((parameter.device for parameter in model.parameters()), None)
    if device is not None and device.type == "cuda":
        options.setdefault("device_ids", [device.index])
    session = sessions.opened()
    state: Any = session.state if session is not None else None
    if state is not None and not state._keeps(model.parameters()):
        # They are new in a worker that has joined, and trained in the rest, where an interrupted step has left
        # gradients.
        model.zero_grad(set_to_none=True)
    elif state is not None and _equal and _TAKES_INIT_SYNC and not _sends_once(model, options):
        options.setdefault("init_sync", False)
    return _InOrder(model, **options)


def _sends_once(model: torch.nn.Module, options: dict[str, Any]) -> bool:
    """Whether the model has buffers that no state keeps, and that are sent when the wrapper is made only."""
    outside = any(module._non_persistent_buffers_set for module in model.modules())
    return outside and options.get("forward_sync_buffers") is False


class _InOrder(DistributedDataParallel):
    """Adds up the gradients in the same order in the first step as in all others.

    torch rearranges its buckets after the first backward pass, in the order in which gradients arrived. Sums over three
    or more workers then differ in their last bits, so the step after a restart would differ from the same step without
    one. Here the buckets are arranged once, from the last layer to the first.
    """

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        self._lasting = not (options.get("find_unused_parameters") or options.get("static_graph")) and _CAN_LAY_OUT
        super().__init__(module, **options)
        if self._lasting:
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> Any:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return (parameters[::-1], sparse[::-1]) if self._lasting else (parameters, sparse)


_REDUCER = getattr(torch.distributed, "Reducer", None)
_CAN_LAY_OUT = hasattr(DistributedDataParallel, "_build_params_for_reducer") and all(
    hasattr(_REDUCER, name) for name in ("_push_all_rebuilt_params", "_rebuild_buckets")
)
"""Whether this torch has the required methods."""


def plain(module: Any) -> Any:
    """The model inside a DDP; anything else is returned unchanged."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def arm(begins_from_nothing: bool) -> None:
    """A round begins: remember each DDP that is created in it."""
    global _equal
    _equal = not begins_from_nothing
    original = DistributedDataParallel.__init__
    if getattr(original, "_edl_remembers", False):
        return

    @functools.wraps(original)
    def remembering(self: DistributedDataParallel, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        _armed.add(self)
        vars(self)[_FROZEN] = _not_averaged(self)
        backward_end.note(self)

    remembering._edl_remembers = True  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = remembering  # type: ignore[method-assign]


def _not_averaged(ddp: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    ignored = ddp.parameters_to_ignore
    return [(name, one) for name, one in ddp.module.named_parameters() if not one.requires_grad and name not in ignored]


def check_trained(event: str) -> None:
    """Raise ``StateError`` if a parameter is trained that was frozen when its model was wrapped: the wrapper does not
    average its gradients, and each worker goes its own way. ``event``: what is to happen now."""
    wrapped = [one for one in _armed if one.process_group is not None and one.process_group.size() > 1]
    found = {id(one): name for ddp in wrapped for name, one in vars(ddp)[_FROZEN] if one.requires_grad}
    if not found:
        return
    for ddp in wrapped:  # one of them may have been made after the change
        frozen = {id(one) for _, one in vars(ddp)[_FROZEN]}
        for one in ddp.module.parameters():
            if id(one) not in frozen:
                found.pop(id(one), None)
    if found:
        raise StateError(
            f"{event}: {next(iter(found.values()))} is trained, and was frozen when the model was wrapped, so that its "
            "gradients are not averaged over the workers: wrap the model again after such a change, edl.parallel(model)"
        )


def disarm(next_round: int) -> None:
    """The round has ended and ``train`` has been left: remove the hooks of every DDP from the parameters."""
    for spent in list(_armed):
        attributes = spent.__dict__
        for name in ("reducer", "logger"):  # the logger holds the reducer
            if name in attributes:
                attributes[name] = _Spent(next_round)
        attributes["process_group"] = None
    _armed.clear()
    backward_end.forget()


class _Spent:
    """Replaces a removed reducer; any use of it raises ``RuntimeError``."""

    def __init__(self, next_round: int) -> None:
        self._next_round = next_round

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"this DistributedDataParallel was made before round {self._next_round}, and its workers "
            "no longer exist; create it inside train(), so that each round has its own"
        )
