"""The order in which the shards of an epoch are leased."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import compress

from edl.arithmetic.permutation import Permutation, key

FRESH = 0
"""State of a shard that has not been granted in this order yet; see ``lease_table`` for the others."""
_ONLY_FRESH = bytes([1]) + bytes(255)
_BLOCK = 256
_SLACK = 4096
"""A resumed order starts this many shards before the number of finished ones: shards finish slightly out of order, and
the few that lie further back come at the end."""
_SKIPPED = 16384
"""After this many finished shards in a row, the remaining ones are collected instead."""


class ShardOrder:
    """The order of ``Permutation(shards, key(seed, epoch))``, or ascending; skips shards that are no longer fresh."""

    __slots__ = ("_at", "_block", "_block_at", "_key", "_permutation", "_shuffle", "_values")

    def __init__(self, shards: int, seed: int, epoch: int, shuffle: bool, done: int = 0) -> None:
        """``done``: number of finished shards, probably the first ones."""
        self._shuffle = shuffle
        self._key = (seed, epoch)
        self._permutation = Permutation(shards, key(seed, epoch))
        self._values: Sequence[int] = range(shards)
        self._at = max(0, done - _SLACK)
        self._block: list[int] = []
        self._block_at = 0

    def next(self, states: bytearray) -> int:
        """The next fresh shard. There must be one, and it must not be fresh at the next call."""
        skipped = 0
        while True:
            if self._block_at == len(self._block):
                if self._at >= len(self._values) or skipped > _SKIPPED:
                    self._pick(states)
                self._fill()
            shard = self._block[self._block_at]
            self._block_at += 1
            if states[shard] == FRESH:
                return shard
            skipped += 1

    def _fill(self) -> None:
        end = min(len(self._values), self._at + _BLOCK)
        if self._shuffle:
            values = self._values
            places = self._permutation.block(self._at, end)
            self._block = places if isinstance(values, range) else [values[place] for place in places]
        else:
            self._block = list(self._values[self._at : end])
        self._at, self._block_at = end, 0

    def _pick(self, states: bytearray) -> None:
        """Continue with the shards that are fresh now, in a new order."""
        self._values = array("q", compress(range(len(states)), states.translate(_ONLY_FRESH)))
        self._permutation = Permutation(len(self._values), key(*self._key, "rest"))
        self._at = 0
