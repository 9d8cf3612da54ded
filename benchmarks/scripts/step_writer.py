"""Writes one JSON line per completed step, with a single O_APPEND write, so a killed worker leaves only whole lines.

Uses the standard library only, so that importing it adds no noticeable time to a worker's start.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Committing(Protocol):
    """The part of ``edl.State`` that is needed here."""

    @property
    def commits(self) -> int:
        """Number of step boundaries passed."""
        ...

    def commit(self) -> bool:
        """Pass a step boundary."""
        ...


class StepWriter:
    """One file per process in ``<workdir>/steps``. Writes ``start`` at once, so that a worker that never reaches its
    first step is known as well."""

    def __init__(self, workdir: Path) -> None:
        folder = workdir / "steps"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._rank, self._world, self._formed = -1, 0, 0
        self._restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "-1"))
        self._node = int(os.environ.get("EDL_BENCH_NODE", "-1"))
        self._write("start", 0)

    def group(self, rank: int, world: int, formed: int) -> None:
        """Set the world of the following steps; ``formed`` is the same on all its ranks."""
        self._rank, self._world, self._formed = rank, world, formed

    def step(self, step: int, loss: float | None = None) -> None:
        """Record that step number ``step``, counted from 1 over the whole job, is complete on this rank."""
        self._write("step", step, {} if loss is None else {"loss": loss})

    def commit(self, state: Committing, step: int, loss: float | None = None) -> None:
        """Commit the step, and then record it: with its commit it is complete, as torchft's is with its vote.

        A commit that ends the world raises, and that step is complete, too.
        """
        before = state.commits
        try:
            state.commit()
        finally:
            if state.commits > before:
                self.step(step, loss)

    def _write(self, kind: str, step: int, more: Mapping[str, object] | None = None) -> None:
        line = {
            "t": time.monotonic(),
            "kind": kind,
            "rank": self._rank,
            "world": self._world,
            "step": step,
            "pid": os.getpid(),
            "node": self._node,
            "restart": self._restart,
            "formed": self._formed,
            **(more or {}),
        }
        os.write(self._file, (json.dumps(line) + "\n").encode())
