"""A matrix product whose result is known, in numpy or plain Python.

The matrices contain whole numbers from -8 to 8, so their product is exact in single precision, in whatever order a
library adds: any other number is an error of the hardware (or of a library). A product C = AB is verified by
C r = A (B r) in whole numbers, for a vector r without zeros: a quadratic number of steps instead of a cubic one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

LEAST_S = 0.5
"""Seconds for which products are repeated at least, so that one pause does not count."""
MOST_TIMES = 200
LARGEST_PLAIN = 96
"""Most rows without numpy and framework: a product of this size takes about 0.1 s."""
SEEDS = 3, 11
WRONG = "wrong numbers in a matrix product"


def largest_sum(size: int) -> int:
    """Limit of the numbers in a product of matrices with ``size`` rows."""
    return 64 * size


class ProbedDevice(Protocol):
    """A device that multiplies matrices."""

    kind: str
    """Its kind and the library, such as ``NVIDIA H200, torch``."""
    slot: int
    """The slot whose workers use it; -1: several slots share it."""

    def product_s(self, size: int) -> float:
        """Multiply matrices of about ``size`` rows repeatedly; returns the seconds of one product. Raises
        ``WrongProduct``, or whatever a broken device makes the library raise."""
        ...


class WrongProduct(Exception):
    """A product has wrong numbers."""


def entry(row: int, column: int, seed: int) -> int:
    """An element of the matrix with this seed."""
    return (131 * row + 31 * column + 5 * row * column + seed) % 17 - 8


def weight(index: int) -> int:
    """An element of the vector for the verification, at least 1."""
    return 7919 * index % 1_000_003 + 1


def timed(multiply: Callable[[], Any], same: Callable[[Any], bool]) -> float:
    """Seconds of one product, the median of several. ``same``: whether a result equals the first one, which has been
    verified. Raises ``WrongProduct``."""
    took: list[float] = []
    began_s = time.monotonic()
    while len(took) < 3 or (time.monotonic() - began_s < LEAST_S and len(took) < MOST_TIMES):
        before_s = time.monotonic()
        result = multiply()
        took.append(time.monotonic() - before_s)
        if not same(result):
            raise WrongProduct(f"{WRONG}: the same product gave two results (repetition {len(took)})")
    return statistics.median(took)


def verify(np: Any, result: Any, first: Any, second: Any) -> None:
    """Verify a product, given as an array in single precision, of two matrices of whole numbers. ``np``: numpy. Raises
    ``WrongProduct``."""
    if not bool((np.abs(result) <= largest_sum(len(result))).all()):
        raise WrongProduct(f"{WRONG}: not numbers, or too large ones")
    whole = result.astype(np.int64)
    if not np.array_equal(whole.astype(np.float32), result):
        raise WrongProduct(f"{WRONG}: not whole numbers")
    weights = 7919 * np.arange(len(result), dtype=np.int64) % 1_000_003 + 1
    wrong = np.flatnonzero(whole @ weights != first @ (second @ weights))
    if len(wrong):
        raise WrongProduct(f"{WRONG}: {len(wrong)} of {len(result)} rows, the first is {wrong[0]}")


class NumpyDevice:
    """The processor, through numpy."""

    kind = "cpu, numpy"
    slot = -1

    def __init__(self, numpy: Any) -> None:
        self._np = numpy

    def product_s(self, size: int) -> float:
        """See ``ProbedDevice``."""
        np = self._np
        first, second = (self.matrix(size, seed) for seed in SEEDS)
        a, b = first.astype(np.float32), second.astype(np.float32)
        result = a @ b
        verify(np, result, first, second)
        return timed(lambda: a @ b, lambda again: bool(np.array_equal(again, result)))

    def matrix(self, size: int, seed: int) -> Any:
        """A matrix of ``entry``, as whole numbers."""
        np = self._np
        rows, columns = np.ogrid[:size, :size]
        return (131 * rows + 31 * columns + 5 * rows * columns + seed).astype(np.int64) % 17 - 8


class PlainDevice:
    """The processor, in plain Python."""

    kind = "cpu, Python"
    slot = -1

    def product_s(self, size: int) -> float:
        """See ``ProbedDevice``; at most ``LARGEST_PLAIN`` rows."""
        rows = range(min(size, LARGEST_PLAIN))
        first, second = ([[float(entry(i, j, seed)) for j in rows] for i in rows] for seed in SEEDS)
        columns = list(zip(*second, strict=True))

        def multiply() -> list[list[float]]:
            return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in columns] for row in first]

        result, weights = multiply(), [weight(index) for index in rows]
        inner = _times(second, weights)
        if _times(result, weights) != _times(first, inner):
            raise WrongProduct(WRONG)
        return timed(multiply, lambda again: bool(again == result))


def _times(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    return [sum(x * y for x, y in zip(row, vector, strict=True)) for row in matrix]
