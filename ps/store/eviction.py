"""Which rows go: those unseen for long, and the least recently seen (of those, the least frequent) above a cap.

Age is one number, ``seen`` above ``frequency``; smaller goes first.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ps.store.shard_table import FREQUENCY, SEEN, ShardTable, Slots

SAMPLE = 1 << 21
"""Ages looked at to find out how old is too old; of larger tables a regular sample."""


def ages(shard_table: ShardTable, slots: Slots) -> NDArray[np.uint64]:
    """Of these rows."""
    meta = shard_table.meta
    seen: NDArray[np.uint64] = meta[slots, SEEN].astype(np.uint64) << np.uint64(32)
    age: NDArray[np.uint64] = seen | meta[slots, FREQUENCY].astype(np.uint64)
    return age


def oldest(shard_table: ShardTable, slots: Slots, most: int) -> Slots:
    """So many of these rows at most, the oldest."""
    if len(slots) <= most:
        return slots
    return slots[np.argpartition(ages(shard_table, slots), most)[:most]] if most > 0 else slots[:0]


def limit_age(samples: Iterable[NDArray[np.uint64]], share: float) -> int:
    """The age up to which this share of the rows lies."""
    all_ages = np.concatenate([*samples, np.zeros(0, np.uint64)])
    if not len(all_ages) or share <= 0:
        return -1
    place = min(len(all_ages), int(np.ceil(share * len(all_ages)))) - 1
    return int(np.partition(all_ages, place)[place])
