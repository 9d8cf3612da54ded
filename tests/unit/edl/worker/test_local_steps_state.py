"""Outer steps in a ``State``, under ``run``: votes, faults, refused commits."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from edl.arithmetic.outer_step import OuterRule
from edl.errors import StateError
from edl.wire import local
from edl.worker.local_steps import OuterSteps
from edl.worker.state import BaseState
from tests.support.fake_agent import TIMEOUT_S, Barriers
from tests.unit.edl.worker.test_local_steps import Vector
from tests.unit.edl.worker.test_loop import Trainer, heard, seat_all, underway

EVERY = 3


class Kept(Vector):
    """A model for a ``State``, which uses the group of its worker's round."""

    trainer: Trainer

    def state_dict(self) -> dict[str, Any]:
        return {"x": self.x, "buffer": self.buffer}

    def load_state_dict(self, plain: dict[str, Any]) -> None:
        self.set((plain["x"], plain["buffer"]))

    @property
    def workers(self) -> int:
        return self.trainer.framework.groups[-1].seat.world_size

    def exchange(self, data: bytes) -> list[bytes]:
        return self.trainer.framework.exchange(data)

    def gathered(self, array: Any) -> list[Any]:
        return [np.array(json.loads(part), np.float32) for part in self.exchange(json.dumps(array.tolist()).encode())]

    def send_from_first(self) -> None:
        self.x[:] = self.gathered(self.x)[0]

    def sum_over_workers(self, arrays: list[Any], wire: str) -> list[Any]:
        return [np.sum(self.gathered(one), 0, dtype=np.float32) for one in arrays]


class Local(Trainer):
    """Makes inner steps of 1 and commits at outer steps."""

    def __init__(self, barriers: Barriers, outer: int, votes: Callable[[int], bool]) -> None:
        super().__init__(barriers, outer)
        self.vector = Kept([0.0])
        self.vector.trainer = self
        self.outer = OuterSteps(self.vector, EVERY, OuterRule(0.7, 0.9), "", True, lambda: self.worker.session)
        self.state = BaseState(self.framework, {"outer": self.outer, "model": self.vector, "step": 0})
        self.votes = votes
        self.seen: list[tuple[int, float]] = []
        self.at_step: Callable[[int], None] = lambda inner_steps: None

    def train(self, state: BaseState) -> str:
        self.vector.rank = self.framework.groups[-1].seat.rank
        while self.outer.outer_steps < self.steps:
            self.vector.x += 1
            self.at_step(self.outer.inner_steps)
            if self.outer.step():
                state.step += 1
                if state.commit(ok=self.votes(state.commits + 1)):
                    self.seen.append((self.outer.outer_steps, self.vector.x.item()))
        return "trained"


@pytest.fixture
def make() -> Iterator[Callable[..., list[Local]]]:
    made: list[Local] = []
    barriers = Barriers()

    def start(count: int, outer: int = 4, votes: Callable[[int], bool] = lambda commit: True) -> list[Local]:
        new = [Local(barriers, outer, votes) for _ in range(count)]
        made.extend(new)
        for one in new:
            one.start()
            one.until(local.Enter)
        return new

    yield start
    for one in made:
        one.worker.close()


def undisturbed(outer: int) -> list[tuple[int, float]]:
    """All workers change by EVERY in each outer step, so that is the average."""
    x, velocity, found = 0.0, 0.0, []
    for number in range(1, outer + 1):
        velocity = 0.9 * velocity - EVERY
        x -= 0.7 * (-EVERY + 0.9 * velocity)
        found.append((number, x))
    return found


def check(seen: Sequence[tuple[int, float]], expected: Sequence[tuple[int, float]]) -> None:
    assert [number for number, _ in seen] == [number for number, _ in expected]
    assert [x for _, x in seen] == pytest.approx([x for _, x in expected], rel=1e-6)


def test_commits_at_outer_steps(make: Any) -> None:
    members = make(2)
    seat_all(members, 1)
    underway(members, 1)
    for one in members:
        assert one.worker.join() == "trained"
        check(one.seen, undisturbed(4))
        assert heard([one], (1, 4))


@pytest.mark.parametrize("against", [1, 3])
def test_a_vote_against_an_outer_step_makes_it_again(make: Any, against: int) -> None:
    members = make(2)
    for one in members:
        left = [against]
        one.votes = lambda commit, left=left: commit not in left or bool(left.clear())
    seat_all(members, 1)
    for one in members:
        assert one.worker.join() == "trained"
        check(one.seen, undisturbed(4))
        assert one.outer.inner_steps == 4 * EVERY


def test_a_survivor_takes_its_inner_steps_into_the_next_world(make: Any) -> None:
    survivor, lost = members = make(2)
    died, noticed = threading.Event(), threading.Event()

    def survive(inner_steps: int) -> None:
        if inner_steps == 7 and not noticed.is_set():
            noticed.set()
            assert died.wait(TIMEOUT_S), "before that it may still be leaving the last collective"
            survivor.agent.send(local.Break(1, "the other worker is gone"))
            link = survivor.worker.session.link
            assert link is not None
            assert link.wait_until_broken(1, TIMEOUT_S)

    def die(inner_steps: int) -> None:
        if inner_steps == 6:
            died.set()
            raise KeyboardInterrupt

    survivor.at_step, lost.at_step = survive, die
    seat_all(members, 1)
    underway(members, 1)
    with pytest.raises(KeyboardInterrupt):
        lost.worker.join()
    assert heard([survivor], (1, 2))
    (new,) = make(1)
    seat_all([survivor, new], 2, restore=(1, 2))
    for one in (survivor, new):
        assert one.worker.join() == "trained"
    # The third outer step: three inner steps of the survivor, two of them in the first world, and one of the new
    # worker, so that the average is (3/4) 3 + (1/4) 1.
    velocity = 0.9 * (0.9 * -3 - 3) - 2.5
    third = undisturbed(2)[1][1] - 0.7 * (-2.5 + 0.9 * velocity)
    assert survivor.seen[2] == (3, pytest.approx(third, rel=1e-6))
    assert new.seen[0] == (3, pytest.approx(third, rel=1e-6))
    assert survivor.outer.inner_steps == new.outer.inner_steps == 4 * EVERY


@pytest.mark.parametrize("method", ["commit", "save"])
def test_a_commit_between_outer_steps_is_refused(make: Any, method: str) -> None:
    (one,) = make(1)

    def commit(inner_steps: int) -> None:
        if inner_steps == 4:
            getattr(one.state, method)()

    one.at_step = commit
    seat_all([one], 1)
    with pytest.raises(StateError, match=r"commit\(\) or save\(\) after 1 of 3 inner steps"):
        one.worker.join()


def test_train_may_not_return_between_outer_steps(make: Any) -> None:
    (one,) = make(1)

    def end(inner_steps: int) -> None:
        if inner_steps == 4:
            one.steps = 0

    one.at_step = end
    seat_all([one], 1)
    with pytest.raises(StateError, match="train returned after 2 of 3 inner steps"):
        one.worker.join()


def test_local_steps_of_a_sharded_state_are_refused(make: Any) -> None:
    (one,) = make(1)
    one.state._sharded = True
    seat_all([one], 1)
    with pytest.raises(StateError, match="local steps need the whole model on each worker"):
        one.worker.join()
