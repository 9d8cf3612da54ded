"""What Lightning's ``Trainer`` must remember, as an object for ``State``: a checkpoint as it writes them to disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_HYPER_PARAMETERS = ("CHECKPOINT_HYPER_PARAMS_KEY", "CHECKPOINT_HYPER_PARAMS_NAME", "CHECKPOINT_HYPER_PARAMS_TYPE")
"""Names of the keys with what a module or data module was built from. ``fit`` does not read them."""
WEIGHTS = "state_dict"
"""Lightning's key for the parameters and buffers of the module."""


class LightningProgress:
    """A checkpoint of a ``Trainer`` in memory, and what Lightning leaves out of its checkpoints.

    Restoring keeps the values until the trainer asks for its checkpoint.
    """

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer = trainer
        self._module = module
        self.global_batch = 0
        """Samples of each step of this training; 0 until it has begun."""
        self.begun = False
        """Whether the trainer has made a step."""
        self.finished = False
        self.step_in_epoch = 0
        """Steps of the current epoch before the next one."""
        self.should_stop = False
        """Whether a callback such as ``EarlyStopping`` has asked for the end."""
        self.metrics: dict[str, torch.Tensor] = {}
        """What was logged last, for callbacks and schedulers that monitor it."""
        self.loaded: Mapping[str, Any] | None = None
        """What was loaded last, as long as the trainer has not taken it over."""

    @property
    def step(self) -> int:
        """Steps up to the restored commit."""
        return int(self.loaded["checkpoint"]["global_step"]) if self.loaded is not None and self.begun else 0

    def state_dict(self) -> dict[str, Any]:
        """Everything of this moment, between two steps."""
        if self.loaded is not None:
            return dict(self.loaded)
        logged = self._trainer._logger_connector._callback_metrics
        return {
            "global_batch": self.global_batch,
            "begun": self.begun,
            "finished": self.finished,
            "step_in_epoch": self.step_in_epoch,
            "should_stop": self._trainer.should_stop if self.begun else False,
            "metrics": {name: value.detach() for name, value in logged.items() if isinstance(value, torch.Tensor)},
            "checkpoint": self._checkpoint() if self.begun else {WEIGHTS: self._module.state_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from these values in the next world."""
        self.global_batch, self.begun, self.finished = state["global_batch"], state["begun"], state["finished"]
        self.step_in_epoch, self.should_stop = state["step_in_epoch"], state["should_stop"]
        self.metrics = dict(state["metrics"])
        self.loaded = state
        if not self.begun:  # a module may build layers in its setup, so there may be fewer in one of them
            self._module.load_state_dict(state["checkpoint"][WEIGHTS], strict=False)

    def checkpoint(self) -> dict[str, Any]:
        """The restored checkpoint, for Lightning's own way of resuming."""
        assert self.loaded is not None, "only called after a restore"  # noqa: S101
        return dict(self.loaded["checkpoint"])

    def restore_metrics(self) -> None:
        """Restore what was logged last; Lightning has forgotten it."""
        device = self._trainer.strategy.root_device
        restored = {name: value.to(device) for name, value in self.metrics.items()}
        self._trainer._logger_connector._callback_metrics.update(restored)

    def _checkpoint(self) -> dict[str, Any]:
        made: dict[str, Any] = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        for owner in (self._module, self._trainer.datamodule):
            for name in _HYPER_PARAMETERS if owner is not None else ():
                made.pop(getattr(owner, name, ""), None)
        return made
