"""The clock of training, against a list with one entry for each nanosecond."""

from __future__ import annotations

import random

import pytest

from edl.master.goodput.training_clock import MOST_MARKS, TrainingClock, TrainingWaits


@pytest.mark.parametrize("seed", range(300))
def test_a_rollback_costs_what_was_trained_since_the_commit(seed: int) -> None:
    rng = random.Random(seed)
    training = TrainingClock()
    line: list[int] = []
    """Slots that trained in each nanosecond of the present line."""
    made = {0: 0}
    """When each commit was."""
    commit = slots = 0
    for _ in range(rng.randint(5, 30)):
        match rng.choice(["begin", "train", "train", "commit", "commit", "roll back"]):
            case "begin":
                slots = rng.randint(1, 9)
                training = training.begin(commit, slots)
                made[commit] = len(line)
            case "train" if slots:
                duration_ns = rng.randint(1, 20)
                training = training.advance(duration_ns)
                line += [slots] * duration_ns
            case "commit" if slots:
                commit += rng.randint(1, 3)
                age_ns = rng.randint(0, min(5, len(line) - max(made.values())))
                training = training.mark(commit, age_ns)
                made[commit] = len(line) - age_ns
            case "roll back" if slots:
                commit = rng.choice(list(made))
                lost = line[made[commit] :]
                training, spent, _ = training.roll_back(commit)
                assert spent == sum(lost)
                del line[made[commit] :]
                made = {number: at for number, at in made.items() if number <= commit}
                slots = rng.randint(1, 9)
                training = training.begin(commit, slots)
                made[commit] = len(line)
        assert training.clock_ns == len(line)


def test_between_two_marks_steps_are_equally_long() -> None:
    training = TrainingClock().begin(0, 2).advance(100).mark(10, 0).advance(100)
    assert training.made_ns(3) == 30
    assert training.made_ns(12) == 200  # how long a step takes is not known
    assert training.mark(10, 0, step_ns=15).made_ns(12) == 130
    assert training.mark(10, 0, step_ns=15).made_ns(99) == 200


def test_a_commit_before_all_that_is_known_costs_all_that_is_known() -> None:
    training = TrainingClock().begin(50, 2).advance(100)
    assert training.roll_back(20)[1] == 200


def test_waits_count_where_they_were() -> None:
    training = TrainingClock().begin(0, 2).advance(100).mark(10, 40).wait(100, TrainingWaits(50, 20)).advance(100)
    assert training.waits_until(60) == TrainingWaits(30, 12)
    assert training.mark(20, 70).marks[-1].waits == TrainingWaits(40, 16), "half of the rest"
    back, spent, lost = training.roll_back(10)
    assert (spent, lost, back.waits) == (2 * 140, TrainingWaits(20, 8), TrainingWaits(30, 12))
    again = back.begin(10, 1).advance(5).wait(1000, TrainingWaits(3, 1))
    assert again.roll_back(10)[2] == TrainingWaits(3, 1), "the present world has trained for a part of that time only"
    assert training.roll_back(0)[1:] == (2 * 200, TrainingWaits(50, 20))


def test_its_size_is_bounded() -> None:
    training = TrainingClock()
    for commit in range(10 * MOST_MARKS):
        training = training.begin(commit, 3).advance(10).mark(commit + 1, 0)
    assert len(training.marks) <= MOST_MARKS
    assert len(training.stretches) <= MOST_MARKS
    assert training.roll_back(10 * MOST_MARKS - 1)[1] == 30
    assert training.roll_back(0)[1] == training.clock_ns * 3
