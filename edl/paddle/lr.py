"""``scale_lr`` for Paddle's optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paddle.optimizer.lr import LRScheduler

from edl.arithmetic.adascale import AdaScale
from edl.worker.accumulate import check_finished
from edl.worker.lr import LrFactor, Rule

_MARK = "_edl_scaled"


def scale_lr(optimizer: Any, *, rule: Rule | None = None, noise: AdaScale | None = None) -> None:
    """Multiply the learning rate by the factor of the current step in each ``optimizer.step()`` from now on.

    Outside of it the optimizer and its scheduler hold the script's own learning rate. ``rule(reference, size)`` is for
    ``--lr-rule=user``; ``noise`` for ``--lr-rule=adascale``, if it is not in the ``State``. A second call only replaces
    these.
    """
    factor = LrFactor(rule, noise)
    known = getattr(optimizer, _MARK, None)
    if known is not None:
        known.factor = factor
        return
    scaled = _Scaled(optimizer, factor)
    setattr(optimizer, _MARK, scaled)
    for name in ("step", "minimize"):
        setattr(optimizer, name, scaled.wrap(name))


class _Scaled:
    """Wraps methods of an optimizer, since Paddle's optimizers have no hooks."""

    def __init__(self, optimizer: Any, factor: Callable[[], float]) -> None:
        self.factor = factor
        self._optimizer = optimizer
        self._inside = False

    def wrap(self, name: str) -> Callable[..., Any]:
        """The method of this name with the scaled learning rate; it is scaled once, even if one wrapped method calls
        the other."""
        optimizer, replaced = self._optimizer, vars(self._optimizer).get(name)

        @functools.wraps(getattr(optimizer, name))
        def wrapped(*arguments: Any, **named: Any) -> Any:
            # Looked up in each call, since group_sharded_parallel gives the optimizer another class.
            method = replaced or getattr(type(optimizer), name).__get__(optimizer)
            if self._inside:
                return method(*arguments, **named)
            check_finished()
            self._inside = True
            try:
                with _multiplied(optimizer, self.factor()):
                    return method(*arguments, **named)
            finally:
                self._inside = False

        return wrapped


@contextmanager
def _multiplied(optimizer: Any, factor: float) -> Iterator[None]:
    if factor == 1.0:
        yield
        return
    scheduler = optimizer._learning_rate
    if isinstance(scheduler, LRScheduler):
        own = scheduler.last_lr
        scheduler.last_lr = ours = own * factor
        try:
            yield
        finally:
            if scheduler.last_lr is ours:
                scheduler.last_lr = own
        return
    own = float(optimizer.get_lr())
    optimizer.set_lr(own * factor)
    try:
        yield
    finally:
        optimizer.set_lr(own)
