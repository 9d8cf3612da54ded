"""Hashes of tensors: every change of one element shows, and both frameworks' are equal to plain arithmetic."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

BLOCK = 1 << 16
WORD = 0xFFFFFFFF
MASK = (1 << 64) - 1


def factor(position: int) -> int:
    """Factor of the word at this position of its block."""
    mixed = ((position + 1) * 0x9E3779B97F4A7C15) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return (mixed ^ (mixed >> 31)) | 1


def block_sum(data: bytes, signed: bool) -> int:
    words = [int.from_bytes(data[at : at + 4], "little", signed=signed) for at in range(0, len(data), 4)]
    return sum(word * factor(position) for position, word in enumerate(words)) & MASK


def torch_digest() -> Callable[[Sequence[Any]], int]:
    return pytest.importorskip("edl.torch.arrays").TorchArrays().digest  # type: ignore[no-any-return]


def paddle_digest() -> Callable[[Sequence[Any]], int]:
    return pytest.importorskip("edl.paddle.arrays").PaddleArrays().digest  # type: ignore[no-any-return]


@pytest.fixture(
    params=[pytest.param("torch", marks=pytest.mark.torch), pytest.param("paddle", marks=pytest.mark.paddle)]
)
def digest(request: pytest.FixtureRequest) -> Callable[[Sequence[Any]], int]:
    return torch_digest() if request.param == "torch" else paddle_digest()


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000, 4 * BLOCK, 4 * BLOCK + 7, 12 * BLOCK + 2])
def test_a_changed_bit_shows(digest: Callable[[Sequence[Any]], int], size: int) -> None:
    rng = random.Random(size)
    data = np.frombuffer(rng.randbytes(size), np.uint8).copy()
    before = digest([data])
    for _ in range(40):
        at, bit = rng.randrange(size), 1 << rng.randrange(8)
        data[at] ^= bit
        assert digest([data]) != before, (at, bit)
        data[at] ^= bit
    assert digest([data.copy()]) == before


@pytest.mark.parametrize("other", [1, 2, 64, BLOCK, BLOCK + 1])
def test_exchanged_elements_show(digest: Callable[[Sequence[Any]], int], other: int) -> None:
    values = np.linspace(-1, 1, 3 * BLOCK, dtype=np.float32)
    values[0], values[other] = 1.5, -1.5  # they differ in the sign bit alone
    before = digest([values])
    values[0], values[other] = -1.5, 1.5
    assert digest([values]) != before


def test_order_and_borders_of_arrays_show(digest: Callable[[Sequence[Any]], int]) -> None:
    one, two = np.arange(5, dtype=np.float32), np.arange(100_000, dtype=np.float64)
    assert digest([one, two]) != digest([two, one])
    assert digest([]) == digest([np.empty(0, np.float32)]) or digest([np.empty(0, np.float32)]) != digest([one])
    assert digest([one]) != digest([one, one])


@pytest.mark.torch
def test_torch_against_plain_arithmetic() -> None:
    torch = pytest.importorskip("torch")
    from edl.torch import digest as module

    data = random.Random(5).randbytes(4 * 1000)
    sums = module._sums(torch.frombuffer(bytearray(data), dtype=torch.int32))
    assert [one & MASK for one in sums] == [block_sum(data, signed=True)]


@pytest.mark.paddle
def test_paddle_against_plain_arithmetic() -> None:
    pytest.importorskip("paddle")
    from edl.paddle import digest as module

    data = random.Random(5).randbytes(4 * 1000)
    expected = (len(data) + 1) & MASK
    expected = (expected * 0x100000001B3 + block_sum(data, signed=False) + 1) & MASK
    assert module.digest([np.frombuffer(data, np.uint8)]) == expected


@pytest.mark.torch
def test_torch_hashes_what_tensors_hold_however_they_lie_in_memory() -> None:
    torch = pytest.importorskip("torch")
    digest = torch_digest()
    plain = torch.randn(4, 6, 5, 8)
    assert digest([plain.to(memory_format=torch.channels_last)]) == digest([plain])
    assert digest([plain.transpose(0, 1).contiguous().transpose(0, 1)]) == digest([plain])
    flat = torch.arange(9, dtype=torch.float16)
    assert digest([flat[1:]]) == digest([flat[1:].clone()]), "a view that begins within a word"
    number = torch.randn(7, dtype=torch.complex64)
    assert digest([number.conj()]) == digest([number.conj().resolve_conj()]) != digest([number])
    assert digest([torch.tensor(float("nan"))]) == digest([torch.tensor(float("nan"))])
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    assert digest([parameter]) == digest([parameter.detach()])
    many = [torch.full((3,), number) for number in range(2000)]
    before = digest(many)
    many[1234][1] += 1
    assert digest(many) != before


@pytest.mark.torch
def test_torch_names_what_is_not_finite() -> None:
    torch = pytest.importorskip("torch")
    arrays = pytest.importorskip("edl.torch.arrays").TorchArrays()
    nan, infinity = float("nan"), float("inf")
    values = [
        torch.ones(3), torch.tensor([1, nan]), torch.tensor(infinity, dtype=torch.bfloat16), torch.ones(3).long(),
        torch.empty(0), torch.tensor([1 + 1j * nan]), torch.tensor([nan]).to(torch.float8_e5m2),
        np.array([1, infinity]), torch.tensor([True]),
    ]  # fmt: skip
    assert arrays.finite(values) == [True, False, False, True, True, False, False, False, True]


@pytest.mark.paddle
def test_paddle_names_what_is_not_finite() -> None:
    paddle = pytest.importorskip("paddle")
    arrays = pytest.importorskip("edl.paddle.arrays").PaddleArrays()
    values = [
        paddle.ones([3]), paddle.to_tensor([1.0, float("nan")]), paddle.to_tensor([float("inf")]).astype("bfloat16"),
        paddle.to_tensor([1, 2]), np.array([1, float("inf")]), np.array([1, 2]),
    ]  # fmt: skip
    assert arrays.finite(values) == [True, False, False, True, False, True]
