"""A callback for the ``Trainer`` of Transformers."""

from __future__ import annotations

import argparse
from typing import Any

from transformers import TrainerCallback

from benchmarks.scripts.trainer_parts import Log


class StepLog(TrainerCallback):  # type: ignore[misc]  # the package is not typed
    """Writes the step log."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._log = Log(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._log.world(args.process_index, args.world_size)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._log.step(state.global_step)
