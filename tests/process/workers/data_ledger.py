"""What a worker of the data tests writes down: which records each commit contains, and where each world began.

Lines are written before the collective of their step, so a commit that anybody has made has the lines of all.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edl.worker import session


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--files", default="", help="unless the launcher has them (--data)")
    parser.add_argument("--epochs", type=int, default=1_000_000, help="unless FOLDER/epochs says otherwise")
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--shard-records", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--tail", default="join")
    parser.add_argument("--copy-every", type=int, default=1)
    return parser.parse_args()


def epochs(options: argparse.Namespace) -> int:
    """Number of epochs. A file can raise it while the job runs, at least an epoch ahead."""
    file = options.folder / "epochs"
    return int(file.read_text()) if file.exists() else int(options.epochs)


class Book:
    """One worker's book of one round."""

    def __init__(self, folder: Path, here: Any, state: Any) -> None:
        seat = session.current().seat
        assert seat is not None
        name = f"{here.node}.{here.round}.{here.rank}.{os.getpid()}"
        self._fixed = {"rank": here.rank, "world": here.world_size, "pid": os.getpid(), "node": here.node}
        self._round = here.round
        self._era = seat.era
        self._steps = (folder / f"{name}.steps").open("a", buffering=1)
        self._records = (folder / f"{name}.records").open("a", buffering=1)
        began = {"era": seat.era, "from_era": seat.restore_era, "from_commit": seat.restore_commit}
        self._records.write(json.dumps(began) + "\n")

    def __enter__(self) -> Book:
        return self

    def __exit__(self, *_: object) -> None:
        self._steps.close()
        self._records.close()

    def records(self, commit: int, epoch: int, records: Sequence[int]) -> None:
        """Log the records of a commit."""
        line = {"era": self._era, "commit": commit, "epoch": epoch, "records": list(records)}
        self._records.write(json.dumps(line) + "\n")

    def step(self, commit: int) -> None:
        """Log a step for the test."""
        line = {"t": time.monotonic(), "step": commit, "round": self._round, **self._fixed}
        self._steps.write(json.dumps(line) + "\n")
