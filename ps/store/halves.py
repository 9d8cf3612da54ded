"""Weights in 16 bits: half precision and bfloat16, rounded to the nearest or at random. The numpy version; the compiled
one in ``ps/store/kernels/half.py`` gives the same bits.

Rounding at random chooses one of the two neighbours so that the expected value is the exact one: updates much smaller
than a weight add up instead of being lost. What is drawn depends only on key, number of updates (for added values also
on the push) and column.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps.hashing import GOLDEN, mixed

FLOAT, HALF, BRAIN = range(3)
"""Codes of the formats in kernels: float32, half precision, bfloat16."""
SMALLEST_NORMAL, REBIAS = 0x38800000, 112 << 10
"""Bits of 2**-14, below which half precision has fixed steps; and the difference of the exponents' offsets."""
LARGEST = {HALF: 0x7BFF, BRAIN: 0x7F7F}
"""Bits of the largest finite value, to which larger ones are reduced."""
NOT_A_NUMBER = {HALF: 0x7E00, BRAIN: 0x7FC0}


def drawn(keys: NDArray[np.int64], updates: NDArray[np.unsignedinteger[Any]], dim: int) -> NDArray[np.uint64]:
    """24 random bits for each weight of some rows, ``(keys, dim)``."""
    base = mixed(keys.astype(np.uint64) ^ mixed(updates.astype(np.uint64)))[:, None]
    bits: NDArray[np.uint64] = mixed(base + np.arange(dim, dtype=np.uint64) * np.uint64(GOLDEN)) >> np.uint64(40)
    return bits


def narrow(values: NDArray[np.float32], form: int, random: NDArray[np.uint64] | None = None) -> NDArray[np.uint16]:
    """Round to 16 bits: to the nearest, ties to even, or with the bits from ``drawn``."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.int64)
    sign, size = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    low = 16 if form == BRAIN else 13
    noise = None if random is None else random.astype(np.int64) & ((1 << low) - 1)
    added = (1 << (low - 1)) - 1 + ((size >> low) & 1) if noise is None else noise
    found: NDArray[Any] = (size + added) >> low
    if form == HALF:
        steps = np.abs(values.astype(np.float64)) * 2.0**24
        with np.errstate(invalid="ignore"):
            small = np.rint(steps) if noise is None else np.floor(steps + noise * 2.0**-13)
        found = np.where(size < SMALLEST_NORMAL, np.minimum(small, LARGEST[form]), found - REBIAS).astype(np.int64)
    found = np.minimum(found, LARGEST[form])
    found = sign | np.where(size > 0x7F800000, NOT_A_NUMBER[form], found)
    return np.asarray(found, np.uint16)


def widen(numbers: NDArray[np.uint16], form: int) -> NDArray[np.float32]:
    """The values of 16-bit numbers; exact."""
    if form == BRAIN:
        return np.asarray(numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.asarray(numbers.view(np.float16), np.float32)


def rounded(values: NDArray[np.float32], form: int) -> NDArray[np.float32]:
    """The values as they are stored when they are assigned."""
    return values if form == FLOAT else widen(narrow(values, form), form)
