"""How parameters are cut into rows."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest

if importlib.util.find_spec("paddle") is None:
    pytest.skip("paddle is not installed", allow_module_level=True)

from edl.checkpoint.reading.assembly import Box
from edl.paddle import rows

pytestmark = pytest.mark.paddle
SHAPES = [(7, 3), (3,), (1,), (8,), (5, 2, 2), (), (0, 4), (4, 0), (2, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_the_rows_of_all_ranks_are_the_whole(shape: tuple[int, ...], size: int) -> None:
    whole = np.arange(math.prod(shape)).reshape(shape)
    boxes = [rows.cut(shape, rank, size) for rank in range(size)]
    parts = [
        whole[tuple(slice(at, at + count) for at, count in zip(box.offset, box.shape, strict=True))].reshape(-1)
        for box in boxes
        if box is not None
    ]
    assert np.concatenate([*parts, whole[:0].reshape(-1) if shape else whole.reshape(-1)[:0]]).tolist() == list(
        range(whole.size)
    )
    assert rows.counts(shape, size) == tuple(box.volume if box else 0 for box in boxes)
    assert all(box is None or box.volume for box in boxes)


def test_each_rank_has_as_many_rows_as_torch_would_give_it() -> None:
    assert [rows.cut((7, 3), rank, 4) for rank in range(4)] == [
        Box((0, 0), (2, 3)),
        Box((2, 0), (2, 3)),
        Box((4, 0), (2, 3)),
        Box((6, 0), (1, 3)),
    ]
    assert [rows.cut((5,), rank, 4) for rank in range(4)] == [Box((0,), (2,)), Box((2,), (2,)), Box((4,), (1,)), None]
    assert [rows.cut((), rank, 2) for rank in range(2)] == [Box((), ()), None]


def test_rows_of_a_rank_are_joined_contiguously() -> None:
    joined = rows.RowLayout((rows.counts((7, 3), 3), rows.counts((2,), 3), rows.counts((4,), 3)))
    assert joined.parts == [9 + 1 + 2, 9 + 1 + 2, 3]
    arrays = [np.arange(21), np.arange(100, 102), np.arange(200, 204)]
    flat = np.full(sum(joined.parts), -1)
    for run in joined.runs():
        assert (flat[run.here] == -1).all()
        flat[run.here] = arrays[run.number][run.there]
    assert flat.tolist() == [*range(9), 100, 200, 201, *range(9, 18), 101, 202, 203, *range(18, 21)]
