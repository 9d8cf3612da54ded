"""``ps.hashing`` for use in compiled functions."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from ps.hashing import FIRST, GOLDEN, SECOND
from ps.store.kernels.pointers import compiled

_GOLDEN, _FIRST, _SECOND = np.uint64(GOLDEN), np.uint64(FIRST), np.uint64(SECOND)
_R30, _R27, _R31 = np.uint64(30), np.uint64(27), np.uint64(31)


@compiled(forceinline=True)
def mix(value):
    """The splitmix64 hash of a uint64."""
    value = value + _GOLDEN
    value = (value ^ (value >> _R30)) * _FIRST
    value = (value ^ (value >> _R27)) * _SECOND
    return value ^ (value >> _R31)
