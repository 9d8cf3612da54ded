"""``scale_lr`` for PyTorch's optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from edl.arithmetic.adascale import AdaScale
from edl.worker.accumulate import check_finished
from edl.worker.lr import LrFactor, Rule

_MARK = "_edl_scaled"


def scale_lr(optimizer: Optimizer, *, rule: Rule | None = None, noise: AdaScale | None = None) -> None:
    """Multiply the learning rate by the factor of the current step in each ``optimizer.step()`` from now on.

    Outside of it ``param_groups`` hold the script's own learning rate, which schedulers and checkpoints see.
    ``rule(reference, size)`` is for ``--lr-rule=user``; ``noise`` for ``--lr-rule=adascale``, if it is not in the
    ``State``. A second call only replaces these.
    """
    factor = LrFactor(rule, noise)
    known = getattr(optimizer, _MARK, None)
    if known is not None:
        known.factor = factor
        return
    hooks = _Hooks(factor)
    setattr(optimizer, _MARK, hooks)
    optimizer.register_step_pre_hook(hooks.before)
    optimizer.register_step_post_hook(hooks.after)
    optimizer.register_state_dict_pre_hook(lambda optimizer: hooks.restore())


class _Hooks:
    """Replaces an optimizer's learning rates during a step, and restores them."""

    def __init__(self, factor: Callable[[], float]) -> None:
        self.factor = factor
        self._set: list[tuple[dict[str, Any], Any, Any]] = []
        """Group, its current value, and the script's own value."""

    def before(self, optimizer: Optimizer, arguments: Any, named: dict[str, Any]) -> Any:
        """Called before the step. A closure sees the script's own learning rate."""
        check_finished()
        self.restore()  # the last step may have failed
        factor = self.factor()
        if factor == 1.0:
            return None
        self._scale(optimizer, factor)
        return self._wrapped(optimizer, factor, arguments, named)

    def after(self, optimizer: Optimizer, arguments: Any, named: dict[str, Any]) -> None:
        """Called after the step."""
        self.restore()

    def restore(self) -> None:
        """Restore values that are unchanged since they were set here; a value set by others meanwhile is kept."""
        for group, ours, own in self._set:
            if group["lr"] is ours:
                if isinstance(ours, torch.Tensor):
                    ours.copy_(own)
                else:
                    group["lr"] = own
        self._set = []

    def _scale(self, optimizer: Optimizer, factor: float) -> None:
        tensors: dict[int, torch.Tensor] = {}  # groups without a rate of their own share one tensor
        for group in optimizer.param_groups:
            own = group["lr"]
            if isinstance(own, torch.Tensor):
                if id(own) not in tensors:
                    tensors[id(own)] = own.detach().clone()
                    own.mul_(factor)  # in place: it may be part of a captured graph
                self._set.append((group, own, tensors[id(own)]))
            else:
                group["lr"] = own * factor
                self._set.append((group, group["lr"], own))

    def _wrapped(self, optimizer: Optimizer, factor: float, arguments: Any, named: dict[str, Any]) -> Any:
        # For a hook of a method the optimizer itself is the first argument.
        at = next((index for index, one in enumerate(arguments) if callable(one) and one is not optimizer), -1)
        closure = named.get("closure") if at < 0 else arguments[at]
        if closure is None:
            return None

        def unscaled() -> Any:
            self.restore()
            try:
                return closure()
            finally:
                self._scale(optimizer, factor)

        if at < 0:
            return arguments, {**named, "closure": unscaled}
        return (*arguments[:at], unscaled, *arguments[at + 1 :]), named
