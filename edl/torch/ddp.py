"""DistributedDataParallel across rounds.

A DDP hangs on its process group: its reducer hooks the gradients of the model's parameters and sends them through that
group. The parameters outlive the round, the group does not; so at the end of a round every reducer is taken out, and
its hooks with it, whoever still holds the DDP. (Its hooks would otherwise go on collecting gradients for a group that
is gone. And a DDP that outlives its group hangs now and then when it is freed.)
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

_armed: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_equal = False
"""All workers hold the same parameters: they have restored the same state."""
_TAKES_INIT_SYNC = "init_sync" in inspect.signature(DistributedDataParallel.__init__).parameters


def parallel(model: torch.nn.Module, **options: Any) -> DistributedDataParallel:
    """``DistributedDataParallel(model, **options)`` for this round, without sending the parameters around.

    Call it inside ``train``, once a round, on the plain model. Parameters are sent from rank 0 only where a job begins
    from nothing; afterwards all workers have restored the same state. ``device_ids`` is chosen where it is needed.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    device = next((parameter.device for parameter in model.parameters()), None)
    if device is not None and device.type == "cuda":
        options.setdefault("device_ids", [device.index])
    if _equal and _TAKES_INIT_SYNC:
        options.setdefault("init_sync", False)
    return _InOrder(model, **options)


class _InOrder(DistributedDataParallel):
    """Adds up the gradients in the same order in the first step as in all others.

    torch lays them out anew after the first backward pass, in the order in which they came. Sums of three and more
    workers then have other last bits, so the step after a restart would differ from the same step without one. Here
    they are laid out once and for all, from the last layer to the first.
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
"""Whether this torch has what that takes."""


def plain(module: Any) -> Any:
    """The model inside a DDP; anything else unchanged."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def arm(begins_from_nothing: bool) -> None:
    """A round begins: remember each DDP that is made in it."""
    global _equal
    _equal = not begins_from_nothing
    original = DistributedDataParallel.__init__
    if getattr(original, "_edl_remembers", False):
        return

    @functools.wraps(original)
    def remembering(self: DistributedDataParallel, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        _armed.add(self)

    remembering._edl_remembers = True  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = remembering  # type: ignore[method-assign]


def disarm(next_round: int) -> None:
    """The round is over and ``train`` has been left: take the hooks of every DDP off the parameters."""
    for spent in list(_armed):
        attributes = spent.__dict__
        for name in ("reducer", "logger"):  # the logger holds the reducer
            if name in attributes:
                attributes[name] = _Spent(next_round)
        attributes["process_group"] = None
    _armed.clear()


class _Spent:
    """Stands where a reducer was."""

    def __init__(self, next_round: int) -> None:
        self._next_round = next_round

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"this DistributedDataParallel was made before round {self._next_round}, and the workers it was made for "
            "are no more; make it inside train(), so that each round has its own"
        )
