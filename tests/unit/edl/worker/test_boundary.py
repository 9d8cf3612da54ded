from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from edl.errors import StateError
from edl.wire.purpose import Purpose
from edl.wire.records import NO_SETTINGS, Settings
from edl.worker.boundary import BoundaryAction, StepBoundaries


def begun(commit: int = 0) -> StepBoundaries:
    boundary = StepBoundaries()
    boundary.begin(commit)
    return boundary


def test_nobody_asked() -> None:
    boundary = begun(5)
    assert [boundary.arrive(commit) for commit in (6, 7, 8)] == [BoundaryAction.PASS] * 3
    assert boundary.passed == 8


def test_a_target_further_on() -> None:
    boundary = begun(5)
    assert boundary.hold(1) == 5
    assert boundary.arrive(6) is BoundaryAction.WAIT
    assert boundary.passed == 5
    assert boundary.leaving == ""
    assert boundary.set_target(1, 8, Purpose.SWITCH, "node b joins")
    assert boundary.leaving == "node b joins"
    assert [boundary.arrive(commit) for commit in (6, 7, 8)] == [
        BoundaryAction.PASS,
        BoundaryAction.PASS,
        BoundaryAction.SWITCH,
    ]
    assert boundary.left
    assert boundary.arrive(9) is BoundaryAction.OVER


def test_save_and_go_on() -> None:
    boundary = begun()
    boundary.hold(1)
    boundary.set_target(1, 1, Purpose.SAVE, "asked for")
    assert boundary.leaving == ""
    assert [boundary.arrive(commit) for commit in (1, 2)] == [BoundaryAction.SAVE, BoundaryAction.PASS]


def test_a_later_hold_does_not_cancel_a_save() -> None:
    boundary = begun()
    boundary.hold(1)
    boundary.set_target(1, 3, Purpose.SAVE, "asked for")
    assert boundary.arrive(1) is BoundaryAction.PASS
    boundary.hold(2)
    assert boundary.arrive(2) is BoundaryAction.WAIT
    boundary.release(2)
    assert [boundary.arrive(commit) for commit in (2, 3, 4)] == [
        BoundaryAction.PASS,
        BoundaryAction.SAVE,
        BoundaryAction.PASS,
    ]


def test_a_save_is_not_due_in_the_next_round() -> None:
    boundary = begun()
    boundary.hold(1)
    boundary.set_target(1, 3, Purpose.SAVE, "asked for")
    boundary.end()
    boundary.begin(0)
    assert [boundary.arrive(commit) for commit in (1, 2, 3)] == [BoundaryAction.PASS] * 3


def test_a_commit_that_is_saved_and_left_at_is_written() -> None:
    boundary = begun()
    boundary.hold(1)
    boundary.set_target(1, 2, Purpose.SAVE, "asked for")
    boundary.arrive(1)
    boundary.hold(2)
    boundary.set_target(2, 2, Purpose.SWITCH, "node b joins")
    assert boundary.arrive(2) is BoundaryAction.KILL
    assert boundary.leaving == "node b joins"


def test_kill() -> None:
    boundary = begun()
    boundary.hold(1)
    boundary.set_target(1, 1, Purpose.KILL, "")
    assert boundary.leaving == "kill"
    assert boundary.arrive(1) is BoundaryAction.KILL


