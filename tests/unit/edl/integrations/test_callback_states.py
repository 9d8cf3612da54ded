"""What callbacks of a model have counted survives a new beginning of the training."""

from __future__ import annotations

from typing import Any

from edl.integrations.callback_states import CallbackStates


class EarlyStopping:
    """Named as Paddle's: its counters are set back when a training begins."""

    def __init__(self) -> None:
        self.best_value, self.wait_epoch, self.stopped_epoch, self.patience = 9.0, 0, 0, 5


class Judge(EarlyStopping):
    """A script's own kind of it."""


class Counted:
    """A callback with a state of its own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Plain:
    """A callback that keeps nothing."""


class Model:
    stop_training = False


def test_counters_and_states_come_back() -> None:
    model, kept = Model(), [Judge(), Plain(), Counted()]
    states = CallbackStates(model)
    states.use(kept)
    kept[0].best_value, kept[0].wait_epoch, kept[2].count = 1.5, 2, 7  # type: ignore[attr-defined]
    model.stop_training = True
    saved = states.state_dict()
    assert saved == {
        "stop": True,
        "callbacks": {
            "0 Judge": {"best_value": 1.5, "wait_epoch": 2, "stopped_epoch": 0}, "2 Counted": {"count": 7},
        },
    }  # fmt: skip

    model, fresh = Model(), [Judge(), Plain(), Counted()]
    restored = CallbackStates(model)
    restored.load_state_dict(saved)
    assert restored.state_dict() == saved, "nothing is lost before the training has begun"
    restored.use(fresh)
    restored.restore()
    assert (fresh[0].best_value, fresh[0].wait_epoch, fresh[2].count) == (1.5, 2, 7)  # type: ignore[attr-defined]
    assert model.stop_training
    assert restored.state_dict() == saved


def test_what_was_restored_is_given_once() -> None:
    states = CallbackStates(Model())
    one = Counted()
    states.use([one])
    states.load_state_dict({"stop": False, "callbacks": {"0 Counted": {"count": 3}}})
    states.restore()
    one.count = 4
    states.restore()
    assert one.count == 4


def test_a_callback_that_was_not_there_keeps_what_it_has() -> None:
    states = CallbackStates(Model())
    one = Counted()
    states.use([one])
    states.load_state_dict({"stop": False, "callbacks": {}})
    states.restore()
    assert one.count == 0
