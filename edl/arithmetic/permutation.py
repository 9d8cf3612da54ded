"""Permutations that are computed instead of stored: any number of items in the memory of a few integers.

Checkpoints hold positions in these orders, so the results must never change between versions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

_ROUNDS = 8
_ROUNDS_OF_FEW = 16
_FEW = 1024
"""Permutations of up to this many items need more rounds until all are about equally likely (chi-square tests of all
permutations of 3 … 6 items, and of pairs among 12 and 30)."""
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
"""The constants of splitmix64 (Steele, Lea, Flood 2014)."""
_MOST = 1 << 62
_BLOCK = 1 << 14
"""Items computed at once: their columns fit into the CPU caches."""


def key(*parts: int | str) -> int:
    """A 64-bit number derived from the parts; the same on all machines and in all versions."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(f"i{int(part)};".encode() if isinstance(part, int) else f"s{len(part)}:{part};".encode())
    return int.from_bytes(digest.digest(), "little")


class Permutation:
    """A permutation of ``range(n)`` that depends only on ``n`` (0 … 2**62) and ``key``.

    An item is a pair of digits (left, right) with bases of about the square root of ``n``. The rounds alternately add a
    hash of one digit to the other. Each round can be undone, so the result is a permutation of all pairs (a Feistel
    network). A result of ``n`` or more is permuted again until it is below ``n``, which preserves that property (cycle
    walking).
    """

    __slots__ = ("_high", "_keys", "_low", "_n")

    def __init__(self, n: int, key: int) -> None:
        if not 0 <= n <= _MOST:
            raise ValueError(f"a permutation of {n} items: the number must be between 0 and 2**62")
        self._n = n
        self._low = max(1, math.isqrt(max(0, n - 1)) + 1)
        self._high = max(1, -(-n // self._low))
        state = key & _MASK
        keys = []
        for _ in range(_ROUNDS_OF_FEW if n <= _FEW else _ROUNDS):
            state = (state + _STEP) & _MASK
            mixed = _mix(state)
            keys.append(mixed ^ (mixed >> 31))
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return self._n

    def at(self, i: int) -> int:
        """The item at place ``i``. Raises ``IndexError`` outside ``0 … n - 1``."""
        if not 0 <= i < self._n:
            raise IndexError(f"place {i} of a permutation of {self._n} items")
        return self._walk(i)

    def block(self, begin: int, end: int) -> list[int]:
        """The items at places ``begin`` … ``end - 1``. Raises ``IndexError`` for places outside the permutation."""
        self._check(begin, end)
        low, high, n = self._low, self._high, self._n
        pairs = tuple(zip(self._keys[::2], self._keys[1::2], strict=True))
        found = []
        for value in range(begin, end):
            while True:  # ``_once`` and ``_mix`` inlined: the calls would double the time
                left, right = divmod(value, low)
                for one, other in pairs:
                    mixed = right ^ one
                    mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _MASK
                    mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _MASK
                    left = (left + ((mixed >> 32) * high >> 32)) % high
                    mixed = left ^ other
                    mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _MASK
                    mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _MASK
                    right = (right + ((mixed >> 32) * low >> 32)) % low
                value = left * low + right
                if value < n:
                    break
            found.append(value)
        return found

    def array(self, begin: int, end: int) -> NDArray[numpy.int64]:
        """Like ``block``, but as a NumPy array and many times faster."""
        import numpy

        self._check(begin, end)
        out = numpy.empty(end - begin, numpy.int64)
        for start in range(0, end - begin, _BLOCK):
            stop = min(end - begin, start + _BLOCK)
            out[start:stop] = self._many(numpy.arange(begin + start, begin + stop, dtype=numpy.uint64))
        return out

    def pick(self, places: Sequence[int] | NDArray[Any]) -> NDArray[numpy.int64]:
        """The items at arbitrary places, as a NumPy array. Raises ``IndexError`` for places outside the permutation."""
        import numpy

        asked = numpy.asarray(places, numpy.int64)
        if asked.size and (int(asked.min()) < 0 or int(asked.max()) >= self._n):
            raise IndexError(f"places {asked.min()} … {asked.max()} of a permutation of {self._n} items")
        out = numpy.empty(asked.size, numpy.int64)
        for start in range(0, asked.size, _BLOCK):
            out[start : start + _BLOCK] = self._many(asked[start : start + _BLOCK].astype(numpy.uint64))
        return out

    def _check(self, begin: int, end: int) -> None:
        if not 0 <= begin <= end <= self._n:
            raise IndexError(f"places {begin} … {end} of a permutation of {self._n} items")

    def _walk(self, value: int) -> int:
        low, high, n = self._low, self._high, self._n
        value = self._once(value, low, high)
        while value >= n:
            value = self._once(value, low, high)
        return value

    def _once(self, value: int, low: int, high: int) -> int:
        left, right = divmod(value, low)
        keys = iter(self._keys)
        for one, other in zip(keys, keys, strict=True):
            left = (left + ((_mix(right ^ one) >> 32) * high >> 32)) % high
            right = (right + ((_mix(left ^ other) >> 32) * low >> 32)) % low
        return left * low + right

    def _many(self, values: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
        """``_walk`` for each value."""
        out = self._once_many(values)
        beyond = (out >= self._n).nonzero()[0]
        while beyond.size:
            again = self._once_many(out[beyond])
            out[beyond] = again
            beyond = beyond[again >= self._n]
        return out

    def _once_many(self, values: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
        import numpy

        u64 = numpy.uint64
        low, high = u64(self._low), u64(self._high)
        left: NDArray[numpy.uint64] = values // low
        right = values - left * low
        hashed, scratch = numpy.empty_like(values), numpy.empty_like(values)

        def turn(digit: NDArray[numpy.uint64], base: numpy.uint64, by: NDArray[numpy.uint64], secret: int) -> None:
            """Add a hash of ``by`` to ``digit``, modulo ``base``."""
            numpy.bitwise_xor(by, u64(secret), out=hashed)
            for shift, factor in ((30, _FIRST), (27, _SECOND)):
                numpy.right_shift(hashed, u64(shift), out=scratch)
                numpy.bitwise_xor(hashed, scratch, out=hashed)
                numpy.multiply(hashed, u64(factor), out=hashed)
            numpy.right_shift(hashed, u64(32), out=hashed)
            numpy.multiply(hashed, base, out=hashed)
            numpy.right_shift(hashed, u64(32), out=hashed)
            numpy.add(digit, hashed, out=digit)
            # Modulo without a division: a digit below the base makes the difference wrap around to a larger number.
            numpy.subtract(digit, base, out=scratch)
            numpy.minimum(digit, scratch, out=digit)

        keys = iter(self._keys)
        for one, other in zip(keys, keys, strict=True):
            turn(left, high, right, one)
            turn(right, low, left, other)
        numpy.multiply(left, low, out=left)
        numpy.add(left, right, out=left)
        return left


def _mix(value: int) -> int:
    """A hash with well-mixed upper 32 bits. The last step of splitmix64, which improves the lower bits, is left out."""
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    return ((value ^ (value >> 27)) * _SECOND) & _MASK
