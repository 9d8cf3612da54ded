"""Whether modules train and parameters are frozen, from one world to the next."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from edl.wire import local
from edl.worker.loop import make_run
from edl.worker.session import Session
from edl.worker.state import BaseState
from tests.support.fake_agent import Barriers, FakeFramework, Worker, begin
from tests.unit.edl.worker.test_loop import Trainer, agree, seat_all, underway


def test_models_are_set_up_as_at_first_in_each_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the process was interrupted in an evaluation."""
    one, layer = Trainer(Barriers()), SimpleNamespace(training=True)
    monkeypatch.setattr(BaseState, "_modes", lambda state: iter([("model", layer, "training")]))
    seen: dict[int, bool] = {}

    def evaluate(_: int) -> None:
        seen.setdefault(one.framework.groups[-1].seat.round, layer.training)
        layer.training = False

    one.before_step = evaluate
    with contextlib.closing(one.worker):
        one.start()
        one.until(local.Enter)
        seat_all([one], 1)
        underway([one], 1)
        target = agree([one], 1, hold=4)
        one.steps = target + 5
        seat_all([one], 2, restore=(1, target))
        underway([one], 2)
        one.worker.join()
    assert seen == {1: True, 2: True}


class Script:
    """A process whose model has a module and three parameters."""

    def __init__(self, trained: tuple[bool, ...] = (True, False, False), copy_every: int = 1) -> None:
        self.layer = SimpleNamespace(training=True)
        self.weights = [SimpleNamespace(requires_grad=one) for one in trained]
        self.state = BaseState(FakeFramework(), {"step": 0}, copy_every=copy_every)
        self.state._modes = self.modes  # type: ignore[method-assign]

    def modes(self) -> Any:
        yield "model.", self.layer, "training"
        yield from ((f"model.{number}", one, "requires_grad") for number, one in enumerate(self.weights))

    def run(self) -> None:
        self.state._model_modes.run(self.modes())

    def restore(self, worker: Worker) -> None:
        worker.session.state = None
        last = worker.agent.versions()[-1]
        begin(worker, self.state, restore_era=last[0], restore_commit=last[1])

    def train(self, *trained: bool) -> None:
        for weight, one in zip(self.weights, trained, strict=True):
            weight.requires_grad = one

    @property
    def trained(self) -> tuple[bool, ...]:
        return tuple(one.requires_grad for one in self.weights)


@pytest.mark.parametrize("survivor", [True, False])
def test_parameters_that_are_unfrozen_late_stay_so(survivor: bool) -> None:
    """Else the rest of the training would leave them as they are. What is changed after the commit is forgotten."""
    worker, first = Worker(), Script()
    with contextlib.closing(worker):
        first.run()
        begin(worker, first.state)
        first.state.commit()
        first.train(False, True, False)
        first.layer.training = False
        first.state.commit()
        worker.settle()
        first.train(True, False, True)
        next_one = first if survivor else Script()
        if not survivor:
            next_one.run()
        next_one.restore(worker)
        assert (next_one.trained, next_one.layer.training) == ((False, True, False), True)
        next_one.state.commit()
        worker.settle()
        third = Script((True, True, True))  # the script has been changed: so has what it does at first
        third.run()
        third.restore(worker)
        assert third.trained == (False, True, True)


def test_a_script_that_has_changed_nothing_may_be_set_up_in_another_way() -> None:
    worker, first, other = Worker(), Script((True, True, False)), Script((True, False, True))
    with contextlib.closing(worker):
        first.run()
        begin(worker, first.state)
        first.state.commit()
        worker.settle()
        other.run()
        other.restore(worker)
        assert other.trained == (True, False, True)
        assert dir(other.state) == dir(BaseState(FakeFramework(), {"step": 0}))


def test_what_a_later_function_has_changed_is_changed_when_the_process_is_there() -> None:
    """A new worker calls the functions that are finished again; the script unfreezes parameters in between."""
    worker, survivor, new = Worker(), Script(), Script()
    with contextlib.closing(worker):
        survivor.run()
        begin(worker, survivor.state)
        survivor.train(True, True, True)
        survivor.run()
        survivor.train(False, True, True)
        survivor.state.commit()
        worker.settle()
        new.run()
        new.restore(worker)
        assert new.trained == (True, False, False), "that the first function has"
        new.train(True, True, True)
        new.run()
        survivor.restore(worker)
        assert new.trained == survivor.trained == (False, True, True)


# --- votes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before_run", [True, False])
@pytest.mark.parametrize("copy_every", [1, 2, 10])
def test_a_vote_puts_parameters_back_as_they_were(copy_every: int, before_run: bool) -> None:
    """As in the last copied commit, or, if there is none, as the script had set them up before its first boundary,
    which it does not do again. Modules stay as they are: the script goes on."""
    worker, script = Worker(), Script(copy_every=copy_every)
    with contextlib.closing(worker):
        if before_run:
            script.train(False, True, False)
        script.run()
        begin(worker, script.state)
        script.train(False, True, False)
        script.layer.training = False
        for step in range(3):
            script.state.step = step + 1
            script.state.commit(ok=True)
        worker.settle()
        script.train(True, True, True)
        assert not script.state.commit(ok=False)
        assert (script.state.step, script.trained) == (3 // copy_every * copy_every, (False, True, False))
        assert not script.layer.training


def test_a_vote_against_the_first_commit_leaves_what_the_script_has_set_up() -> None:
    worker, script = Worker(), Script()
    with contextlib.closing(worker):
        script.run()
        begin(worker, script.state)
        script.train(False, True, False)
        assert not script.state.commit(ok=False)
        assert script.trained == (False, True, False)
        assert script.state.commit(ok=True)


def test_changes_that_the_last_commit_holds_come_back() -> None:
    """And are in the next commit, from which a new process begins."""
    worker, script = Worker(), Script()
    with contextlib.closing(worker):
        script.run()
        begin(worker, script.state)
        script.state.commit(ok=True)
        script.train(False, True, False)
        script.state.commit(ok=True)
        worker.settle()
        script.train(True, False, False)  # as at ``run``
        assert not script.state.commit(ok=False)
        assert script.trained == (False, True, False)
        worker.agent.expect(local.TrainingStarted)
        script.state.commit(ok=True)
        worker.settle()
        new = Script()
        new.run()
        new.restore(worker)
        assert new.trained == (False, True, False)


def test_without_a_launcher_a_vote_puts_parameters_back_too() -> None:
    script = Script()

    def train(state: BaseState) -> None:
        script.train(False, True, False)
        state.commit(ok=True)
        script.train(True, True, True)
        state.commit(ok=False)

    run: Any = make_run(FakeFramework(), lambda: session)
    session = Session(None, {})
    run(train)(script.state)
    assert script.trained == (False, True, False)
