"""What a trainer of Lightning keeps in its process, but not in its checkpoints.

A worker that keeps its process enters the next world with it, a new worker does not, and ranks decide by it: whether to
take part in the barrier of a checkpoint, or after which step to end. So in each world all begin as a new process does.
"""

from __future__ import annotations

from typing import Any

_AT_FIRST: dict[str, dict[str, Any]] = {
    "ModelCheckpoint": {
        "_last_global_step_saved": 0,
        "_last_checkpoint_saved": "",
        "_defer_save_until_validation": False,
    },
}
"""Attributes of callbacks, by name of class, and their first values. What a checkpoint has of them is loaded later."""


class FirstCounts:
    """The counts of a trainer that has not trained, and the state of its gradient scaler."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loops: dict[str, Any] = trainer.fit_loop.state_dict()
        scaler = self._scaler
        self._scaled = None if scaler is None else scaler.state_dict()

    def begin(self, *, from_nothing: bool) -> None:
        """A world begins, and ``fit`` is called next. ``from_nothing``: it resumes from no commit, so nothing else sets
        the counts of an interrupted ``fit`` back."""
        for callback in self._trainer.callbacks:
            for kind in type(callback).__mro__:
                values = _AT_FIRST.get(kind.__name__, {})
                vars(callback).update({name: value for name, value in values.items() if name in vars(callback)})
        scaler = self._scaler
        if scaler is not None:
            scaler._per_optimizer_states.clear()  # else gradients of the next step would count as unscaled
        if from_nothing:
            _load(self._trainer.fit_loop, self._loops, "")
            if scaler is not None and self._scaled:
                scaler.load_state_dict(dict(self._scaled))

    @property
    def _scaler(self) -> Any:
        return getattr(self._trainer.precision_plugin, "scaler", None)


def _load(loop: Any, counts: dict[str, Any], prefix: str) -> None:
    """As a loop's ``load_state_dict``, but without the marks that it resumes."""
    loop._load_from_state_dict(counts, prefix)
    for name, part in vars(loop).items():
        if hasattr(part, "restarting"):
            _load(part, counts, f"{prefix}{name}.")
