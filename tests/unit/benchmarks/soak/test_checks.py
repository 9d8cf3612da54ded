"""What the soak calls wrong, in lines that workers write."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.soak.checks import StepCheck, StepLine, committed, miscounted, two_leaders

LOSSES = [1.0 / (step + 1) for step in range(200)]


def world(number: int, steps: range, begin_s: float, ranks: int = 3) -> list[StepLine]:
    """All lines of one round."""
    return [
        StepLine(
            begin_s + at * 0.1 + rank * 0.01, step, rank, ranks, number, 100 * number + rank, "abc"[rank],
            LOSSES[step - 1] * (1 + 1e-9 * rank),
        )
        for at, step in enumerate(steps)
        for rank in range(ranks)
    ]  # fmt: skip


def checked(lines: list[StepLine], redone_allowed: int = 1) -> StepCheck:
    check = StepCheck(redone_allowed, LOSSES)
    for line in sorted(lines, key=lambda line: line.t):
        check.take(line)
    return check


GOOD = [*world(1, range(1, 11), 0.0), *world(2, range(10, 21), 5.0, ranks=2), *world(3, range(21, 31), 9.0)]


def test_worlds_that_follow_each_other_are_good() -> None:
    check = checked(GOOD)
    assert check.wrong == [] and (check.last, check.redone, check.rounds) == (30, 1, 3)
    assert check.compared == len(GOOD)


def spoilt(**changes: Any) -> list[StepLine]:
    """The good lines with one of round 2 changed."""
    lines = list(GOOD)
    at = next(i for i, line in enumerate(lines) if (line.round, line.rank, line.step) == (2, 1, 15))
    fields = {name: getattr(lines[at], name) for name in StepLine.__slots__}
    lines[at] = StepLine(**{**fields, **changes})
    return lines


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loss": 0.5}, "without faults it is"),
        ({"loss": float("nan")}, "without faults it is"),
        ({"pid": 9}, "is two processes"),
        ({"world": 3}, "has 2 and 3 workers"),
        ({"step": 17}, "came where step 15 was due"),
    ],
)
def test_one_wrong_line_is_found(changes: dict[str, Any], text: str) -> None:
    assert text in checked(spoilt(**changes)).wrong[0]


def test_steps_left_out_and_steps_made_again_are_found_at_a_change() -> None:
    left_out = [*world(1, range(1, 11), 0.0), *world(2, range(12, 21), 5.0)]
    assert "although only 10 had been made" in checked(left_out).wrong[0]
    again = [*world(1, range(1, 11), 0.0), *world(2, range(8, 21), 5.0)]
    assert "repeats 3 steps, 1 are promised" in checked(again).wrong[0]
    assert checked(again, redone_allowed=3).wrong == []


def test_steps_of_a_single_worker_may_be_lost_with_it() -> None:
    begin = [*world(1, range(1, 11), 0.0), *world(2, range(11, 16), 5.0, ranks=1)]
    assert checked([*begin, *world(3, range(11, 21), 9.0)]).wrong == []
    assert checked([*begin, *world(3, range(10, 21), 9.0)]).wrong == []
    assert "repeats 7 steps, 6 are promised" in checked([*begin, *world(3, range(9, 21), 9.0)]).wrong[0]
    twice = [*begin, *world(3, range(12, 14), 7.0, ranks=1), *world(4, range(11, 21), 9.0)]
    assert checked(twice).wrong == []


def test_two_worlds_at_once_are_found_and_one_late_line_is_not() -> None:
    both = [*world(1, range(1, 40), 0.0), *world(2, range(10, 40), 1.0)]
    assert "although round 2 had begun" in checked(both).wrong[-1]
    late = StepLine(9.5, 10, 0, 3, 1, 100, "a", LOSSES[9])
    lines = [line for line in GOOD if (line.round, line.rank, line.step) != (1, 0, 10)]
    assert checked([*lines, late]).wrong == []


def test_any_single_change_of_a_good_course_is_found() -> None:
    draw = random.Random(3)
    for _ in range(300):
        lines = list(GOOD)
        at = draw.randrange(len(lines))
        fields = {name: getattr(lines[at], name) for name in StepLine.__slots__}
        what = draw.choice(("loss", "step", "world", "pid"))
        fields[what] = fields[what] * 2 + 7 if what != "step" else fields[what] + draw.choice((-3, 2, 5))
        lines[at] = StepLine(**fields)
        assert checked(lines).wrong, (at, what)


def test_losses_are_compared_when_the_undisturbed_run_has_come_to_them() -> None:
    known: list[float] = LOSSES[:5]
    check = StepCheck(1, known)
    for line in spoilt(loss=0.5):
        check.take(line)
    assert check.wrong == [] and check.uncompared
    known += LOSSES[5:]
    check.compare()
    assert len(check.wrong) == 1 and not check.uncompared


# --- records ---------------------------------------------------------------------------------------------------------


def told(era: int, commit: int, epoch: int, *records: int) -> dict[str, Any]:
    return {"era": era, "commit": commit, "epoch": epoch, "records": list(records)}


def began(era: int, from_era: int, from_commit: int) -> dict[str, Any]:
    return {"era": era, "from_era": from_era, "from_commit": from_commit}


LINES = [
    began(1, 0, 0), told(1, 1, 0, 0, 1), told(1, 1, 0, 2), told(1, 2, 0, 3), told(1, 3, 0, 4, 5),
    # Commit 3 of era 1 was lost: era 2 goes on from commit 2, and reads its records again.
    began(2, 1, 2), told(2, 3, 0, 5), told(2, 4, 0, 4), told(2, 5, 1, 0, 1, 2),
]  # fmt: skip


def test_only_commits_on_the_way_to_the_newest_one_count() -> None:
    found, missing = committed(LINES)
    assert missing == [] and {epoch: sorted(records) for epoch, records in found.items()} == {
        0: [0, 1, 2, 3, 4, 5],
        1: [0, 1, 2],
    }
    assert miscounted(found, 6, whole_epochs=1) == []
    assert miscounted(found, 6, whole_epochs=2) == ["epoch 1: 3 records were never counted, such as [3, 4, 5]"]


def test_a_record_twice_and_a_commit_without_lines_are_found() -> None:
    found, _ = committed([*LINES, told(2, 6, 1, 2, 3)])
    assert miscounted(found, 6, 0) == ["epoch 1: 1 records were counted more than once, such as [2]"]
    _, missing = committed([line for line in LINES if (line.get("era"), line.get("commit")) != (2, 3)])
    assert missing == ["nobody has written down commit 3 of era 2"]
    assert committed([]) == ({}, [])
    assert miscounted({}, 6, 1) == ["epoch 0 was not counted at all"]


# --- leaders ---------------------------------------------------------------------------------------------------------


def formed(number: int, term: int, **more: Any) -> dict[str, Any]:
    return {"kind": "round", "term": term, "body": {"round": number}, **more}


def test_a_round_with_two_leaders_is_found() -> None:
    lines = [formed(1, 4), formed(2, 4), formed(3, 9), formed(2, 9, copied=True), {"kind": "begin", "term": 9}]
    assert two_leaders(lines) == []
    assert two_leaders([*lines, formed(2, 9)]) == ["round 2 was formed by the Masters of terms [4, 9]"]
