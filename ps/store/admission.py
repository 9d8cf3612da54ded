"""Admission of unknown keys, by number of occurrences or by chance.

Occurrences of keys without a row are counted per table and shard in a hash table of 8 bytes per slot. A key is
identified by 40 bits of its hash, so about one in ten million is mistaken for another. A key that does not occur within
``WINDOW`` occurrences of others is forgotten, which bounds the table to about 2 MiB per shard. Counts are local to a
pserver: they are not replicated, and start again when a bucket moves or the process restarts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ps.hashing import GOLDEN, mixed
from ps.spec import Admission

WINDOW = 1 << 16
"""Occurrences of unknown keys in a shard (times 64 for a table on a pserver: about 4 million) within which a key must
occur again to be remembered."""
LONGEST = 1 << 12
"""Occurrences of a key in one pull that get a chance; the remaining ones are ignored."""
_STEP = WINDOW // 4
"""Keys are aged after this many occurrences."""
_AGES, _OLDEST = 15, 4
_LEAST = 256
_COUNT, _AGE, _HASH = np.uint64((1 << 20) - 1), np.uint64(20), np.uint64(24)
"""Layout of a slot: 40 bits hash, 4 bits age of the last occurrence (1 .. 15), 20 bits count. Empty: 0."""
_BITS = 40
Hashes = NDArray[np.uint64]


class Pending:
    """Counts occurrences of keys without a row, for one shard of one table."""

    def __init__(self) -> None:
        self._slots: Hashes = np.zeros(_LEAST, np.uint64)
        self._used = 0
        self._taken = 0
        self.generation = 0
        """Number of times that keys have been aged."""

    def __len__(self) -> int:
        """Number of remembered keys."""
        return int(np.count_nonzero(self._slots & _COUNT))

    def add(self, keys: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count occurrences of unique keys; return the new total of each."""
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
        """Forget keys that have a row now."""
        hashes = (mixed(keys) >> np.uint64(18)) & np.uint64((1 << _BITS) - 1)
        self._room(len(keys))
        self._slots[self._find(hashes)] = self._stamped(hashes)  # removed when keys are aged

    def bytes(self) -> int:
        """Memory in use, in bytes."""
        return self._slots.nbytes

    def _stamped(self, hashes: Hashes) -> Hashes:
        return np.asarray((hashes << _HASH) | np.uint64(1 + self.generation % _AGES << 20), np.uint64)

    def _find(self, hashes: Hashes) -> NDArray[np.int64]:
        """Find the slot of each hash, allocating one if necessary."""
        slots, mask = self._slots, len(self._slots) - 1
        places = (hashes >> np.uint64(_BITS - mask.bit_length())).astype(np.int64)
        looking = np.arange(len(hashes))
        while len(looking):
            at = places[looking]
            there = slots[at]
            empty = there == 0
            if empty.any():  # of several keys for one slot the first gets it
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
        """Rebuild the table without expired keys."""
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
    """Count unique unknown keys and decide which of them get a row now. ``counts``: occurrences in this pull."""
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
