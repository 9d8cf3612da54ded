"""Which log files go: the oldest, never one that is written into."""

from __future__ import annotations

import random

from edl.agent.workers.log_retention import LEAST_PART_BYTES, LogPieces, part_bytes

KB = 1000


def pieces(rounds: int = 0, most_bytes: int = 0, *names: str, size: int = KB) -> LogPieces:
    made = LogPieces(rounds, most_bytes)
    for name in names:
        made.grow(name, size)
    return made


def test_without_limits_everything_stays() -> None:
    made = pieces(0, 0, *"abcdef", size=1 << 40)
    made.found({"old": 1 << 40})
    assert made.surplus(()) == []


def test_of_many_rounds_the_first_and_the_newest_stay() -> None:
    made = pieces(3, 0, *"abcdef")
    assert made.surplus(()) == ["b", "c", "d"]
    assert made.surplus(()) == []


def test_rounds_that_are_written_into_stay() -> None:
    made = pieces(3, 0, *"abcdef")
    assert made.surplus({"b", "c"}) == ["d", "e"]


def test_of_many_launches_the_newest_stay() -> None:
    made = pieces(2, 0, "a")
    made.found({"1": KB, "2": KB, "3": KB, "4": KB})
    assert made.surplus(()) == ["1", "2"]


def test_what_is_too_large_loses_the_oldest_first_launches_before_rounds() -> None:
    made = pieces(0, 5 * KB, *"abcd")
    made.found({"1": KB, "2": KB, "3": KB})
    assert made.surplus(()) == ["1", "2"]
    made.grow("d", 2 * KB)
    assert made.surplus(()) == ["3", "b"]
    assert made.surplus(()) == []


def test_of_one_long_round_the_oldest_parts_go() -> None:
    made = LogPieces(0, 4 * KB)
    for number in range(6):
        too_much = made.grow("a", KB)
        assert too_much == (number >= 4)
        if number < 5:
            made.part("a", f"part {number}", KB)
    assert made.surplus({"a"}) == ["part 0", "part 1"]


def test_a_round_goes_with_its_parts() -> None:
    made = pieces(0, 3 * KB, *"abc")
    made.part("b", "part of b", KB)
    made.grow("c", 2 * KB)
    assert made.surplus(()) == ["b"]
    assert made.surplus(()) == []
    made.grow("c", KB)
    assert made.surplus(()) == [], "there is nothing left that may go"


def test_what_is_written_into_is_a_part_of_the_whole_whatever_the_number_of_workers() -> None:
    for workers in (1, 8, 64):
        assert part_bytes(10 << 30, workers) * 2 * workers <= (10 << 30) // 4
    assert part_bytes(1, 1) == LEAST_PART_BYTES
    assert part_bytes(0, 8) == 0


def test_what_nothing_was_written_to_for_long_goes() -> None:
    made = LogPieces(0, 0, most_age_s=100.0)
    for number, name in enumerate("abcd"):
        made.grow(name, KB, 10.0 * number)
    made.found({"1": KB, "2": KB, "3": KB}, {"1": 0.0, "2": 30.0, "3": 500.0})
    assert made.surplus((), 100.0) == []
    assert made.surplus({"c"}, 125.0) == ["1", "b"], "the first round, the newest and those that are written to stay"
    made.grow("c", KB, 126.0)
    assert made.surplus((), 200.0) == ["2"]


def test_old_parts_go_and_a_round_goes_with_its_parts() -> None:
    made = LogPieces(0, 0, most_age_s=100.0)
    for name in "abc":
        made.grow(name, KB, 1.0)
        made.part(name, f"part of {name}", KB)
    made.grow("c", KB, 90.0)
    assert made.surplus((), 150.0) == ["part of a", "b", "part of c"]
    assert made.surplus((), 150.0) == []


def test_seeded_pieces_by_age_against_the_rule() -> None:
    for seed in range(2000):
        draw = random.Random(seed)
        made, times = LogPieces(0, 0, most_age_s=50.0), dict[str, float]()
        for now_s in sorted(draw.random() * 200 for _ in range(draw.randrange(1, 30))):
            name = f"round {draw.randrange(8)}"
            made.grow(name, KB, now_s)
            times[name] = now_s
        order = list(dict.fromkeys(times))
        launches = {f"launch {number}": draw.random() * 200 for number in range(draw.randrange(5))}
        made.found(dict.fromkeys(launches, KB), launches)
        busy = {name for name in times if draw.random() < 0.2}
        old = [name for name, written_s in launches.items() if written_s < 150]
        kept = {*busy, order[0], order[-1]}
        assert made.surplus(busy, 200.0) == old + [name for name in order if name not in kept and times[name] < 150]
