"""Checks of checkpoints in the simulation: what a completed one must contain, and what it must not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from edl.errors import CheckpointError
from edl.testing.sim.disk import SimDisk, SimFiles
from ps.checkpoint.directory import CheckpointDirectory
from ps.checkpoint.manifest import checkpoint_number
from ps.protocol import messages
from ps.spec import BUCKETS
from tests.sim.ps_rows import Id

if TYPE_CHECKING:
    from tests.sim.ps_world import PsSim

Place = tuple[int, int, Id]
"""Bucket, row, push."""


def number_of(run: str) -> int:
    """Number of the checkpoint in this folder."""
    number = checkpoint_number(run.rpartition("/")[2])
    assert number is not None, run
    return number


class Checkpoints:
    """Checkpoints that were completed, and the rows that they must contain."""

    def __init__(self, sim: PsSim) -> None:
        self.sim = sim
        self.storage = SimDisk(sim.net.timeline, sim.net.rng.random)
        self.expected: dict[int, frozenset[Place]] = {}
        """By checkpoint: what was acknowledged when all had stopped for it."""
        self.stopped: dict[int, frozenset[int]] = {}
        """By checkpoint: the trainers that had stopped for it. One that the Master had given up may
        have a push applied that it has not heard of."""
        self.complete: set[int] = set()
        self.bad: set[int] = set()

    def said(self, message: Any) -> None:
        """A pserver reports to the Master."""
        done = isinstance(message, messages.CheckpointPhaseDone) and message.phase == "complete" and not message.failed
        if done and message.number not in self.complete:
            self.complete.add(message.number)
            self._completed(message.number, json.loads(message.report)["run"])

    def must_have(self, run: str) -> None:
        """A trainer was told that this checkpoint is complete."""
        if number_of(run) not in self.complete:
            self.sim.net.fail(f"{run} was told to be complete")

    def _completed(self, number: int, run: str) -> None:
        sim = self.sim
        directory = CheckpointDirectory(SimFiles(self._calm(), "check", lambda seconds: None), "job")
        try:
            chain = {number_of(one.run) for one in directory.chain(run)}
            loaded = list(directory.read(run, np.ones(BUCKETS, np.uint8)))
        except CheckpointError as error:
            if not self.bad:
                sim.net.fail(f"checkpoint {number} is complete, and cannot be read: {error}")
            self.bad.add(number)
            return
        if chain & self.bad:
            self.bad.add(number)
        have: set[Place] = set()
        for one in loaded:
            for rows in one.rows.values():
                for bucket, row, push, count in sim.ledger.read_keys(rows.keys, rows.weights):
                    have.add((bucket, row, push))
                    if count > 1:
                        sim.net.fail(f"checkpoint {number} has {push} {count} times in row {row} of bucket {bucket}")
        lost = sim.losses.unexcused(self.expected[number] - have)
        if lost:
            sim.net.fail(f"checkpoint {number} lacks {lost[:3]}")
        later = {place for place in have - self.expected[number] if place[2][0] in self.stopped[number]}
        if later:
            sim.net.fail(f"checkpoint {number} has what came after it: {sorted(later)[:3]}")
        if sim.net.rng.random() < sim.disk_faults:
            self.bad.add(number)
            self.storage.spoil(run)

    def _calm(self) -> SimDisk:
        """The storage, without its faults."""
        calm = SimDisk(self.sim.net.timeline, lambda: 0.0)
        calm.files = self.storage.files
        return calm
