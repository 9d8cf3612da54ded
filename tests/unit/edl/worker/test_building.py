"""Objects that are built anew in each world."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from edl.errors import StateError
from edl.wire import local
from edl.worker.loop import make_run
from edl.worker.state import BaseState
from tests.support.fake_agent import FakeFramework, Model, Worker, begin


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def test_each_world_gets_objects_of_its_own_and_the_old_ones_are_gone_before(worker: Worker) -> None:
    alive: list[weakref.ref[Model]] = []

    def build() -> dict[str, Model]:
        gc.disable()  # whatever is gone was collected on purpose
        assert all(one() is None for one in alive), "two models at once"
        model = Model(2)
        model.itself = model  # type: ignore[attr-defined]
        alive.append(weakref.ref(model))
        return {"model": model}

    state = BaseState(FakeFramework(), {"step": 0, "told": []}, build=build)
    try:
        with pytest.raises(AttributeError, match="what build returns while train runs"):
            _ = state.model
        begin(worker, state)
        assert isinstance(state.model, Model)
        state.step, state.told = 5, [1, 2]
        begin(worker, state)
        assert len(alive) == 2
        assert (state.step, state.told, state.commits) == (0, [], 0), "this world begins from nothing, too"
    finally:
        gc.enable()


def test_what_build_makes_is_committed_and_restored(worker: Worker) -> None:
    state = BaseState(FakeFramework(), {"step": 0}, build=lambda: {"model": Model(2)})
    begin(worker, state)
    state.step = 3
    state.model.weight.data[:] = 7
    state.commit()
    worker.settle()
    begin(worker, state, restore_era=1, restore_commit=1)
    assert (state.model.weight.data == 7).all()
    assert (state.step, state.commits) == (3, 1)


class Position:
    """An object that is given to the state and outlives its worlds, such as a loader."""

    def __init__(self) -> None:
        self.taken = [0]

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class OfOneWorker(Position):
    edl_per_rank = True


def test_what_build_makes_may_belong_to_one_worker(worker: Worker) -> None:
    """A new process does not know of it before it builds."""

    def new_state() -> BaseState:
        return BaseState(FakeFramework(), {"step": 0}, build=lambda: {"position": OfOneWorker()})

    before, after = new_state(), new_state()
    begin(worker, before)
    before.position.taken[0] = 7
    before.commit()
    worker.settle()
    begin(worker, after, restore_era=1, restore_commit=1)
    assert after.position.taken == [7]


def test_a_world_that_begins_from_nothing_has_the_given_objects_as_the_script_gave_them(worker: Worker) -> None:
    position = Position()
    state = BaseState(FakeFramework(), {"position": position}, build=lambda: {"model": Model(2)})
    begin(worker, state)
    for _ in range(2):
        position.taken[0] = 7  # a step of a world that ended before its first commit
        begin(worker, state)
        assert position.taken == [0]


def test_a_process_that_came_to_a_restored_world_begins_from_nothing_as_any_other(worker: Worker) -> None:
    position = Position()
    state = BaseState(FakeFramework(), {"step": 0, "position": position}, build=lambda: {"model": Model(2)})
    begin(worker, state)
    state.step, position.taken[0] = 3, 3
    state.commit()
    worker.settle()

    late = BaseState(FakeFramework(), {"step": 0, "position": (other := Position())}, build=lambda: {"model": Model(2)})
    begin(worker, late, restore_era=1, restore_commit=1)
    assert (late.step, other.taken) == (3, [3])
    begin(worker, late)  # all parts are lost
    assert (late.step, other.taken) == (0, [0])


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ([Model(1)], "build returned a list; it must return a dict of objects by name"),
        ({"step": Model(1)}, "build returned 'step', which the State has already"),
        ({"rate": 0.5}, "build returned 'rate', a float: values are given to State"),
        ({"commit": Model(1)}, "this name is reserved"),
    ],
)
def test_a_result_that_a_state_cannot_keep(worker: Worker, result: Any, said: str) -> None:
    state = BaseState(FakeFramework(), {"step": 0}, build=lambda: result)
    with pytest.raises(StateError, match=said):
        begin(worker, state)


def test_only_sharded_states_without_build_need_new_processes() -> None:
    for sharded, build, rejoins in ((True, None, False), (True, lambda: {}, True), (False, None, True)):
        worker = Worker()
        framework = FakeFramework()
        run = make_run(framework, lambda worker=worker: worker.session)  # type: ignore[misc]
        state = BaseState(framework, {"step": 0}, sharded=sharded, build=build)
        worker.start(lambda run=run, state=state: run(lambda state: None)(state))  # type: ignore[misc]
        assert worker.agent.expect(local.Enter).rejoins == rejoins
        worker.close()
