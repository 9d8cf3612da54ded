"""The arithmetic of outer steps: how the models of workers that trained on their own become one model again. Pure.

Arrays may be NumPy's or a framework's: they need ``+=``, ``-=``, ``*=``, ``*`` and ``==``, elementwise. With x the
parameters after the last outer step, xᵢ those of worker i now, and wᵢ its share of the samples:

- pseudo-gradient: Δ = Σ wᵢ (x - xᵢ)
- momentum: v ← μ v + Δ, with v = 0 at first
- parameters: x ← x - η (Δ + μ v)

This is SGD with Nesterov momentum (DiLoCo, arXiv 2311.08105). With η = 1 and μ = 0 the result is Σ wᵢ xᵢ: local SGD.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from edl.errors import StateError

BUCKET_BYTES = 25 << 20
"""Arrays are sent together up to this size."""


@dataclass(frozen=True, slots=True)
class OuterRule:
    """The outer optimizer. Raises ``StateError`` for an impossible value."""

    lr: float
    """η, more than 0."""
    momentum: float
    """μ, at least 0 and less than 1."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise StateError(f"outer_lr={self.lr!r}: it must be a number more than 0; the paper uses 0.7")
        if not 0 <= self.momentum < 1:
            raise StateError(f"outer_momentum={self.momentum!r}: it must be at least 0 and less than 1")

    def apply(self, parameters: Any, velocity: Any, gradient: Any) -> None:
        """Change parameters and velocity in place; ``gradient`` is overwritten. ``velocity`` is not used without
        momentum."""
        if self.momentum:
            velocity *= self.momentum
            velocity += gradient
            gradient += velocity * self.momentum
        if self.lr != 1:
            gradient *= self.lr
        parameters -= gradient


@dataclass(frozen=True, slots=True)
class OuterReport:
    """What a worker says of itself before an outer step."""

    inner_steps: int
    """Inner steps of the job, up to this outer step."""
    rule: tuple[float, float]
    """Learning rate and momentum."""
    wire: str
    """Type in which the pseudo-gradient is sent."""
    weight: float
    """Samples, or else inner steps, that this worker has trained since the last outer step."""

    def encode(self) -> bytes:
        """For the other workers."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> OuterReport:
        """The inverse of ``encode``."""
        parts = json.loads(data)
        return cls(parts["inner_steps"], tuple(parts["rule"]), parts["wire"], parts["weight"])


def shares(reports: Sequence[OuterReport]) -> list[float]:
    """Each worker's weight in the average; they add up to 1, or are all 0 if no worker has a sample.

    Raises ``StateError``, on all workers alike, if they are not at the same outer step.
    """
    first = reports[0]
    for rank, one in enumerate(reports):
        for name in ("inner_steps", "rule", "wire"):
            mine, theirs = getattr(first, name), getattr(one, name)
            if mine != theirs:
                raise StateError(
                    f"outer step: {name} is {theirs} on rank {rank} and {mine} on rank 0: every worker must call "
                    "step() after each inner step, and be given the same every, outer_lr, outer_momentum and wire"
                )
    total = sum(one.weight for one in reports)
    return [one.weight / total if total else 0.0 for one in reports]


def weigh(array: Any, share: float) -> None:
    """Multiply in place by this worker's share. A share of 0 gives 0 even for NaN."""
    if share:
        array *= share
    else:
        array[...] = 0


def equal(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether all values are the same; NaN equals nothing."""
    return len(some) == len(others) and all(bool((a == b).all()) for a, b in zip(some, others, strict=True))


def buckets(sizes: Sequence[int], limit: int = BUCKET_BYTES) -> list[range]:
    """Divide arrays of these sizes, in order, into groups of at most ``limit`` bytes, or of one larger array."""
    found: list[range] = []
    begin, held = 0, 0
    for number, size in enumerate(sizes):
        if held and held + size > limit:
            found.append(range(begin, number))
            begin, held = number, 0
        held += size
    if begin < len(sizes):
        found.append(range(begin, len(sizes)))
    return found
