"""What is kept of a loop with Accelerate besides model and optimizer."""

from __future__ import annotations

from typing import Any

from edl.integrations.loop_progress import LoopProgress


class Scaler:
    """As a gradient scaler, which each accelerator creates anew."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


def test_another_one_continues_from_its_state() -> None:
    first, second = LoopProgress(), LoopProgress()
    first.use(Scaler(8.0))
    first.epoch, first.step, first.step_in_epoch, first.global_batch = 2, 11, 1, 32
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict(), "the scaler too, which the next world has not created yet"
    fresh = Scaler(1.0)
    second.use(fresh)
    assert fresh.scale == 8.0
    assert second.state_dict() == first.state_dict()


def test_a_loop_without_a_scaler() -> None:
    progress = LoopProgress()
    progress.use(None)
    assert progress.state_dict() == {
        "global_batch": 0, "epoch": 0, "step_in_epoch": 0, "step": 0, "finished": False, "scaler": None
    }  # fmt: skip
