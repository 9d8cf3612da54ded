"""Gradient clipping by norms of whole tensors, by ranks of which each has some rows of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from edl.paddle.arrays import kind
from edl.worker.ring import Ring

_nn: Any = paddle.nn
BY_NORM = (_nn.ClipGradByGlobalNorm, _nn.ClipGradByNorm)
ELEMENT_WISE = (_nn.ClipGradByValue,)


class RowClip:
    """Clips rows as the given clip would clip the whole gradients. ``factors`` are computed before each step, because
    the optimizer calls a clip only where a rank has gradients."""

    def __init__(self, clip: Any) -> None:
        self.clip = clip
        self.factors: dict[str, float] | None = None
        """By the parameter's name. None: the gradients are whole."""

    def __call__(self, pairs: Sequence[tuple[Any, Any]]) -> Any:
        """The pairs of parameter and gradient with clipped gradients."""
        factors = self.factors
        if factors is None:
            return self.clip(pairs)
        return [(one, _scaled(grad, factors.get(one.name))) for one, grad in pairs]


def measure(ring: Ring, groups: Sequence[tuple[RowClip | None, Sequence[tuple[str, Any]]]]) -> None:
    """Compute the factors for this step; a collective. ``groups``: for each group of the optimizer its clip, and for
    every parameter its name and the gradient of this rank's rows, None without one or if it is not to be clipped."""
    squares = np.array([_square(grad) for _, entries in groups for _, grad in entries], np.float64)
    if not any(clip is not None for clip, _ in groups) or not squares.size:
        return
    ring.all_reduce(squares, "sum")
    for clip, _ in groups:
        if clip is not None:
            clip.factors = {}
    at = 0
    for clip, entries in groups:
        own = squares[at : at + len(entries)]
        at += len(entries)
        if clip is None or clip.factors is None:
            continue
        together = isinstance(clip.clip, _nn.ClipGradByGlobalNorm)
        for (name, grad), square in zip(entries, own.tolist(), strict=True):
            if grad is not None:
                clip.factors[name] = _factor(math.sqrt(float(own.sum()) if together else square), clip.clip.clip_norm)


def _factor(norm: float, longest: float) -> float:
    most = max(norm, longest)
    return longest / most if most else 1.0


def _square(grad: Any) -> float:
    if grad is None:
        return 0.0
    wide = grad.astype("float64").numpy()
    return float(np.vdot(wide, wide))


def _scaled(grad: Any, factor: float | None) -> Any:
    if factor is None:
        return grad
    name: Any = kind(grad)
    return grad * paddle.full([], factor, dtype=name)