class TestSettings:
    def test_hold_from_the_agreed_commit_on(self) -> None:
        boundary = begun(5)
        boundary.hold(1)
        assert boundary.arrive(6) is BoundaryAction.WAIT
        boundary.set_settings(1, 7, Settings(1))
        assert boundary.leaving == ""
        assert [boundary.arrive(commit) for commit in (6, 7, 8)] == [
            BoundaryAction.PASS,
            BoundaryAction.SET,
            BoundaryAction.PASS,
        ]
        assert boundary.settings == Settings(1)

    def test_come_with_the_round(self) -> None:
        boundary = begun()
        boundary.set_settings(0, 3, Settings(1))
        boundary.begin(2, Settings(4))
        assert [boundary.arrive(3), boundary.settings] == [BoundaryAction.PASS, Settings(4)]

    def test_are_not_forgotten_when_something_else_is_asked(self) -> None:
        boundary = begun(5)
        boundary.hold(1)
        boundary.set_settings(1, 7, Settings(1))
        boundary.hold(2)
        boundary.set_settings(2, 8, Settings(2))
        boundary.hold(3)
        assert boundary.set_target(3, 7, Purpose.SAVE, "asked for")
        assert [(boundary.arrive(commit), boundary.settings.number) for commit in (6, 7, 8)] == [
            (BoundaryAction.PASS, 0),
            (BoundaryAction.SAVE, 1),
            (BoundaryAction.SET, 2),
        ]

    def test_a_repeated_order_only_lets_go(self) -> None:
        boundary = begun(5)
        boundary.hold(1)
        boundary.set_settings(1, 6, Settings(1))
        assert boundary.arrive(6) is BoundaryAction.SET
        boundary.hold(2)
        assert boundary.arrive(7) is BoundaryAction.WAIT
        boundary.set_settings(2, 6, Settings(1))
        assert boundary.arrive(7) is BoundaryAction.PASS

    def test_who_has_missed_them_does_not_go_on(self) -> None:
        boundary = begun(5)
        boundary.set_settings(0, 5, Settings(1))
        with pytest.raises(StateError, match="not reach this worker in time: settings 1 apply from commit 5 on"):
            boundary.arrive(6)
        boundary.begin(5, Settings(1))
        assert boundary.arrive(6) is BoundaryAction.PASS

    def test_do_not_matter_any_more_once_the_round_is_over(self) -> None:
        boundary = begun(5)
        boundary.end()
        boundary.set_settings(0, 3, Settings(1))
        assert boundary.arrive(6) is BoundaryAction.OVER
        assert boundary.settings == NO_SETTINGS


def test_release() -> None:
    boundary = begun()
    boundary.hold(1)
    assert boundary.arrive(1) is BoundaryAction.WAIT
    assert not boundary.release(2)
    assert boundary.arrive(1) is BoundaryAction.WAIT
    assert boundary.release(1)
    assert boundary.arrive(1) is BoundaryAction.PASS


def test_release_of_what_was_settled() -> None:
    boundary = begun()
    boundary.hold(1)
    boundary.set_target(1, 2, Purpose.SWITCH, "why")
    boundary.release(1)
    assert boundary.leaving == ""
    assert [boundary.arrive(commit) for commit in (1, 2, 3)] == [BoundaryAction.PASS] * 3


def test_a_new_hold_replaces_the_old_one() -> None:
    boundary = begun()
    boundary.hold(1)
    boundary.set_target(1, 3, Purpose.SWITCH, "why")
    boundary.hold(2)
    assert boundary.arrive(1) is BoundaryAction.WAIT
    assert not boundary.set_target(1, 2, Purpose.SWITCH, "late")
    assert boundary.set_target(2, 2, Purpose.SAVE, "now")
    assert [boundary.arrive(commit) for commit in (1, 2)] == [BoundaryAction.PASS, BoundaryAction.SAVE]


def test_a_target_that_comes_too_late_holds_nobody() -> None:
    boundary = begun()
    boundary.arrive(1)
    boundary.hold(1)
    assert not boundary.set_target(1, 1, Purpose.SWITCH, "late")
    assert boundary.arrive(2) is BoundaryAction.PASS


def test_a_target_nobody_asked_for() -> None:
    boundary = begun()
    assert not boundary.set_target(0, 1, Purpose.SWITCH, "why")
    assert boundary.arrive(1) is BoundaryAction.PASS


def test_a_break_wakes_who_holds() -> None:
    boundary = begun()
    boundary.hold(1)
    assert boundary.arrive(1) is BoundaryAction.WAIT
    boundary.set_target(1, 5, Purpose.SWITCH, "a node joins")
    boundary.end()
    assert boundary.leaving == ""
    assert boundary.arrive(1) is BoundaryAction.OVER
    assert boundary.passed == 0
    boundary.begin(4)
    assert boundary.arrive(5) is BoundaryAction.PASS


def test_stop_is_at_the_next_boundary() -> None:
    boundary = begun()
    boundary.hold(1)
    boundary.stop("the launcher leaves")
    boundary.set_target(1, 5, Purpose.SWITCH, "other")
    boundary.release(1)
    assert boundary.leaving == "the launcher leaves"
    assert boundary.arrive(1) is BoundaryAction.STOP
    assert boundary.leaving == "the launcher leaves"


def test_before_the_first_round_there_is_nothing_to_pass() -> None:
    assert StepBoundaries().arrive(1) is BoundaryAction.OVER


def test_who_never_commits_is_found_out() -> None:
    idle, busy = begun(3), begun(3)
    for commit in range(4, 30):
        busy.arrive(commit)
    for boundary in (idle, busy):
        boundary.hold(1)
        boundary.set_target(1, 30, Purpose.SWITCH, "why")
        boundary.end()
    assert (idle.missed, busy.missed) == (26, 0)
    idle.begin(30)
    assert idle.missed == 0


