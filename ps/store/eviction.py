"""Selection of rows to evict: those unseen for long, and above a cap the least recently seen, then the least frequent.

Age is a single number: ``seen`` in the upper 32 bits, ``frequency`` in the lower ones. Smaller goes first.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ps.store.shard_table import FREQUENCY, SEEN, ShardTable, Slots

SAMPLE = 1 << 21
"""Number of ages sampled to determine the age limit; larger tables are sampled at regular intervals."""


def ages(shard_table: ShardTable, slots: Slots) -> NDArray[np.uint64]:
    """The age of each row."""
    meta = shard_table.meta
    seen: NDArray[np.uint64] = meta[slots, SEEN].astype(np.uint64) << np.uint64(32)
    age: NDArray[np.uint64] = seen | meta[slots, FREQUENCY].astype(np.uint64)
    return age


def oldest(shard_table: ShardTable, slots: Slots, most: int) -> Slots:
    """At most ``most`` of these rows, the oldest ones."""
    if len(slots) <= most:
        return slots
    return slots[np.argpartition(ages(shard_table, slots), most)[:most]] if most > 0 else slots[:0]


def limit_age(samples: Iterable[NDArray[np.uint64]], share: float) -> int:
    """The age up to which ``share`` of the rows lie, 0 .. 1; -1 for none."""
    all_ages = np.concatenate([*samples, np.zeros(0, np.uint64)])
    if not len(all_ages) or share <= 0:
        return -1
    place = min(len(all_ages), int(np.ceil(share * len(all_ages)))) - 1
    return int(np.partition(all_ages, place)[place])
