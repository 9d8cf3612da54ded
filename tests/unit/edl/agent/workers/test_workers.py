"""A round's workers on one node: what they are started with, and what is known when they end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import pytest

from edl.agent.machine.events import WorkerEnded
from edl.agent.workers import workers as workers_module
from edl.agent.workers.environment import LocalPaths, WorkerGroupDeps, ahead_environment, worker_environment
from edl.agent.workers.hang import Watched
from edl.agent.workers.oom import OutOfMemory
from edl.agent.workers.workers import CANNOT_START, WorkerGroup
from edl.config import JobSpec, LogPlan, NodeRange
from edl.errors import WorkerStartError
from edl.types import Incarnation, JobId, NodeId, Rank, Round
from edl.wire.node_requests import OutputRequest, StacksRequest
from edl.wire.process_events import ProcessEvent
from edl.wire.records import Member, World

WORLD = World(
    Round(3),
    (
        Member(NodeId("a"), Incarnation(1), "h1", 1, Rank(0), (1, 2)),
        Member(NodeId("b"), Incarnation(2), "h2", 2, Rank(1), (1, 2, 3)),
    ),
    0,
)


DEADLINE_S = 60.0
"""For the thread that writes files, on a busy machine."""


class FakeProcesses:
    """Workers that are nothing but their ends of the pipes."""

    def __init__(self) -> None:
        self.environments: dict[int, dict[str, str]] = {}
        self.outputs: dict[int, tuple[int, int]] = {}
        self.signals: list[tuple[int, int]] = []
        self.dumped: list[int] = []
        self.forwarded: list[tuple[int, int]] = []
        self.given: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.stacks: dict[int, bytes] = {}
        self.fail_at = ""

    async def warm(self) -> str:
        return ""

    async def spawn(
        self, environment: dict[str, str], stdout: int, stderr: int, local_rank: int = 0, cores: tuple[int, ...] = ()
    ) -> int:
        await asyncio.sleep(0)
        if environment["LOCAL_RANK"] == self.fail_at:
            raise WorkerStartError("no more processes")
        pid = 1000 + int(environment["LOCAL_RANK"])
        self.environments[pid] = environment
        self.given[pid] = (local_rank, cores)
        self.outputs[pid] = (os.dup(stdout), os.dup(stderr))
        return pid

    def entitle(self, until_s: float) -> None:
        pass

    def entitle_aside(self, until_s: float) -> None:
        pass

    async def signal(self, pid: int, number: int) -> None:
        self.signals.append((pid, number))

    async def dump(self, pid: int) -> None:
        self.dumped.append(pid)
        if pid in self.stacks:
            os.write(self.outputs[pid][1], self.stacks[pid])

    async def forward(self, pid: int, number: int) -> None:
        self.forwarded.append((pid, number))

    async def events(self) -> AsyncIterator[ProcessEvent]:
        return
        yield

    async def close(self) -> None:
        self.end_all()

    def write(self, pid: int, *, stdout: bytes = b"", stderr: bytes = b"") -> None:
        for descriptor, data in zip(self.outputs[pid], (stdout, stderr), strict=True):
            os.write(descriptor, data)

    def end_all(self) -> None:
        for descriptor in (descriptor for pair in self.outputs.values() for descriptor in pair):
            os.close(descriptor)
        self.outputs.clear()


class Bench:
    def __init__(self, folder: Path, **plan: int) -> None:
        self.processes = FakeProcesses()
        self.said: list[str] = []
        self.folder = folder
        spec = JobSpec(JobId("my-job"), NodeRange(1, 4))
        logs = LogPlan(str(folder), **plan)  # type: ignore[arg-type]
        self.group = WorkerGroup(
            self.processes, spec, NodeId("b"), {"PATH": "/bin"}, logs, WorkerGroupDeps(), self.said.append
        )


def pipes_and_files() -> set[str]:
    """The open ones of this process. Sockets are left out: threads of libraries open some at any time."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(("pipe:", "/")):
                found.add(target)
    return found


