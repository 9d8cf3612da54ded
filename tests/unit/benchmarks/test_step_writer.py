"""When the benchmarks' scripts record a step: with edl, after its commit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scripts.step_writer import StepWriter


class Unwound(Exception):
    """Leaves the world, as a commit does when its round has ended."""


class FakeState:
    """Writes its commits into the log of steps, so that their order shows."""

    def __init__(self, log: StepWriter) -> None:
        self._log = log
        self.commits = 0
        self.ends = False
        self.broken = False

    def commit(self) -> bool:
        if self.broken:
            raise Unwound
        self.commits += 1
        self._log._write("commit", self.commits)
        if self.ends:
            raise Unwound
        return True


def lines(folder: Path) -> list[tuple[str, int]]:
    (path,) = (folder / "steps").iterdir()
    found: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["kind"], line["step"]) for line in found if line["kind"] != "start"]


def test_a_step_is_complete_after_its_commit(tmp_path: Path) -> None:
    log = StepWriter(tmp_path)
    log.commit(FakeState(log), 1)
    assert lines(tmp_path) == [("commit", 1), ("step", 1)]


def test_a_commit_that_ends_the_world_completes_its_step(tmp_path: Path) -> None:
    log = StepWriter(tmp_path)
    state = FakeState(log)
    state.ends = True
    with pytest.raises(Unwound):
        log.commit(state, 1)
    assert lines(tmp_path) == [("commit", 1), ("step", 1)]


def test_a_step_without_a_commit_is_not_recorded(tmp_path: Path) -> None:
    log = StepWriter(tmp_path)
    state = FakeState(log)
    state.broken = True
    with pytest.raises(Unwound):
        log.commit(state, 1)
    assert lines(tmp_path) == []
