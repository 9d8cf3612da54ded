"""The position of a training loop with Accelerate, as an object for ``State``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COUNTS = ("global_batch", "epoch", "step_in_epoch", "step", "finished")


class LoopProgress:
    """How far a loop has come, and the state of the gradient scaler that each ``Accelerator`` creates anew."""

    def __init__(self) -> None:
        self.global_batch = 0
        """Samples of each step; 0 until training has begun."""
        self.epoch = 0
        self.step_in_epoch = 0
        """Steps of the current epoch before the next one."""
        self.step = 0
        """Steps of the whole training before the next one."""
        self.finished = False
        self._scaler: Any = None
        self._scaled: Mapping[str, Any] | None = None

    def use(self, scaler: Any) -> None:
        """Keep this scaler from now on, and restore it. None: there is none."""
        self._scaler = scaler
        if scaler is not None and self._scaled is not None:
            scaler.load_state_dict(dict(self._scaled))

    def state_dict(self) -> dict[str, Any]:
        """Everything of this moment, between two steps."""
        scaled = self._scaler.state_dict() if self._scaler is not None else self._scaled
        return {**{name: getattr(self, name) for name in _COUNTS}, "scaler": scaled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from these values."""
        for name in _COUNTS:
            setattr(self, name, state[name])
        self._scaler, self._scaled = None, state["scaler"]
