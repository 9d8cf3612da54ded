"""64-bit hashes of tensors, computed on the tensors' devices.

Each 32-bit word is multiplied by a pseudo-random odd number that depends on its position, and the products are added
modulo 2^64 (the multilinear family: Lemire and Kaser, "Strongly universal string hashing is fast", 2014). A change of a
single word is always detected; other changes are missed with a probability of about 2^-31 or less. The hash detects
faults, not deliberate manipulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

_BLOCK_WORDS = {"cpu": 1 << 16}
"""Words that are hashed at a time: as many as fit a processor's cache."""
_DEVICE_BLOCK_WORDS = 1 << 22
_SMALL_BYTES = 1 << 16
"""Smaller tensors are concatenated and hashed together."""
_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1
_WORD_BYTES = 4


def digest(values: Sequence[Any]) -> int:
    """Hash the bytes of tensors and numpy arrays, in this order; shapes and types are not included.

    The result is equal on ranks that hold the tensors on the same kind of device.
    """
    result = 0
    waiting: list[torch.Tensor] = []
    for value in values:
        data = _bytes(value)
        if waiting and waiting[0].device != data.device:
            result = _together(result, waiting)
        if data.numel() <= _SMALL_BYTES:
            waiting.append(data)
            if len(waiting) * _SMALL_BYTES >= _BLOCK_WORDS["cpu"] * _WORD_BYTES * 64:
                result = _together(result, waiting)
            continue
        result = _hash(_together(result, waiting), data)
    return _together(result, waiting)


def finite(values: Sequence[Any]) -> list[bool]:
    """For each array whether all its elements are finite."""
    answers: list[Any] = []
    for value in values:
        tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
        if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
            answers.append(True)
            continue
        tensor = tensor.detach()
        # Most devices lack the operation for 8-bit types.
        answers.append(torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all())
    return [bool(answer) for answer in answers]


def _bytes(value: Any) -> torch.Tensor:
    tensor = value.detach() if isinstance(value, torch.Tensor) else torch.from_numpy(value)
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=tensor.device)


def _together(result: int, waiting: list[torch.Tensor]) -> int:
    if not waiting:
        return result
    joined = torch.cat(waiting) if len(waiting) > 1 else waiting[0]
    waiting.clear()
    return _hash(result, joined)


def _hash(result: int, data: torch.Tensor) -> int:
    whole = data.numel() // _WORD_BYTES * _WORD_BYTES
    body, tail = data[:whole], data[whole:]
    sums: list[int] = []
    if whole:
        if body.data_ptr() % _WORD_BYTES:
            body = body.clone()
        sums = _sums(body.view(torch.int32))
    if tail.numel():
        sums.append(int.from_bytes(bytes(tail.tolist()), "little"))
    for part in (data.numel(), *sums):
        result = (result * _PRIME + part + 1) & _MASK
    return result


def _sums(words: torch.Tensor) -> list[int]:
    block = _BLOCK_WORDS.get(words.device.type, _DEVICE_BLOCK_WORDS)
    factors = _factors(block, words.device)
    products = torch.empty(min(block, words.numel()), dtype=torch.int64, device=words.device)
    found = []
    for start in range(0, words.numel(), block):
        part = words[start : start + block]
        target = products[: part.numel()]
        torch.mul(part, factors[: part.numel()], out=target)
        found.append(target.sum())
    return [int(one) for one in torch.stack(found).tolist()]


@lru_cache(maxsize=4)
def _factors(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers from the splitmix64 generator (Steele, Lea, Flood 2014) for 1, 2, 3, …"""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _shifted(values: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift; torch's own shift keeps the sign."""
    return (values >> count) & ((1 << (64 - count)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
