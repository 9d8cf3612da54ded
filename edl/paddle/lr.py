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
        setattr(optimizer, name, scaled.wrap(getattr(optimizer, name)))


class _Scaled:
    """Wraps methods of an optimizer, since Paddle's optimizers have no hooks."""

    def __init__(self, optimizer: Any, factor: Callable[[], float]) -> None:
        self.factor = factor
        self._optimizer = optimizer
        self._inside = False

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method with the scaled learning rate; it is scaled once, even if one wrapped method calls the other."""

        @functools.wraps(method)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return method(*arguments, **named)
            check_finished()
            self._inside = True
            try:
                with _multiplied(self._optimizer, self.factor()):
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
