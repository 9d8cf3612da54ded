"""What the soak's scripts have in common, whatever their framework: arguments, the step log, the last step."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

BATCH = 24
"""Rows of a global batch; divisible by every world size of the soak."""
FEATURES = 8


def arguments() -> argparse.Namespace:
    """The command line of each script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="step logs, and the file last-step")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds to sleep after each step")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--reference", type=int, default=0, metavar="N", help="write the losses of N steps, and end")
    return parser.parse_args()


def last_step(folder: Path) -> int:
    """The last step, once it is known; the file is written while that step is far enough ahead of all ranks."""
    file = folder / "last-step"
    return int(file.read_text()) if file.exists() else sys.maxsize


def write_reference(folder: Path, losses: Iterator[float]) -> None:
    """Write the losses of an undisturbed run as they come, one a line, in the background of everything else."""
    os.nice(4)
    with (folder / "reference").open("w", buffering=1) as file:
        for loss in losses:
            file.write(f"{loss!r}\n")


class StepLog:
    """The step log of one worker in one round."""

    def __init__(self, folder: Path, rank: int, world: int, node: str, number: int) -> None:
        self._fixed = {"rank": rank, "world": world, "pid": os.getpid(), "node": node, "round": number}
        self._file = (folder / f"{node}.{number}.{rank}.{os.getpid()}.steps").open("a", buffering=1)

    def step(self, step: int, loss: float | None = None) -> None:
        """Write one step."""
        self._file.write(json.dumps({"t": time.monotonic(), "step": step, **self._fixed, "loss": loss}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def plain_step_log(folder: Path, rank: int, world: int) -> StepLog:
    """The step log of a script that knows edl by its environment alone."""
    return StepLog(folder, rank, world, os.environ["EDL_NODE_ID"], int(os.environ["EDL_ROUND"]))
