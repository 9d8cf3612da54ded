"""The product is exact, and any wrong number in it is found."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edl.worker.probe import product
from edl.worker.probe.product import SEEDS, NumpyDevice, PlainDevice, WrongProduct, entry, timed, verify, weight

SIZE = 64


def matrices(size: int = SIZE) -> tuple[Any, Any, Any]:
    """Both matrices as whole numbers, and their product in single precision."""
    first, second = (NumpyDevice(np).matrix(size, seed) for seed in SEEDS)
    return first, second, first.astype(np.float32) @ second.astype(np.float32)


def test_the_matrices_are_the_same_everywhere() -> None:
    plain = [[entry(i, j, SEEDS[0]) for j in range(9)] for i in range(9)]
    assert NumpyDevice(np).matrix(9, SEEDS[0]).tolist() == plain
    assert min(map(min, plain)) >= -8 and max(map(max, plain)) <= 8
    assert min(weight(index) for index in range(1 << 16)) >= 1


@pytest.mark.torch
def test_torch_has_the_same_matrices() -> None:
    health = importlib.import_module("edl.torch.health")
    assert health._matrix(9, SEEDS[1]).tolist() == NumpyDevice(np).matrix(9, SEEDS[1]).tolist()


def test_a_product_is_exact_in_single_precision_at_the_largest_size() -> None:
    assert 8 * 8 * (1 << 16) < 1 << 24, "the largest sum of --health-check-size"
    first, second, result = matrices()
    assert np.array_equal(result.astype(np.int64), first @ second)
    verify(np, result, first, second)


@pytest.mark.parametrize("seed", range(50))
def test_any_wrong_number_is_found(seed: int) -> None:
    rng = random.Random(seed)
    first, second, result = matrices()
    row, column = rng.randrange(SIZE), rng.randrange(SIZE)
    bits = result.view(np.uint32)
    bits[row, column] ^= np.uint32(1 << rng.randrange(32))
    if result[row, column] == first[row] @ second[:, column]:
        return  # the sign of a zero
    with pytest.raises(WrongProduct, match="wrong numbers"):
        verify(np, result, first, second)


def test_wrong_numbers_that_cancel_in_a_sum_are_found() -> None:
    first, second, result = matrices()
    result[5, 1] += 4
    result[5, 2] -= 4
    with pytest.raises(WrongProduct, match=r"1 of 64 rows, the first is 5"):
        verify(np, result, first, second)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1e30, 0.5])
def test_no_whole_number(wrong: float) -> None:
    first, second, result = matrices()
    result[0, 0] = wrong
    with pytest.raises(WrongProduct, match="not "):
        verify(np, result, first, second)


def test_a_product_that_changes_is_found() -> None:
    results = iter([1, 1, 2, 2, 2, 2])
    with pytest.raises(WrongProduct, match="repetition 3"):
        timed(lambda: next(results), lambda again: again == 1)


def _torch() -> Any:
    health = importlib.import_module("edl.torch.health")
    return next(iter(health.devices(1)))


def _paddle() -> Any:
    health = importlib.import_module("edl.paddle.health")
    return next(iter(health.devices(1)))


@pytest.mark.parametrize(
    "device",
    [
        PlainDevice,
        lambda: NumpyDevice(np),
        pytest.param(_torch, marks=pytest.mark.torch),
        pytest.param(_paddle, marks=pytest.mark.paddle),
    ],
    ids=["plain", "numpy", "torch", "paddle"],
)
def test_each_library_gets_it_right(device: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "LEAST_S", 0.0)
    one = device()
    assert one.product_s(SIZE) > 0
    assert one.kind
