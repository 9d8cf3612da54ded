"""What Transformers' ``Trainer`` must remember besides model and optimizer, as an object for ``State``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput

_APART = ("log_history", "stateful_callbacks")
_SUMS = ("_total_loss_scalar", "_initial_global_step", "_globalstep_last_logged")
"""From these the trainer computes the mean loss of the whole training; the same on all ranks."""


class TrainerProgress:
    """The position of a ``Trainer``, its scheduler and grad scaler, and the states of its callbacks.

    Restoring keeps the values until the trainer has created the objects that they belong to.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._logs: list[str] = []
        self.global_batch = 0
        """Samples of each step of this training; 0 until it has begun."""
        self.begun = False
        """Whether the trainer has made a step."""
        self.output = ""
        """The result of the finished training, as JSON."""
        self.restored: Mapping[str, Any] | None = None
        """The commit from which the trainer continues; None at the beginning."""
        self._loaded: Mapping[str, Any] | None = None
        """What was loaded last, as long as the trainer has not taken it over."""

    def state_dict(self) -> dict[str, Any]:
        """Everything of this moment, between two steps."""
        if self._loaded is not None:
            return dict(self._loaded)
        trainer = self._trainer
        scheduler, scaler = trainer.lr_scheduler, trainer.accelerator.scaler
        return {
            "global_batch": self.global_batch,
            "begun": self.begun,
            "output": self.output,
            "state": self._state() if self.begun else "",
            "log_history": self._log_history() if self.begun else "[]",
            "callbacks": json.dumps(self._callbacks()),
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "scaler": scaler.state_dict() if scaler is not None else None,
            "sums": {name: float(getattr(trainer, name)) for name in _SUMS} if self.begun else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from these values in the next world."""
        self.global_batch, self.begun, self.output = state["global_batch"], state["begun"], state["output"]
        self._loaded, self.restored = state, state if self.begun else None
        self._logs.clear()
        for callback, kept in self._pairs(json.loads(state["callbacks"])):
            for name, value in kept.get("attributes", {}).items():
                setattr(callback, name, value)
        if not self.begun and state["scheduler"] is not None:  # the script's own, which the trainer does not recreate
            self._trainer.lr_scheduler.load_state_dict(state["scheduler"])

    # --- parts of restoring ------------------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """The fields of a ``TrainerState`` at the restored commit."""
        assert self.restored is not None, "only called after a restore"  # noqa: S101
        # The callbacks are restored. The trainer expects its own form of them when it saves, with its control.
        callbacks = TrainerState(stateful_callbacks=[*self._exportable(), self._trainer.control]).stateful_callbacks
        return {
            **json.loads(self.restored["state"]),
            "log_history": json.loads(self.restored["log_history"]),
            "stateful_callbacks": callbacks,
        }

    def restore_scheduler(self) -> None:
        """Restore the scheduler that the trainer has created for this world."""
        if self.restored is not None and self.restored["scheduler"] is not None:
            self._trainer.lr_scheduler.load_state_dict(self.restored["scheduler"])

    def restore_scaler(self) -> None:
        """Restore the grad scaler that the trainer has created for this world, if it uses one."""
        scaler = self._trainer.accelerator.scaler
        if self.restored is not None and scaler is not None and self.restored["scaler"] is not None:
            scaler.load_state_dict(self.restored["scaler"])

    def begin(self) -> None:
        """The trainer has taken over everything else and begins: restore its sum of losses, without the losses since
        the last logging, because each rank had its own."""
        self._loaded = None
        if self.restored is None:
            return
        sums, step = self.restored["sums"], self._trainer.state.global_step
        self._trainer._total_loss_scalar = sums["_total_loss_scalar"]
        uncounted = step - int(sums["_globalstep_last_logged"])
        self._trainer._initial_global_step = int(sums["_initial_global_step"]) + uncounted

    # --- the result --------------------------------------------------------------------------------------------------

    def finish(self, output: TrainOutput) -> None:
        """Keep the result of the training."""
        self.begun = True
        self.output = json.dumps(output._asdict())

    def result(self) -> TrainOutput:
        """The result that was kept."""
        return TrainOutput(**json.loads(self.output))

    # --- reading the trainer -----------------------------------------------------------------------------------------

    def _state(self) -> str:
        state = self._trainer.state
        return json.dumps({one.name: getattr(state, one.name) for one in dataclasses.fields(state)
                           if one.name not in _APART})  # fmt: skip

    def _log_history(self) -> str:
        """The logs as a JSON list. Entries do not change, so each is encoded once: there may be many thousands."""
        history = self._trainer.state.log_history
        self._logs += map(json.dumps, history[len(self._logs) :])
        return f"[{', '.join(self._logs)}]"

    def _callbacks(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for callback in self._exportable():
            found.setdefault(type(callback).__name__, []).append(callback.state())
        return found

    def _pairs(self, kept: dict[str, list[Any]]) -> list[tuple[Any, dict[str, Any]]]:
        pairs = []
        for callback in self._exportable():
            if kept.get(type(callback).__name__):
                pairs.append((callback, kept[type(callback).__name__].pop(0)))
        return pairs

    def _exportable(self) -> list[Any]:
        return [one for one in self._trainer.callback_handler.callbacks
                if isinstance(one, ExportableState) and not isinstance(one, TrainerControl)]  # fmt: skip
