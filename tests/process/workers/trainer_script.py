"""What the scripts with a trainer of another library have in common: arguments, a line and the samples of each step,
and the trained model's numbers."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def parser() -> argparse.ArgumentParser:
    """The arguments of each of them."""
    made = argparse.ArgumentParser()
    made.add_argument("--folder", type=Path, required=True)
    made.add_argument("--steps", type=int, default=60)
    made.add_argument("--batch", type=int, default=4, help="samples of each worker at once")
    made.add_argument("--global-batch", type=int, default=8)
    made.add_argument("--accumulate", type=int, default=1)
    made.add_argument("--samples", type=int, default=100)
    made.add_argument("--pause", type=float, default=0.05)
    made.add_argument("--dropout", type=float, default=0.0)
    return made


class Rows:
    """A data set for any framework (a ``Dataset`` by its methods): rows of numbers. Notes which of them were read in
    this round, without those of a step that the end of the round before has interrupted."""

    def __init__(self, samples: int) -> None:
        self.rows = np.random.default_rng(3).normal(size=(samples, 8)).astype(np.float32)
        self.read: list[int] = []
        self._round = round_now()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if self._round != (now := round_now()):
            self._round, self.read = now, []
        self.read.append(index)
        return self.rows[index]


def round_now() -> int:
    """The number of the round; 1 without a launcher."""
    return int(os.environ.get("EDL_ROUND", "1"))


def wait_until_free(folder: Path) -> None:
    """Be a replacement that takes its time, while the test holds it."""
    while (folder / "held").exists():
        time.sleep(0.05)


def log(options: argparse.Namespace, step: int, rank: int, world: int, read: list[int]) -> None:
    """Write a line for a step, in the form that the harness reads, and the step's samples; then pause."""
    number, node = round_now(), os.environ.get("EDL_NODE_ID", "none")
    line = {"t": time.monotonic(), "step": step, "rank": rank, "world": world, "round": number, "pid": os.getpid(),
            "node": node}  # fmt: skip
    place = f"{node}.{number}.{rank}.{os.getpid()}"
    with (options.folder / f"{place}.steps").open("a") as file:
        file.write(json.dumps(line) + "\n")
    with (options.folder / f"{place}.samples").open("a") as file:
        file.write(json.dumps([step, read]) + "\n")
    if not (options.folder / "hurry").exists():
        time.sleep(options.pause)


def write_result(folder: Path, rank: int, step: int, weights: Mapping[str, Any], **more: Any) -> None:
    """Write what the test compares."""
    numbers = np.concatenate([np.asarray(value.detach().cpu(), np.float64).ravel() for value in weights.values()])
    result = {"step": step, "sum": float(numbers.sum()), "norm": float(np.linalg.norm(numbers)), **more}
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))
