"""Assignment of keys to buckets (the unit of placement) and shards (the unit of locking), the same for all tables.

Python, numpy and the kernels compute the same numbers. Only functions that need numpy import it, so the rest of ``ps``
can look up a single key without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
"""The constants of splitmix64."""
MASK = (1 << 64) - 1
SHARDS = 64
"""Shards per store; each has a lock. A shard holds the buckets ``64 * shard .. 64 * shard + 63``."""
BUCKET_SHIFT, SHARD_SHIFT = 52, 58


def splitmix64(value: int) -> int:
    """The splitmix64 hash of an integer, which may be negative."""
    mixed = (value + GOLDEN) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * FIRST) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * SECOND) & MASK
    return mixed ^ (mixed >> 31)


def bucket_of(key: int) -> int:
    """The bucket of one key: 0 .. 4095."""
    return splitmix64(key) >> BUCKET_SHIFT


def shard_of_bucket(bucket: int) -> int:
    """The shard, 0 .. 63, that holds a bucket, 0 .. 4095."""
    return bucket >> (SHARD_SHIFT - BUCKET_SHIFT)


def mixed(keys: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``splitmix64`` of each key."""
    import numpy as np

    value: NDArray[np.uint64] = keys.astype(np.uint64) + np.uint64(GOLDEN)
    value ^= value >> np.uint64(30)
    value *= np.uint64(FIRST)
    value ^= value >> np.uint64(27)
    value *= np.uint64(SECOND)
    value ^= value >> np.uint64(31)
    return value


def buckets_of(keys: NDArray[np.int64]) -> NDArray[np.uint16]:
    """The bucket of each key."""
    import numpy as np

    buckets: NDArray[np.uint16] = (mixed(keys) >> np.uint64(BUCKET_SHIFT)).astype(np.uint16)
    return buckets