class Simulation:
    """Workers in lockstep with messages in flight, and a Master that holds, aims, releases and gives up at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.workers = [begun() for _ in range(self.random.randint(1, 4))]
        self.at = [1 for _ in self.workers]
        """The boundary before which each worker stands."""
        self.turns: list[list[BoundaryAction]] = [[] for _ in self.workers]
        self.inbox: list[deque[tuple[Any, ...]]] = [deque() for _ in self.workers]
        self.hold = 0
        self.answers: dict[int, int] = {}
        self.settled: dict[int, tuple[int, Purpose]] = {}
        self.held: list[list[int]] = [[] for _ in self.workers]

    def send(self, *message: Any) -> None:
        for box in self.inbox:
            box.append(message)

    def master(self) -> None:
        open_hold = self.hold and self.hold not in self.settled
        kind = self.random.random()
        if open_hold and len(self.answers) == len(self.workers):
            if kind < 0.8:
                target = max(self.answers.values()) + 1
                purpose = self.random.choice([one for one in Purpose if one is not Purpose.DATA])
                self.settled[self.hold] = (target, purpose)
                self.send("target", self.hold, target, purpose)
            else:
                self.give_up()
        elif open_hold and kind < 0.05:
            self.give_up()
        elif not open_hold or kind < 0.1:
            if self.pending():
                return
            self.hold += 1
            self.answers = {}
            self.send("hold", self.hold)

    def pending(self) -> bool:
        """True if the Master waits for a worker that has not reached the settled boundary."""
        target, purpose = self.settled.get(self.hold, (0, Purpose.SAVE))
        if purpose in (Purpose.SET, Purpose.SAVE):
            return False  # neither ends the round: whatever comes next, every worker does it
        return bool(target) and any(worker.passed < target for worker in self.workers)

    def give_up(self) -> None:
        self.settled[self.hold] = (0, Purpose.SAVE)
        self.send("release", self.hold)

    def hear(self, index: int) -> None:
        if not self.inbox[index]:
            return
        worker, message = self.workers[index], self.inbox[index].popleft()
        if message[0] == "hold":
            passed = worker.hold(message[1])
            if message[1] == self.hold:
                self.answers[index] = passed
        elif message[0] == "target" and message[3] is Purpose.SET:
            worker.set_settings(message[1], message[2], Settings(message[1]))
        elif message[0] == "target":
            assert worker.passed < message[2], "somebody had passed the target when it was set"
            assert worker.set_target(message[1], message[2], message[3], "why")
        else:
            worker.release(message[1])

    def train(self, index: int) -> None:
        worker, commit = self.workers[index], self.at[index]
        if worker.left or commit > min(self.at) + 1:
            return
        turn = worker.arrive(commit)
        if turn is not BoundaryAction.WAIT:
            self.turns[index].append(turn)
            self.held[index].append(worker.settings.number)
            self.at[index] += 1

    def run(self) -> None:
        for _ in range(self.random.randint(20, 200)):
            index = self.random.randrange(len(self.workers))
            kind = self.random.choices(("master", "hear", "train"), (1, 3, 3))[0]
            if kind == "master":
                self.master()
            else:
                (self.hear if kind == "hear" else self.train)(index)
            self.check()
        # From now on nothing new: everybody gets on, up to where the last agreement ends it.
        if self.hold and self.hold not in self.settled:
            self.give_up()
        before = [len(turns) for turns in self.turns]
        for _ in range(40):
            for index in range(len(self.workers)):
                self.hear(index)
                self.hear(index)
                self.train(index)
                self.check()
        stuck = [
            index
            for index, worker in enumerate(self.workers)
            if not worker.left and len(self.turns[index]) <= before[index]
        ]
        assert not stuck
        assert len({worker.left for worker in self.workers}) == 1
        if self.workers[0].left:
            assert len({tuple(turns) for turns in self.turns}) == 1

    def check(self) -> None:
        for number, turns in enumerate(zip(*self.turns, strict=False), 1):
            assert len(set(turns)) == 1, f"workers do different things at boundary {number}: {turns}"
        for number, held in enumerate(zip(*self.held, strict=False), 1):
            assert len(set(held)) == 1, f"workers go on from boundary {number} under settings {held}"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_random_interleavings(block: int) -> None:
    for seed in range(block * 600, block * 600 + 600):
        try:
            Simulation(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
