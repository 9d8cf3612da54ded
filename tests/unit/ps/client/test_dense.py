"""Named arrays in blocks, as rows of a dense table."""

from __future__ import annotations

import numpy as np
import pytest

from edl.errors import PsError, SettingError
from ps.client import dense
from tests.support.ps_fixture import SGD, Bench


def test_named_arrays_in_blocks() -> None:
    blocks = dense.DenseLayout({"a": (3, 5), "b": (), "c": (7,)}, dim=10)
    arrays = {"a": np.arange(15.0).reshape(3, 5), "b": np.float32(99), "c": np.arange(7)}
    rows = blocks.pack(arrays)
    assert rows.shape == (3, 10) and blocks.spec("d", SGD).rows == 3 and not rows[2, 3:].any()
    back = blocks.unpack(rows)
    assert all(
        np.array_equal(back[name], arrays[name]) and back[name].shape == np.shape(arrays[name]) for name in arrays
    )
    assert not blocks.unpack(blocks.pack({"b": np.float32(1)}))["a"].any()
    for wrong, text in (
        ({"d": 1}, "not among"),
        ({"a": np.zeros((5, 3))}, r"\(5, 3\), but was declared with \(3, 5\)"),
    ):
        with pytest.raises(PsError, match=text):
            blocks.pack(wrong)
    with pytest.raises(SettingError):
        dense.DenseLayout({})
    with pytest.raises(SettingError):
        dense.DenseLayout({"a": (3,)}, dim=2000)


def test_dense_parameters_are_those_of_the_first_trainer() -> None:
    blocks = dense.DenseLayout({"weight": (30, 40), "bias": (40,)}, dim=64)
    bench = Bench([blocks.spec("net", SGD)]).start(2)
    try:
        one, other = bench.client(), bench.client(number=2)
        values = {"weight": np.full((30, 40), 2.0), "bias": np.full(40, 3.0)}
        dense.first(one, "net", blocks, values)
        found = dense.first(other, "net", blocks, {"weight": np.zeros((30, 40)), "bias": np.zeros(40)})
        assert (found["weight"] == 2).all() and (found["bias"] == 3).all()
        other.push({"net": dense.part(blocks, {"bias": np.ones(40)})})
        found = dense.pull_dense(one, "net", blocks)
        assert (found["weight"] == 2).all() and (found["bias"] == 2).all()
    finally:
        bench.stop()
