"""Tensors put together from the pieces of several workers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.checkpoint.reading.assembly import (
    LOCAL,
    OFFSET,
    SHAPE,
    Box,
    Missing,
    Spread,
    StoredArray,
    Whole,
    holds_tensor_parts,
    merged,
    runs,
)
from edl.checkpoint.reading.saved_parts import ReadRequest, byte_ranges
from edl.errors import CheckpointError
from edl.wire.snapshot import Entry


def stored(shape: tuple[int, ...], shard: int = 0, dtype: str = "U8") -> StoredArray:
    return StoredArray(shard, "x", Entry(dtype, shape, 0, math.prod(shape)))


def spread(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Spread:
    pieces = tuple((Box(*box), stored(box[1], shard)) for shard, box in enumerate(boxes))
    return Spread("x", "U8", shape, pieces)


def grids(shape: tuple[int, ...], cuts: list[list[int]]) -> list[Box]:
    """All cells when each dimension is cut at these places."""
    edges = [sorted({0, length, *(at for at in one if at < length)}) for one, length in zip(cuts, shape, strict=True)]
    axes = [list(itertools.pairwise(one)) or [(0, 0)] for one in edges]
    return [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*axes)]


@given(st.data())
def test_any_part_comes_from_any_division_into_boxes(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    cuts = [data.draw(st.lists(st.integers(1, 4), max_size=2)) for _ in shape]
    offset = tuple(data.draw(st.integers(0, length)) for length in shape)
    wanted = Box(offset, tuple(data.draw(st.integers(0, n - at)) for n, at in zip(shape, offset, strict=True)))
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]

    def values(box: Box) -> bytes:
        places = itertools.product(*(range(at, at + n) for at, n in zip(box.offset, box.shape, strict=True)))
        return bytes(sum(i * s for i, s in zip(place, strides, strict=True)) % 251 for place in places)

    pieces = tuple((box, stored(box.shape, shard)) for shard, box in enumerate(grids(shape, cuts)))
    want, memory = ReadRequest.part_of(Spread("x", "U8", shape, pieces), wanted)
    boxes = {one.shard: box for box, one in pieces}
    for one, read in byte_ranges(want, lambda shard: 0):
        read.take(memoryview(values(boxes[one.shard]))[read.start : read.start + read.size])
    assert bytes(memory) == values(wanted)


@given(st.data())
def test_what_is_contiguous_in_both_boxes_is_one_run(data: st.DataObject) -> None:
    """A read or a copy for each element, or for each row, would take minutes for a large state."""
    lengths = st.lists(st.tuples(*[st.integers(0, 2)] * 4, st.integers(1, 3)), max_size=4)
    dims = data.draw(lengths)  # in each: space before and behind in two boxes, and the length of what they share
    inner = Box(tuple(max(a, b) for a, _, b, _, _ in dims), tuple(n for *_, n in dims))
    edges = list(zip(dims, inner.offset, strict=True))
    boxes = [Box(tuple(at - d[k] for d, at in edges), tuple(d[k] + d[4] + d[k + 1] for d, _ in edges)) for k in (0, 2)]
    shared = list(itertools.product(*(range(at, at + n) for at, n in zip(inner.offset, inner.shape, strict=True))))
    numbers = [[number_in(box, place) for place in shared] for box in boxes]
    starts = [
        n for n in range(len(shared)) if n == 0 or any(one[n] != one[n - 1] + 1 for one in numbers)
    ]  # where either box has a gap
    expected = [[(one[a], b - a) for a, b in itertools.pairwise([*starts, len(shared)])] for one in numbers]
    assert [list(runs(one, inner, other)) for one, other in (boxes, reversed(boxes))] == expected


def number_in(box: Box, place: tuple[int, ...]) -> int:
    """The number of an element in a box, if its elements are counted row by row."""
    number = 0
    for at, begin, length in zip(place, box.offset, box.shape, strict=True):
        number = number * length + at - begin
    return number


def test_what_nobody_has_is_missing() -> None:
    with pytest.raises(Missing, match=r"no worker has saved all of x at offset \(0,\)"):
        spread((4,), ((0,), (1,)), ((2,), (2,))).covering(Box((0,), (4,)))


def test_copies_of_a_piece_are_read_once_and_pieces_that_overlap_are_damage() -> None:
    twice = spread((4,), ((0,), (2,)), ((0,), (2,)), ((2,), (2,)))
    assert [one.shard for _, one in twice.covering(twice.box)] == [0, 2]
    with pytest.raises(CheckpointError, match="pieces of x overlap"):
        spread((4,), ((0,), (3,)), ((1,), (3,))).covering(Box((0,), (4,)))


def cut(shape: list[int], offset: list[int], own: tuple[int, ...], shard: int) -> dict[str, object]:
    return {LOCAL: stored(own, shard), SHAPE: shape, OFFSET: offset}


def test_cut_tensors_come_from_all_and_the_rest_from_the_first() -> None:
    parts = [
        {"w": cut([4, 2], [2 * shard, 0], (2, 2), shard), "b": stored((3,), shard), "step": shard, "list": [shard]}
        for shard in range(2)
    ]
    found = merged(parts, union=False)
    assert [box.offset for box, _ in found["w"].pieces] == [(0, 0), (2, 0)]
    assert found["w"].name == "w"
    assert isinstance(found["b"], Whole) and [one.shard for one in found["b"].copies] == [0, 1]
    assert (found["step"], found["list"]) == (0, [0])


def test_stages_of_a_pipeline_are_united() -> None:
    parts = [{"first": stored((1,), 0)}, {"second": stored((1,), 1)}]
    assert list(merged(parts, union=True)) == ["first", "second"]
    assert list(merged(parts, union=False)) == ["first"]


@pytest.mark.parametrize("other", [None, 3, [1], (1,), {"x": 1}, {}])
def test_a_worker_that_has_something_else_there_is_passed_over(other: object) -> None:
    """What the first worker saved says what it is; another may have nothing there yet, or something of another kind."""
    array, part, nested = stored((2,)), cut([2], [0], (2,), 0), {"w": stored((2,))}
    for union in (False, True):
        assert merged([array, other, stored((2,), 2)], union=union) == Whole((array, stored((2,), 2)))
        assert merged([part, other], union=union).pieces == spread((2,), ((0,), (2,))).pieces
        assert merged([{"w": part}, part], union=union)["w"] == dataclasses.replace(
            merged([part], union=union), name="w"
        )
        assert merged([nested, other], union=union)["w"] == Whole((nested["w"],))
        assert merged([[array, array], other], union=union) == [Whole((array,))] * 2


@pytest.mark.parametrize(
    "part",
    [
        cut([4], [3], (2,), 0),
        cut([4, 4], [0, 3], (2, 2), 0),
        {LOCAL: stored((2,)), SHAPE: 4, OFFSET: [0]},
        cut([4], [-1], (2,), 0),
        cut([4, 4], [0], (2,), 0),
        {LOCAL: stored((2,)), SHAPE: [4]},
        {LOCAL: 7, SHAPE: [4], OFFSET: [0]},
        {LOCAL: stored((2,)), SHAPE: ["4"], OFFSET: [0]},
    ],
)
def test_a_piece_that_is_nowhere_in_the_tensor(part: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="does not fit into shape"):
        merged([{"w": part}], union=False)


def test_tensors_of_other_shapes_under_one_name() -> None:
    parts = [{"w": cut([4], [0], (2,), 0)}, {"w": cut([6], [2], (2,), 1)}]
    with pytest.raises(CheckpointError, match="only be read by a world of the size that wrote it"):
        merged(parts, union=True)


# --- overlaps --------------------------------------------------------------------------------------------------------


def covering_of_all_pairs(source: Spread, wanted: Box) -> list[tuple[Box, StoredArray]]:
    """Reference for ``Spread.covering``: compares each pair of pieces."""
    found: dict[Box, StoredArray] = {}
    for box, one in source.pieces:
        if box not in found and box.meet(wanted) is not None:
            found[box] = one
    if any(a.meet(b) is not None for a, b in itertools.combinations(found, 2)):
        raise CheckpointError(f"damaged: pieces of {source.name} overlap")
    met = [box.meet(wanted) for box in found]
    if sum(box.volume for box in met if box is not None) != wanted.volume:
        raise Missing(f"no worker has saved all of {source.name} at offset {wanted.offset} of shape {wanted.shape}")
    return list(found.items())


def outcome(covering: Callable[[Box], object], wanted: Box) -> object:
    try:
        return covering(wanted)
    except CheckpointError as error:
        return type(error), str(error)


@given(st.data())
def test_a_sweep_finds_what_all_pairs_show(data: st.DataObject) -> None:
    """Of divisions, and of boxes some of which overlap, are there twice, are empty or are missing."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))

    def boxes() -> st.SearchStrategy[Box]:
        edges = st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape))
        return edges.map(lambda cell: Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)))

    cells = grids(shape, [data.draw(st.lists(st.integers(1, 4), max_size=3)) for _ in shape])
    kept = data.draw(st.lists(st.sampled_from(cells), max_size=3)) if data.draw(st.booleans()) else cells
    mixed = data.draw(st.permutations([*kept, *data.draw(st.lists(boxes(), max_size=3))]))
    source = Spread("x", "U8", shape, tuple((box, stored(box.shape, shard)) for shard, box in enumerate(mixed)))
    for wanted in (source.box, data.draw(boxes())):
        assert outcome(source.covering, wanted) == outcome(partial(covering_of_all_pairs, source), wanted)


