"""Follows what the workers of one job write down: whether all train, whether all is as it should be, and the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from benchmarks.endurance.disk import CHECKPOINTS
from benchmarks.ps.records import count
from benchmarks.soak.checks import StepCheck, StepLine, committed, miscounted
from benchmarks.soak.job import Job, lines
from benchmarks.soak.plan import NEVER_S

AHEAD = 30
"""Steps between now and the last one: enough for all ranks to hear of it in time."""
EPOCHS_AHEAD = 2
COUNT_EVERY_S = 20.0


class Follower(Protocol):
    """What the soak asks about each kind of job."""

    wrong: list[str]
    """What has been violated so far."""
    whole_at_s: float
    """When all nodes were last seen training together."""
    copied_at_s: float
    """When a checkpoint was last completed."""

    def poll(self, now_s: float) -> None:
        """Read what is new."""

    def end_soon(self) -> None:
        """Let the training end. Called once, when nothing is broken any more."""

    def end(self) -> None:
        """Called from then on until the launchers have ended."""

    def ready(self) -> bool:
        """Whether everything is known that the last checks need."""

    def close(self) -> None:
        """Check what can be checked only at the end."""

    def account(self) -> dict[str, int]:
        """What was counted."""


class StepFollower:
    """Jobs that make steps together."""

    def __init__(self, job: Job, losses: list[float] | None) -> None:
        self.job = job
        self.check = StepCheck(job.kind.redone_allowed, losses)
        self.wrong = self.check.wrong
        self.whole_at_s = self.copied_at_s = NEVER_S
        self._read: dict[str, int] = {}
        self._early: list[StepLine] = []
        self._newest: dict[str, float] = {}
        self._round = 0
        self._last = 0
        self._checkpoints: set[str] = set()

    def poll(self, now_s: float) -> None:
        """Lines that were written while the files were read wait for the next time: an earlier line of another worker
        may be read later."""
        found = [*self._early, *(StepLine(**line) for line in lines(self.job.said, ".steps", self._read))]  # type: ignore[arg-type]
        self._early = [line for line in found if line.t >= now_s]
        for line in sorted(found, key=lambda line: line.t):
            if line.t < now_s:
                self._take(line)
        self.check.compare()
        directory = self.job.place.disk.folder / CHECKPOINTS
        present = {name for name in os.listdir(directory) if (directory / name / "DONE").exists()}
        if present - self._checkpoints:
            self.copied_at_s = now_s
        self._checkpoints = present

    def _take(self, line: StepLine) -> None:
        self.check.take(line)
        if line.round > self._round:
            self._round, self._newest = line.round, {}
        if line.round == self._round and line.world == len(self.job.kind.trainers):
            self._newest[line.node] = line.t
            if len(self._newest) == line.world:
                self.whole_at_s = min(self._newest.values())

    def end_soon(self) -> None:
        """Name the last step."""
        self._last = self.check.last + AHEAD
        _write(self.job.said / "last-step", self._last)

    def end(self) -> None:
        """Nothing more to do."""

    def ready(self) -> bool:
        """Whether all losses are compared."""
        self.check.compare()
        return not self.check.uncompared

    def close(self) -> None:
        """Every step up to the last one was made."""
        if self.check.last != self._last:
            self.wrong.append(f"the last step was {self.check.last}, not {self._last}")

    def account(self) -> dict[str, int]:
        """Steps and losses."""
        found = self.check
        return {"steps": found.last, "redone": found.redone, "rounds": found.rounds, "losses": found.compared}


class DataFollower(StepFollower):
    """A job that reads a data set together."""

    def __init__(self, job: Job, losses: list[float] | None) -> None:
        super().__init__(job, losses)
        self._told: list[dict[str, Any]] = []
        self._read_records: dict[str, int] = {}
        self._epochs = 0
        self._counted_s = time.monotonic()
        self._records = 0

    def poll(self, now_s: float) -> None:
        """Records are counted now and then."""
        super().poll(now_s)
        self._told += lines(self.job.said, ".records", self._read_records)
        if now_s - self._counted_s > COUNT_EVERY_S:
            self._counted_s = now_s
            self._count(0)

    def _count(self, whole_epochs: int) -> None:
        found, missing = committed(self._told)
        self.wrong += [
            one for one in (*missing, *miscounted(found, self.job.kind.records, whole_epochs)) if one not in self.wrong
        ]
        self._records = sum(map(len, found.values()))

    def end_soon(self) -> None:
        """Name the number of epochs."""
        newest = max((line["epoch"] for line in self._told if "epoch" in line), default=0)
        self._epochs = newest + EPOCHS_AHEAD
        _write(self.job.said / "epochs", self._epochs)

    def close(self) -> None:
        """Each record once in each epoch."""
        self._count(self._epochs)

    def account(self) -> dict[str, int]:
        """Steps and records."""
        return {**super().account(), "records": self._records, "epochs": self._epochs}


class PushFollower:
    """Jobs whose trainers push to pservers, each at its own speed."""

    def __init__(self, job: Job, losses: list[float] | None) -> None:
        self.job = job
        self.wrong: list[str] = []
        self.whole_at_s = self.copied_at_s = NEVER_S
        self._read: dict[Path, int] = {}
        self._newest: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def poll(self, now_s: float) -> None:
        """Read the times of the newest steps."""
        for path in self.job.said.glob("*.times"):
            size = path.stat().st_size
            if size == self._read.get(path):
                continue
            self._read[path] = size
            newest = path.read_bytes()[-200:].splitlines(keepends=True)
            whole = [line for line in newest[1:] if line.endswith(b"\n")]
            node = path.with_suffix(".node").read_text()
            if whole:
                self._newest[node] = max(self._newest.get(node, NEVER_S), float(whole[-1]))
        if len(self._newest) == len(self.job.kind.trainers):
            self.whole_at_s = min(self._newest.values())

    def end_soon(self) -> None:
        """Name the number of epochs."""
        now = max(int(path.read_text() or 0) for path in self.job.said.glob("*.epoch"))
        _write(self.job.said / "epochs", now + EPOCHS_AHEAD)

    def end(self) -> None:
        """When all trainers rest, let them read what pservers hold."""
        living = {one.pid for node in self.job.kind.trainers for one in self.job.found(node)}
        resting = living & {int(path.stem) for path in self.job.said.glob("*.rests")}
        if len(resting) == len(self.job.kind.trainers) and not (self.job.said / "read").exists():
            (self.job.said / "read").touch()

    def ready(self) -> bool:
        """Nothing to wait for."""
        return True

    def close(self) -> None:
        """Each record and each push once."""
        held = sorted(self.job.said.glob("*.held.npz"))
        if not held:
            self.wrong.append("no trainer has read what the pservers hold")
            return
        found = count(self.job.said, held[0], self.job.kind.records)
        self._counts = {
            "epochs": found.epochs, "records": found.records * found.epochs, "pushes": found.held,
            "acknowledged": found.pushes, "begun": found.begun,
        }  # fmt: skip
        if not found.exact:
            self.wrong.append(
                f"{found.wrong} records were not counted once an epoch, such as {found.examples}; "
                f"{found.shared_wrong} shared rows are wrong"
            )
        # A trainer may die between the acknowledgement of its push and that of the batch. Another one repeats the push
        # then, and pservers acknowledge it again without counting it.
        twice = len(list(self.job.said.glob("*.books"))) - len(self.job.kind.trainers)
        if not found.pushes - twice <= found.held <= found.begun:
            self.wrong.append(
                f"{found.held} pushes are counted, {found.pushes} were acknowledged (up to {twice} of them twice), "
                f"{found.begun} begun"
            )

    def account(self) -> dict[str, int]:
        """Records and pushes."""
        return dict(self._counts)


def follower(job: Job, losses: list[float] | None) -> Follower:
    """The follower for a job's kind."""
    kinds: dict[tuple[bool, bool], Callable[[Job, list[float] | None], Follower]] = {
        (False, False): StepFollower,
        (True, False): DataFollower,
        (True, True): PushFollower,
    }
    return kinds[bool(job.kind.records), bool(job.kind.pservers)](job, losses)


def make_records(job: Job) -> None:
    """Write the data set of a job that reads one."""
    if not job.kind.records:
        return
    ids = np.arange(job.kind.records)
    table = pa.table({"id": ids, "x": (ids % 7).astype(np.float32)})
    path = job.data / "records.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _write(path: Path, number: int) -> None:
    unfinished = path.with_suffix(".new")
    unfinished.write_text(str(number))
    unfinished.rename(path)
