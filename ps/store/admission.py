"""Which unknown keys get a row: by how often they have come, or by chance.

Occurrences of keys without a row are counted one by one, for each table and shard, in a hash table of 8 bytes a slot.
A key is known there by 40 bits of its hash, so that one in ten million is taken for another. A key that has not come
for ``WINDOW`` occurrences of others is forgotten, which bounds the table: about 2 MiB a shard. Counts belong to a
pserver: they are not copied, and begin anew where a bucket moves to, and after a restart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ps.hashing import GOLDEN, mixed
from ps.spec import Admission

WINDOW = 1 << 16
"""Unknown occurrences of a shard (64 times as many of a table on a pserver, about 4 million) in which a key has to come
once more to be remembered."""
LONGEST = 1 << 12
"""Occurrences in one pull that are tried for a chance; of a key that comes more often, no more are needed."""
_STEP = WINDOW // 4
"""Keys are aged so often."""
_AGES, _OLDEST = 15, 4
_LEAST = 256
_COUNT, _AGE, _HASH = np.uint64((1 << 20) - 1), np.uint64(20), np.uint64(24)
"""A slot: 40 bits of the hash, 4 of when the key came last (1 .. 15), 20 of the count. An empty one is 0."""
_BITS = 40
Hashes = NDArray[np.uint64]


class Pending:
    """Occurrences of keys without a row, of one shard of one table."""

    def __init__(self) -> None:
        self._slots: Hashes = np.zeros(_LEAST, np.uint64)
        self._used = 0
        self._taken = 0
        self.generation = 0
        """How often keys have been aged."""

    def __len__(self) -> int:
        """Keys that are remembered."""
        return int(np.count_nonzero(self._slots & _COUNT))

    def add(self, keys: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count unique keys; how often each has come by now."""
        self._room(len(keys))
        hashes = (mixed(keys) >> np.uint64(18)) & np.uint64((1 << _BITS) - 1)
        slots = self._find(hashes)
        total: NDArray[np.int64] = (self._slots[slots] & _COUNT).astype(np.int64) + counts
        self._slots[slots] = self._stamped(hashes) | np.minimum(total, int(_COUNT)).astype(np.uint64)
        self._taken += int(counts.sum())
        if self._taken >= _STEP:
            self.generation += 1
            self._taken = 0
            self._rebuild(0)
        return total

    def forget(self, keys: NDArray[np.int64]) -> None:
        """These have a row now."""
        hashes = (mixed(keys) >> np.uint64(18)) & np.uint64((1 << _BITS) - 1)
        self._room(len(keys))
        self._slots[self._find(hashes)] = self._stamped(hashes)  # goes when keys are aged

    def bytes(self) -> int:
        """Of memory."""
        return self._slots.nbytes

    def _stamped(self, hashes: Hashes) -> Hashes:
        return np.asarray((hashes << _HASH) | np.uint64(1 + self.generation % _AGES << 20), np.uint64)

    def _find(self, hashes: Hashes) -> NDArray[np.int64]:
        """The slot of each, which is given one if it has none."""
        slots, mask = self._slots, len(self._slots) - 1
        places = (hashes >> np.uint64(_BITS - mask.bit_length())).astype(np.int64)
        looking = np.arange(len(hashes))
        while len(looking):
            at = places[looking]
            there = slots[at]
            empty = there == 0
            if empty.any():  # the first of several that want it gets it; the others look again
                _, first = np.unique(at[empty], return_index=True)
                winners = looking[empty][first]
                slots[places[winners]] = self._stamped(hashes[winners])
                self._used += len(winners)
                there = slots[at]
            found = (there >> _HASH == hashes[looking]) & (there != 0)
            taken = ~found & (there != 0)
            places[looking[taken]] = (at[taken] + 1) & mask
            looking = looking[~found]
        return np.asarray(places)

    def _room(self, more: int) -> None:
        if 2 * (self._used + more) > len(self._slots):
            self._rebuild(more)

    def _rebuild(self, more: int) -> None:
        """Without keys that have not come for long."""
        old = self._slots[self._slots & _COUNT != 0]
        stamps = ((old >> _AGE) & np.uint64(15)).astype(np.int64) - 1
        old = old[(self.generation - stamps) % _AGES <= _OLDEST]
        size = _LEAST
        while size < 2 * (len(old) + more) + 2:
            size *= 2
        self._slots, self._used = np.zeros(size, np.uint64), 0
        self._slots[self._find(old >> _HASH)] = old


def admitted(
    rule: Admission, pending: Pending, keys: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which of these unique unknown keys, having come so often in this pull, get a row now."""
    generation = pending.generation
    total = pending.add(keys, counts)
    if rule.count > 1:
        found = np.asarray(total >= rule.count)
    else:
        tries = np.minimum(counts, LONGEST)
        which = np.repeat(np.arange(len(keys)), tries)
        number = np.arange(len(which)) - np.repeat(np.cumsum(tries) - tries, tries) + np.repeat(total - counts, tries)
        drawn = mixed(mixed(keys)[which] ^ (number + (generation << 40)).astype(np.uint64) * np.uint64(GOLDEN))
        lucky = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53 < rule.probability
        found = np.zeros(len(keys), np.bool_)
        found[which[lucky]] = True
    if found.any():
        pending.forget(keys[found])
    return found