def play(bench: Bench, scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    before = pipes_and_files()

    async def whole() -> None:
        try:
            await scenario()
        finally:
            bench.processes.end_all()
            for pid in (1000, 1001):
                await bench.group.ended(pid, 0)
            await bench.group.done(DEADLINE_S)  # a thread closes the files

    asyncio.run(whole())
    assert not pipes_and_files() - before


def test_those_started_ahead_know_their_slot_and_no_world(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def scenario() -> None:
        bench.group.meet_at("edl-worker-server")
        assert await bench.group.start_ahead(Round(2), (1,), (0, 1)) == []
        environment = bench.processes.environments[1001]
        assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == ("1", "2")
        assert environment["EDL_AGENT"] == "edl-worker-server"
        assert {"RANK", "WORLD_SIZE", "MASTER_ADDR", "PADDLE_TRAINER_ID", "EDL_ROUND"}.isdisjoint(environment)
        assert bench.group.place(1001) == (Round(2), 1)
        assert bench.said == ["worker processes: 1001 (slot 1, waiting for a world)"]
        seat = bench.group.seat(WORLD, 1, "secret")
        assert (seat.rank, seat.world_size, seat.round, seat.position) == (2, 3, 3, 1)
        assert seat.endpoints == ("h1:2", "h2:2", "h2:3") and seat.master == "h1:1"
        assert seat.environment["RANK"] == "2"
        assert environment["TORCHELASTIC_ERROR_FILE"] == str(tmp_path / "attempt_2_ahead" / "1" / "error.json")
        assert seat.environment["TORCHELASTIC_ERROR_FILE"] == str(tmp_path / "attempt_2" / "1" / "error.json")

    play(bench, scenario)


def test_paddle_is_sent_to_gloo_only_where_it_runs_on_the_cpu(tmp_path: Path) -> None:
    spec, paths = JobSpec(JobId("my-job"), NodeRange(1, 4)), LocalPaths("error.json", "logs")
    for gpus in (0, 2):
        ahead = ahead_environment({}, spec, NodeId("b"), (0, 1), 1, paths, WorkerGroupDeps(gpus))
        placed = worker_environment({}, spec, WORLD, NodeId("b"), 1, paths, WorkerGroupDeps(gpus))
        assert ("PADDLE_DISTRI_BACKEND" in ahead) == ("PADDLE_DISTRI_BACKEND" in placed) == (gpus == 0)


def test_each_slot_gets_a_worker_that_knows_its_place(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def scenario() -> None:
        assert await bench.group.start(WORLD, (0, 1)) == []
        assert [bench.processes.environments[pid]["RANK"] for pid in (1000, 1001)] == ["1", "2"]
        environment = bench.processes.environments[1001]
        assert environment["PATH"] == "/bin"
        assert environment["TORCHELASTIC_ERROR_FILE"] == str(tmp_path / "attempt_2" / "1" / "error.json")
        await bench.group.done(DEADLINE_S)
        assert (tmp_path / "attempt_2" / "1").is_dir()
        assert bench.group.place(1001) == (Round(3), 1)
        assert bench.group.place(7) is None
        assert bench.said == ["worker processes: 1000 (rank 1), 1001 (rank 2)"]

    play(bench, scenario)


def test_signals_reach_those_named_or_all(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def scenario() -> None:
        await bench.group.start(WORLD, (0, 1))
        await bench.group.signal(15, (1,))
        await bench.group.signal(9, ())
        assert bench.processes.signals == [(1001, 15), (1000, 9), (1001, 9)]

    play(bench, scenario)


def test_signals_for_workers_are_passed_to_all_and_cores_belong_to_slots(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.group._deps = dataclasses.replace(bench.group._deps, cores=((0,), (1, 3)))

    async def scenario() -> None:
        await bench.group.start(WORLD, (0, 1))
        await bench.group.forward(10)
        assert bench.processes.forwarded == [(1000, 10), (1001, 10)]
        assert bench.processes.given == {1000: (0, (0,)), 1001: (1, (1, 3))}

    play(bench, scenario)


def test_stacks_are_written_before_anything_else_happens_one_worker_after_the_other(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def scenario() -> None:
        await bench.group.start(WORLD, (0, 1))
        bench.processes.stacks = {1000: b"Thread 1\n", 1001: b"Thread 2\n"}
        await bench.group.dump_stacks()
        assert bench.processes.dumped == [1000, 1001]
        assert [watched.output_bytes for watched in bench.group.watched().values()] == [9, 9]
        first, second = (line for line in bench.said if not line.startswith("worker processes: "))
        assert ["local rank 0" in first, "local rank 1" in second] == [True, True]

    play(bench, scenario)


def test_a_worker_that_writes_no_stacks_is_not_waited_for_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    monkeypatch.setattr(workers_module, "_STACKS_BEGIN_S", 0.2)

    async def scenario() -> None:
        await bench.group.start(WORLD, (0, 1))
        bench.processes.stacks = {1001: b"Thread 2\n"}
        await asyncio.wait_for(bench.group.dump_stacks(), 10)
        assert bench.processes.dumped == [1000, 1001]

    play(bench, scenario)


def test_recent_output_has_the_ranks_of_its_workers(tmp_path: Path) -> None:
    """Also of workers that have ended, and before files are written."""
    bench = Bench(tmp_path)

    async def scenario() -> None:
        await bench.group.start(WORLD, (0, 1))
        bench.processes.write(1000, stdout=b"loss 1\nloss", stderr=b"warning\n")
        bench.processes.write(1001, stdout=b"loss 2\n")
        await bench.group.ended(1000, 0)
        while len(bench.group.output(OutputRequest()).lines) < 4:  # noqa: ASYNC110 - a pipe is read in the loop
            await asyncio.sleep(0.001)
        found = bench.group.output(OutputRequest((1,)))
        assert [(line.rank, line.round, line.stderr, line.text) for line in found.lines] == [
            (1, 3, False, "loss 1"), (1, 3, False, "loss"), (1, 3, True, "warning")]  # fmt: skip
        bench.group.seat(dataclasses.replace(WORLD, round=Round(4)), 1, "secret")  # it lives on
        bench.processes.write(1001, stdout=b"loss 3\n")
        while not bench.group.output(OutputRequest(after=found.next)).lines:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        (line,) = bench.group.output(OutputRequest(after=found.next)).lines
        assert (line.rank, line.round, line.text) == (2, 4, "loss 3")

    play(bench, scenario)


def test_stacks_on_request_are_those_of_the_named_ranks(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def scenario() -> None:
        await bench.group.start(WORLD, (0, 1))
        bench.processes.write(1001, stderr=b"before\n")
        bench.processes.stacks = {1000: b"Thread 1\n", 1001: b"Thread 2\n  frame\n"}
        while not bench.group.output(OutputRequest()).lines:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        found = await bench.group.stacks(StacksRequest((2,)))
        assert [line.text for line in found.lines] == ["Thread 2", "  frame"]
        assert bench.processes.dumped == [1001]
        assert bench.processes.signals == []
        both = await asyncio.gather(bench.group.stacks(StacksRequest()), bench.group.stacks(StacksRequest((1,))))
        assert [[line.text for line in one.lines] for one in both] == [
            ["Thread 1", "Thread 2", "  frame"], ["Thread 1"]]  # fmt: skip

    play(bench, scenario)


def test_who_looks_for_hangs_sees_processes_and_their_output(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def scenario() -> None:
        await bench.group.start(WORLD, (0, 1))
        assert bench.group.watched() == {0: Watched(1000, 0), 1: Watched(1001, 0)}
        bench.processes.write(1001, stdout=b"a line\n", stderr=b"and\n")
        while bench.group.watched()[1].output_bytes < 11:  # noqa: ASYNC110 - a thread reads the output
            await asyncio.sleep(0.001)
        assert bench.group.watched() == {0: Watched(1000, 0), 1: Watched(1001, 11)}

    play(bench, scenario)


def test_a_bad_end_comes_with_the_last_words(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def scenario() -> None:
        await bench.group.start(WORLD, (0, 1))
        text = b'Traceback (most recent call last):\n  File "t.py", line 1\nRuntimeError: Connection closed by peer\n'
        bench.processes.write(1001, stderr=text)
        ended = await bench.group.ended(1001, 1)
        assert ended is not None
        assert (ended.round, ended.slot, ended.exit_code) == (3, 1, 1)
        assert ended.exception == "RuntimeError: Connection closed by peer"
        assert ended.traceback == ended.tail == text.decode().rstrip()
        assert ended.peer_loss
        assert bench.group.place(1001) is None
        assert await bench.group.ended(1001, 1) is None

    play(bench, scenario)


def test_the_error_file_knows_better(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def scenario() -> None:
        await bench.group.start(WORLD, (0, 1))
        await bench.group.done(DEADLINE_S)
        (tmp_path / "attempt_2" / "0" / "error.json").write_text('{"message": "from the file"}')
        ended = await bench.group.ended(1000, 1)
        assert ended is not None
        assert ended.exception == "from the file"

    play(bench, scenario)


def test_one_that_the_kernel_has_killed_for_lack_of_memory_is_told_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)

    async def scenario() -> None:
        await bench.group.start(WORLD, (0, 1))
        monkeypatch.setattr(OutOfMemory, "look", lambda self: "out of memory: the kernel killed a process")
        killed, stopped = [await bench.group.ended(1000 + rank, -number) for rank, number in ((0, 9), (1, 15))]
        assert killed is not None and stopped is not None
        assert killed.exception == "out of memory: the kernel killed a process"
        assert stopped.exception == "", "no kernel sends this one"

    play(bench, scenario)


def test_a_good_end_has_no_last_words(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def scenario() -> None:
        await bench.group.start(WORLD, (0, 1))
        bench.processes.write(1000, stderr=b"ValueError: only a log line\n")
        assert await bench.group.ended(1000, 0) == WorkerEnded(Round(3), 0, 0)

    play(bench, scenario)


def test_output_goes_where_it_was_asked_for(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    bench = Bench(tmp_path, redirect_all=1, tee_all=2)

    async def scenario() -> None:
        await bench.group.start(WORLD, (0, 1))
        bench.processes.write(1001, stdout=b"to the file\n", stderr=b"to both\n")
        await bench.group.ended(1001, 0)
        await bench.group.done(DEADLINE_S)
        folder = tmp_path / "attempt_2" / "1"
        assert (folder / "stdout.log").read_bytes() == b"to the file\n"
        assert (folder / "stderr.log").read_bytes() == b"to both\n"

    play(bench, scenario)
    shown = capfdbinary.readouterr()
    assert shown.out == b""
    assert shown.err == b"[default2@b]:to both\n"


def test_a_worker_that_cannot_be_created_is_an_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.processes.fail_at = "1"

    async def scenario() -> None:
        ends = await bench.group.start(WORLD, (0, 1))
        assert ends == [WorkerEnded(Round(3), 1, CANNOT_START, exception="no more processes")]
        assert bench.group.place(1000) == (Round(3), 0)

    play(bench, scenario)


@pytest.mark.parametrize("pipes", [0, 1, 2, 3])
def test_so_is_one_for_whose_output_there_is_no_pipe(
    pipes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    real, made = os.pipe, [0]

    def scarce() -> tuple[int, int]:
        if made[0] == pipes:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made[0] += 1
        return real()

    async def scenario() -> None:
        monkeypatch.setattr(os, "pipe", scarce)
        ends = await bench.group.start(WORLD, (0, 1))
        assert [end.slot for end in ends] == ([1] if pipes >= 2 else [0, 1])
        assert {end.exit_code for end in ends} == {CANNOT_START}
        assert "Too many open files" in ends[0].exception

    play(bench, scenario)


def test_the_end_of_a_workers_output_is_noticed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def scenario() -> None:
        before = set(os.listdir("/proc/self/fd"))
        await bench.group.start(WORLD, (0, 1))
        bench.processes.end_all()
        for _ in range(20):
            await asyncio.sleep(0)
        assert set(os.listdir("/proc/self/fd")) == before

    play(bench, scenario)


def test_a_folder_that_cannot_be_made_does_not_stop_training(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"")
    bench = Bench(tmp_path / "taken")

    async def scenario() -> None:
        assert await bench.group.start(WORLD, (0, 1)) == []
        await bench.group.done(DEADLINE_S)
        said = [line for line in bench.said if not line.startswith("worker processes: ")]
        assert len(said) == 2
        assert "training continues" in said[0]

    play(bench, scenario)
