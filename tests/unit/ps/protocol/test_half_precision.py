"""Rows in 16 bits against the definition of rounding to the nearest."""

from __future__ import annotations

import numpy as np
import pytest

from ps.protocol import half_precision
from ps.protocol.half_precision import decode_half, encode_half, wire_of
from ps.spec import Optimizer, TableSpec, UpdateRule


def test_a_brain_float_is_the_nearest_one_and_of_two_the_even_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_precision, "_CHUNK", 64)  # many chunks, the last one shorter
    rng = np.random.default_rng(0)
    high = rng.integers(0, 0x7F00, (40, 5), np.uint32) | rng.integers(0, 2, (40, 5), np.uint32) << np.uint32(15)
    low = rng.choice(np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32), (40, 5))
    rows = (high << np.uint32(16) | low).view(np.float32)
    below, above = ((high + one << 16).astype(np.uint32).view(np.float32).astype(np.float64) for one in (0, 1))
    to_below, to_above = np.abs(rows - below), np.abs(above - rows)
    even_below = high % 2 == 0
    nearest = np.where((to_below < to_above) | ((to_below == to_above) & even_below), below, above)
    found = encode_half(rows, "bf16")
    assert np.array_equal(decode_half(found, "bf16", np.empty_like(rows)), nearest)


def test_what_is_too_large_for_half_precision_becomes_infinite_without_a_warning() -> None:
    rows = np.array([[65504.0, 65520.0, -1e30]], np.float32)
    assert decode_half(encode_half(rows, "f2"), "f2", np.empty_like(rows)).tolist() == [[65504.0, np.inf, -np.inf]]


def test_counters_stay_exact_whatever_the_network_format() -> None:
    counts = TableSpec("counts", 1, Optimizer(UpdateRule.ADD))
    assert [wire_of(counts, wire) for wire in ("f4", "f2", "bf16")] == ["f4"] * 3
    assert [wire_of(TableSpec("rows", 1), wire) for wire in ("f4", "f2", "bf16")] == ["f4", "f2", "bf16"]
