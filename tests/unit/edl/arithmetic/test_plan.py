"""Places of an epoch, dealt out to workers and logical ranks step by step."""

from __future__ import annotations

import random

import pytest

from edl.arithmetic.hyper import step_plan
from edl.arithmetic.plan import DROP, EXACT, PAD, TAILS, EpochPlan, Micro, dealt, split, stream, tail_end
from edl.wire.records import Settings


def taken(course: EpochPlan, position: int = 0) -> list[list[Micro]]:
    """The rest of the epoch as each worker takes it."""
    return [list(course.micros(position, rank)) for rank in range(course.world)]


def places(micros: list[Micro]) -> list[list[int]]:
    return [list(micro.places) if micro.real else [] for micro in micros]


def drawn(seed: int) -> tuple[EpochPlan, int, Settings, int]:
    """Any course, a position in it, and the settings and the batch size that it comes from."""
    draw = random.Random(seed)
    world = draw.randint(1, 7)
    logical = draw.choice((0, 0, draw.randint(world, 12)))
    size = draw.choice((0, (logical or 1) * draw.randint(1, 20)))
    settings = Settings(
        number=1, global_batch=size, local_batch=draw.choice((0, draw.randint(1, 9))), logical_ranks=logical
    )
    batch_size = draw.randint(1, 9)
    plan = step_plan(settings, batch_size, world)
    length = draw.randint(0, 150)
    course = EpochPlan(
        length, plan.global_batch, settings.local_batch or batch_size, world, draw.choice(TAILS), draw.random() < 0.3,
        logical, draw.random() < 0.5,
    )  # fmt: skip
    return course, draw.choice((0, draw.randint(0, length))), settings, batch_size


@pytest.mark.parametrize("total", range(12))
@pytest.mark.parametrize("parts", range(1, 7))
def test_split(total: int, parts: int) -> None:
    sizes = split(total, parts)
    assert sum(sizes) == total and len(sizes) == parts
    assert sorted(sizes, reverse=True) == list(sizes) and sizes[0] - sizes[-1] <= 1
    for blocks in (False, True):
        ranges = [dealt(100, 100 + total, part, parts, blocks) for part in range(parts)]
        assert tuple(map(len, ranges)) == sizes
        assert sorted(place for one in ranges for place in one) == list(range(100, 100 + total))


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (PAD, [[3, 6, 9], [4, 7, 10], [5, 8, 11]]),
        (DROP, [[3, 6], [4, 7], [5, 8]]),
        (EXACT, [[3, 6, 9], [4, 7], [5, 8]]),
    ],
)
def test_a_stream_without_steps(tail: str, expected: list[list[int]]) -> None:
    assert [list(stream(10, 3, part, 3, tail)) for part in range(3)] == expected
    assert tail_end(10, 10, 3, tail) == 10


def test_a_step_by_stride_and_in_blocks() -> None:
    assert [places(one) for one in taken(EpochPlan(8, 4, 2, 2))] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert [places(one) for one in taken(EpochPlan(8, 4, 2, 2, blocks=True))] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_uneven_parts_and_micro_batches() -> None:
    """10 over 4 workers are 3, 3, 2, 2; in micro-batches of at most 2 nobody needs a stand-in."""
    got = taken(EpochPlan(10, 10, 2, 4))
    assert [[len(micro.places) for micro in one] for one in got] == [[2, 1], [2, 1], [1, 1], [1, 1]]
    assert [micro.position for micro in got[0]] == [6, 10], "also the middle of a step is a position"


def test_an_uneven_last_step_has_stand_ins() -> None:
    got = taken(EpochPlan(5, 4, 2, 4, EXACT))
    assert [places(one)[-1] for one in got] == [[4], [], [], []]
    assert all(list(one[-1].places) == [4] for one in got), "a stand-in repeats what the first worker has"


def test_the_last_step_may_be_left_out() -> None:
    got = taken(EpochPlan(11, 4, 2, 2, EXACT, whole=True))
    assert sorted(place for one in got for part in places(one) for place in part) == list(range(8))
    assert got[0][-1].position == 11, "nothing more comes: that is the epoch's end"


def test_logical_ranks_take_the_same_wherever_they_live() -> None:
    def by_logical(world: int) -> dict[int, list[list[int]]]:
        found: dict[int, list[list[int]]] = {}
        for one in taken(EpochPlan(50, 24, 2, world, EXACT, logical=6)):
            for micro in one:
                if micro.logical >= 0:
                    found.setdefault(micro.logical, []).append(list(micro.places) if micro.real else [])
        return found

    assert all(by_logical(world) == by_logical(1) for world in range(2, 7))
    assert sorted(by_logical(1)) == list(range(6))


def test_a_worker_with_fewer_logical_ranks_has_stand_ins() -> None:
    got = taken(EpochPlan(12, 6, 2, 2, logical=3))
    assert [[micro.logical for micro in one[: one[0].count]] for one in got] == [[0, 1], [2, -1]]
    assert [micro.real for micro in got[1][:2]] == [True, False]


@pytest.mark.parametrize("part", range(10))
def test_any_course(part: int) -> None:
    for seed in range(part * 300, part * 300 + 300):
        course, position, settings, batch_size = drawn(seed)
        got = taken(course, position)
        check_all(course, position, got)
        if course.length - position >= course.size:
            plan = step_plan(settings, batch_size, course.world)
            for rank, one in enumerate(got):
                first = one[: one[0].count]
                assert tuple(len(micro.places) * micro.real for micro in first) == plan.sizes(rank)
                assert tuple(micro.logical for micro in first) == plan.logical(rank)


def check_all(course: EpochPlan, position: int, got: list[list[Micro]]) -> None:
    assert {len(one) for one in got} == {course.count(position)}
    all_places = sorted(place for one in got for part in places(one) for place in part)
    assert all_places == list(range(position, position + len(all_places))), "each place once, none left out"
    end, parts = position + len(all_places), course.logical or course.world
    if course.whole:
        assert len(all_places) % course.size == 0
    elif course.tail == EXACT:
        assert end == course.length
    else:
        assert abs(end - course.length) < parts and (end >= course.length) >= (course.tail == PAD)
    for together in zip(*got, strict=True):
        assert len({(one.position, one.index, one.count, one.begin, one.end) for one in together}) == 1
        assert all(1 <= len(one.places) <= course.most for one in together)
    if got[0]:
        assert got[0][-1].position == course.length
        assert [one.last for one in got[0]].count(True) == len({one.begin for one in got[0]})
