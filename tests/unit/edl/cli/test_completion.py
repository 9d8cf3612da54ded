"""Completion of node names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from click.shell_completion import ShellComplete

from edl.cli import completion
from edl.cli.__main__ import edl
from edl.cli.find import NoMaster, Where
from edl.wire.status import JobStatus, NodeView

NAMES = ("node-a", "node-b", "other", "node-\x1b[2J")


class Job:
    def __init__(self) -> None:
        self.asked: list[Where] = []
        self.problem: Exception | None = None
        self.silent = False

    async def status(self) -> JobStatus:
        if self.silent:
            await asyncio.Event().wait()
        nodes = tuple(NodeView(name, "h", 1, "running", True, 0, 0) for name in NAMES)
        return JobStatus("job", "running", 1, 2, "", "1:2", "elastic", 0, 3, "a", nodes, (), ())

    @contextlib.asynccontextmanager
    async def master_of(self, where: Where) -> AsyncIterator[Job]:
        self.asked.append(where)
        if self.problem is not None:
            raise self.problem
        yield self


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    found = Job()
    monkeypatch.setattr("edl.cli.find.master_of", found.master_of)
    return found


def completed(words: list[str], incomplete: str) -> list[str]:
    return [item.value for item in ShellComplete(edl, {}, "edl", "_EDL_COMPLETE").get_completions(words, incomplete)]


@pytest.mark.parametrize(
    ("words", "incomplete", "found"),
    [
        (["drain"], "node", ["node-a", "node-b"]),
        (["drain", "node-a"], "", ["node-b", "other"]),
        (["cordon"], "o", ["other"]),
        (["uncordon"], "x", []),
        (["logs", "--node"], "n", ["node-a", "node-b"]),
        (["stacks", "--node", "node-a", "--node"], "n", ["node-b"]),
    ],
)
def test_names_of_nodes(job: Job, words: list[str], incomplete: str, found: list[str]) -> None:
    assert completed(words, incomplete) == found


def test_the_job_is_the_one_that_is_named(job: Job) -> None:
    completed(["drain", "--rdzv-id=digits", "--rdzv-endpoint=h:1"], "")
    assert [(where.job, where.endpoints) for where in job.asked] == [("digits", ("h:1",))]


def test_nothing_without_an_answer(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.problem = NoMaster("no job")
    assert completed(["drain"], "") == []
    job.problem, job.silent = None, True
    monkeypatch.setattr(completion, "LIMIT_S", 0.01)
    assert completed(["drain"], "") == []


def test_commands() -> None:
    assert completed([], "s") == ["scale", "set", "simulate", "stacks", "status", "stop", "suspend"]
