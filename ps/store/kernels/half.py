"""Compiled conversion between float32 and 16-bit weights; ``ps/store/halves.py`` describes it."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math

import numpy as np

from ps.hashing import GOLDEN
from ps.store.halves import BRAIN, FLOAT, REBIAS, SMALLEST_NORMAL
from ps.store.kernels.mixing import mix
from ps.store.kernels.pointers import compiled, floats, shorts, words

_GOLDEN, _R40 = np.uint64(GOLDEN), np.uint64(40)
_INFINITE, _SIGN, _SIZE = 0x7F800000, 0x8000, 0x7FFFFFFF


@compiled(forceinline=True)
def room_of(dim, form):
    """Bytes of a row's weights."""
    return 4 * dim if form == FLOAT else 4 * ((dim + 1) >> 1)


@compiled(forceinline=True)
def _narrowed(bits, value, form, noise):
    """The 16 bits of a float32. ``noise``: 24 random bits; -1: round to the nearest."""
    sign, size = (bits >> 16) & _SIGN, bits & _SIZE
    if size > _INFINITE:
        return sign | (0x7FC0 if form == BRAIN else 0x7E00)
    if form == BRAIN:
        added = 0x7FFF + ((size >> 16) & 1) if noise < 0 else noise & 0xFFFF
        return sign | min((size + added) >> 16, 0x7F7F)
    if size >= SMALLEST_NORMAL:
        added = 0xFFF + ((size >> 13) & 1) if noise < 0 else noise & 0x1FFF
        return sign | min(((size + added) >> 13) - REBIAS, 0x7BFF)
    steps = abs(np.float64(value)) * 16777216.0
    if noise < 0:
        return sign | np.int64(np.rint(steps))
    return sign | np.int64(math.floor(steps + np.float64(noise & 0x1FFF) * 0.0001220703125))


@compiled()
def narrow(source, target, dim, form, key, updates, random):
    """Store ``dim`` floats in 16 bits each; ``random``: rounded at random, else to the nearest."""
    bits, value, out = words(source), floats(source), shorts(target)
    base = mix(np.uint64(key) ^ mix(np.uint64(updates)))
    for j in range(dim):
        noise = np.int64(mix(base + np.uint64(j) * _GOLDEN) >> _R40) if random else np.int64(-1)
        out[j] = np.uint16(_narrowed(np.int64(bits[j]), value[j], form, noise))


@compiled()
def widen(source, target, dim, form):
    """Copy 16-bit weights to float32."""
    given, bits, out = shorts(source), words(target), floats(target)
    for j in range(dim):
        number = np.int64(given[j])
        if form == BRAIN:
            bits[j] = np.uint32(number << 16)
            continue
        sign, size = (number & _SIGN) << 16, number & 0x7FFF
        if size >= 0x7C00:
            bits[j] = np.uint32(0x7FC00000)
        elif size >= 0x400:
            bits[j] = np.uint32(sign | ((size + REBIAS) << 13))
        else:
            out[j] = np.float32(size) * np.float32(5.9604644775390625e-08) * np.float32(-1 if sign else 1)


@compiled()
def settle(target, dim, form):
    """Round floats in place to what would be stored."""
    bits, value = words(target), floats(target)
    for j in range(dim):
        number = _narrowed(np.int64(bits[j]), value[j], form, np.int64(-1))
        if form == BRAIN:
            bits[j] = np.uint32(number << 16)
        elif number & 0x7FFF >= 0x400:
            bits[j] = np.uint32(((number & _SIGN) << 16) | (((number & 0x7FFF) + REBIAS) << 13))
        else:
            value[j] = (
                np.float32(number & 0x7FFF)
                * np.float32(5.9604644775390625e-08)
                * np.float32(-1 if number & _SIGN else 1)
            )
