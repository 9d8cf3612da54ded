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