@pytest.mark.parametrize("dim", [0, 1])
def test_many_slices_are_not_all_held_against_each_other(monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    workers, met = 256, 0
    meet = Box.meet

    def counted(one: Box, other: Box) -> Box | None:
        nonlocal met
        met += 1
        return meet(one, other)

    monkeypatch.setattr(Box, "meet", counted)
    shape = (workers, 8) if dim == 0 else (8, workers)
    boxes = [((n, 0), (1, 8)) if dim == 0 else ((0, n), (8, 1)) for n in range(workers)]
    source = spread(shape, *reversed(boxes))
    assert [one.shard for _, one in source.covering(source.box)] == list(range(workers))
    assert met <= 3 * workers


def test_containers_stay_what_they_are_and_a_deque_is_looked_into() -> None:
    one = StoredArray(0, "x", Entry("U8", (1,), 0, 1))
    other = StoredArray(1, "x", Entry("U8", (1,), 0, 1))
    cut = [{LOCAL: one, SHAPE: [2], OFFSET: [0]}, {LOCAL: other, SHAPE: [2], OFFSET: [1]}]
    found = merged(
        [
            {
                "queue": deque([part, cut[number]], 4),
                "default": defaultdict(int, {"a": part}),
                "ordered": OrderedDict([("b", 1)]),
                "counter": Counter(c=1),
            }
            for number, part in enumerate([one, other])
        ],
        union=True,
    )
    assert type(found["queue"]) is deque and found["queue"].maxlen == 4
    assert found["queue"][0] == Whole((one, other)) and found["queue"][1].shape == (2,)
    assert type(found["default"]) is defaultdict and found["default"].default_factory is int
    assert found["default"]["a"] == Whole((one, other))
    assert (type(found["ordered"]), type(found["counter"])) == (OrderedDict, Counter)
    assert holds_tensor_parts({"step": 1, "model": [{"w": cut[0], "b": one}, 2]})
    assert holds_tensor_parts(deque([cut[0]])) and not holds_tensor_parts(deque([one]))
