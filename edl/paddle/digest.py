"""64-bit hashes of arrays: the multilinear hash of ``edl.torch.digest``, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import paddle

_BLOCK_WORDS = 1 << 16
_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1
_WORD_BYTES = 4


def digest(values: Sequence[Any]) -> int:
    """Hash the bytes of numpy arrays, in this order; shapes and types are not included."""
    result = 0
    for value in values:
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        whole = data.size // _WORD_BYTES * _WORD_BYTES
        words = data[:whole].view(np.uint32)
        result = _mixed(result, data.size)
        for start in range(0, words.size, _BLOCK_WORDS):
            part = words[start : start + _BLOCK_WORDS]
            products = np.multiply(part, _factors()[: part.size], dtype=np.uint64)
            result = _mixed(result, int(products.sum(dtype=np.uint64)))
        if whole < data.size:
            result = _mixed(result, int.from_bytes(data[whole:].tobytes(), "little"))
    return result


def finite(values: Sequence[Any]) -> list[bool]:
    """For each array whether all its elements are finite."""
    return [_is_finite(value) for value in values]


def _is_finite(value: Any) -> bool:
    if isinstance(value, paddle.Tensor):
        if not (value.is_floating_point() or value.is_complex()):
            return True
        value = value.detach()
        return bool(paddle.isfinite(value.astype("float32") if value.element_size() < _WORD_BYTES else value).all())
    return value.dtype.kind not in "fc" or bool(np.isfinite(value).all())


def _mixed(result: int, part: int) -> int:
    return (result * _PRIME + part + 1) & _MASK


@lru_cache(maxsize=1)
def _factors() -> Any:
    """Odd numbers from the splitmix64 generator for 1, 2, 3, …"""
    with np.errstate(over="ignore"):
        mixed = np.arange(1, _BLOCK_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
