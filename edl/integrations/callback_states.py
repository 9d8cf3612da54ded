"""What the callbacks of a ``paddle.Model`` have counted, as an object for ``State``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_COUNTERS = {
    "EarlyStopping": ("best_value", "wait_epoch", "stopped_epoch"),
    "ProgBarLogger": ("train_step",),
    "ReduceLROnPlateau": ("best", "cooldown_counter", "wait", "epoch"),
    "VisualDL": ("train_step",),
    "WandbCallback": ("train_step",),
}
"""The attributes of Paddle's own callbacks that ``on_train_begin`` sets back; in a new world it is called again."""


class CallbackStates:
    """The counters of Paddle's own callbacks, the ``state_dict`` of others that have one, and whether one of them has
    asked for the end of the training."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._callbacks: list[Any] = []
        self._restored: Mapping[str, Any] | None = None

    def use(self, callbacks: Iterable[Any]) -> None:
        """Keep the states of these callbacks, which this world's training has; in the same order in each world."""
        self._callbacks = list(callbacks)

    def restore(self) -> None:
        """Give the callbacks what was restored. Called when the training of this world has begun, so that nothing is
        set back after it."""
        restored, self._restored = self._restored, None
        if restored is None:
            return
        self._model.stop_training = restored["stop"]
        for name, callback in self._named():
            state = restored["callbacks"].get(name)
            if state is None:
                continue
            if _has_state(callback):
                callback.load_state_dict(state)
            else:
                vars(callback).update(state)

    def state_dict(self) -> dict[str, Any]:
        """Everything of this moment, between two steps."""
        if self._restored is not None:
            return dict(self._restored)
        found = {}
        for name, callback in self._named():
            if _has_state(callback):
                found[name] = callback.state_dict()
            elif counters := _counters(callback):
                found[name] = counters
        return {"stop": bool(self._model.stop_training), "callbacks": found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state until the callbacks are there."""
        self._restored = state

    def _named(self) -> list[tuple[str, Any]]:
        return [(f"{number} {type(one).__name__}", one) for number, one in enumerate(self._callbacks)]


def _has_state(callback: Any) -> bool:
    return hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")


def _counters(callback: Any) -> dict[str, Any]:
    names = [name for kind in type(callback).__mro__ for name in _COUNTERS.get(kind.__name__, ())]
    return {name: _plain(vars(callback)[name]) for name in names if name in vars(callback)}


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
