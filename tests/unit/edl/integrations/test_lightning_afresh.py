"""What a trainer of Lightning carries from one world to the next beside its checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from edl.integrations.lightning_afresh import FirstCounts


class Loop:
    """With one count, and another loop inside."""

    def __init__(self, inner: Loop | None = None) -> None:
        self.restarting = False
        self.count = 0
        self.inner = inner
        self.trainer = SimpleNamespace()

    def state_dict(self, prefix: str = "") -> dict[str, Any]:
        below = {} if self.inner is None else self.inner.state_dict(f"{prefix}inner.")
        return {f"{prefix}count": self.count, **below}

    def _load_from_state_dict(self, kept: dict[str, Any], prefix: str) -> None:
        self.count = kept[f"{prefix}count"]


class Scaler:
    def __init__(self) -> None:
        self.scale = 65536.0
        self._per_optimizer_states: dict[int, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        self.scale = kept["scale"]


class ModelCheckpoint:
    def __init__(self) -> None:
        self._last_global_step_saved = 0
        self._last_checkpoint_saved = ""
        self.best_model_path = ""


class Own(ModelCheckpoint):
    pass


def interrupted(**options: Any) -> SimpleNamespace:
    trainer = SimpleNamespace(
        fit_loop=Loop(Loop()), callbacks=[Own()], precision_plugin=SimpleNamespace(scaler=Scaler())
    )
    counts = FirstCounts(trainer)
    trainer.fit_loop.count = trainer.fit_loop.inner.count = 7
    scaler, (callback,) = trainer.precision_plugin.scaler, trainer.callbacks
    scaler.scale, scaler._per_optimizer_states[1] = 2.0, "unscaled"
    callback._last_global_step_saved, callback._last_checkpoint_saved, callback.best_model_path = 7, "a", "a"
    counts.begin(**options)
    return trainer


def test_a_world_from_a_commit_forgets_what_the_commit_does_not_hold() -> None:
    trainer = interrupted(from_nothing=False)
    (callback,) = trainer.callbacks
    assert vars(callback) == {"_last_global_step_saved": 0, "_last_checkpoint_saved": "", "best_model_path": "a"}
    assert trainer.precision_plugin.scaler._per_optimizer_states == {}
    assert (trainer.fit_loop.count, trainer.precision_plugin.scaler.scale) == (7, 2.0)  # loaded with the commit


def test_a_world_from_nothing_sets_the_counts_back() -> None:
    trainer = interrupted(from_nothing=True)
    assert (trainer.fit_loop.count, trainer.fit_loop.inner.count) == (0, 0)
    assert (trainer.fit_loop.restarting, trainer.precision_plugin.scaler.scale) == (False, 65536.0)


def test_a_trainer_without_a_scaler() -> None:
    trainer = SimpleNamespace(fit_loop=Loop(), callbacks=[], precision_plugin=SimpleNamespace(scaler=None))
    FirstCounts(trainer).begin(from_nothing=True)
