"""The reconciler's shell beside a Master that is played here, with a scheduler in memory."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from edl.adapters.clock import SystemClock
from edl.errors import FencedOut, SchedulerError, SettingError
from edl.job_records import SizeOwner
from edl.schedulers import reconcile, shell
from edl.schedulers.port import Observation, Scheduler
from edl.schedulers.shell import Reconciler, job_of
from edl.testing.memory_scheduler import MemoryScheduler
from edl.wire.scale_requests import Drain, Granted, Resize, ScaleRequest, ScaleView, Verdict
from edl.wire.status import JobStatus, NodeView
from tests.support.unhandled import run_strictly

LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the real clock's periods; test_reconcile.py tests them on a fake clock."""
    for name in ("LOOK_S", "FIRST_RETRY_S", "SAME_AGAIN_S", "END_RETRY_S"):
        monkeypatch.setattr(reconcile, name, 0.05)


class FakeMaster:
    """A Master that accepts every request; its world is all present nodes, up to the desired size."""

    def __init__(self, scheduler: MemoryScheduler) -> None:
        self.scheduler = scheduler
        self.desired = 0
        self.ended = False
        self.drained: set[str] = set()
        self.requests: list[ScaleRequest] = []
        self.waiting = ""
        self._changed = asyncio.Event()

    def status(self) -> JobStatus:
        names = [name for name in self.scheduler.names if name not in self.drained]
        limit = self.desired or 6
        views = tuple(
            NodeView(name, f"10.0.0.{n}", 1, "running" if n < limit else "spare", True, n if n < limit else -1, n)
            for n, name in enumerate(names)
        )
        phase = "ended" if self.ended else "running" if names else "forming"
        scale = ScaleView(1, 6, 1, limit, asked=self.desired)
        return JobStatus("job", phase, 1, len(views), "", "1:6", "elastic", 0, 3, "n-0", views, (), (), scale=scale)

    async def submit(self, request: ScaleRequest) -> Granted:
        self.requests.append(request)
        if isinstance(request, Drain):
            self.drained |= set(request.nodes)
        if isinstance(request, Resize):
            self.desired = request.nodes
        self.tell()
        return Granted(Verdict.ACCEPTED, "yes")

    async def changed(self) -> None:
        await asyncio.sleep(0.01)

    def explain(self, text: str) -> None:
        self.waiting = text

    def tell(self) -> None:
        self._changed.set()


class Bench:
    def __init__(self, owner: SizeOwner = SizeOwner.MASTER, **kind: Any) -> None:
        self.scheduler = MemoryScheduler(**kind)
        self.master = FakeMaster(self.scheduler)
        self.said: list[str] = []
        self.one = Reconciler(self._make, self.master, SystemClock(), owner, self.said.append)

    def _make(self) -> Scheduler:
        return self.scheduler

    async def until(self, condition: Callable[[], bool]) -> None:
        async def poll() -> None:
            while not condition():  # noqa: ASYNC110 - what is waited for is in several objects
                await asyncio.sleep(0.005)

        await asyncio.wait_for(poll(), LIMIT_S)


def play(story: Callable[[Bench], Awaitable[None]], **kind: Any) -> Bench:
    async def run() -> Bench:
        bench = Bench(**kind)
        bench.scheduler.resize(2)
        task = asyncio.ensure_future(bench.one.run())
        try:
            await story(bench)
        finally:
            task.cancel()
            await asyncio.wait({task}, timeout=LIMIT_S)
        assert task.cancelled() or task.exception() is None
        assert bench.scheduler.closed
        return bench

    return run_strictly(run())


def test_up_and_down() -> None:
    async def story(bench: Bench) -> None:
        bench.master.desired = 4
        await bench.until(lambda: len(bench.scheduler.names) == 4)
        bench.master.desired = 1
        await bench.until(lambda: len(bench.scheduler.names) == 1)

    bench = play(story)
    assert [call for call in bench.scheduler.calls if call != "current"] == ["request 4", "release 1 n-1 n-2 n-3"]
    assert [request.nodes for request in bench.master.requests if isinstance(request, Drain)] == [("n-1", "n-2", "n-3")]


def test_an_external_size_and_a_doomed_node_become_requests() -> None:
    async def story(bench: Bench) -> None:
        await bench.until(lambda: bench.master.desired == 2)
        bench.scheduler.resize(5)
        await bench.until(lambda: bench.master.desired == 5)
        bench.scheduler.doom("n-1", "spot", 60.0)
        await bench.until(lambda: bool(bench.master.drained))

    bench = play(story, owner=SizeOwner.EXTERNAL)
    assert bench.master.requests[-1] == Drain(("n-1",), "memory", "spot", 60.0)
    assert set(bench.scheduler.calls) <= {"current"}


def test_a_silent_scheduler_is_given_up_waiting_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "CALL_LIMIT_S", 0.05)

    async def story(bench: Bench) -> None:
        bench.scheduler.silent = True
        bench.master.desired = 4
        await bench.until(lambda: "has not answered" in bench.master.waiting)
        bench.scheduler.silent = False
        await bench.until(lambda: len(bench.scheduler.names) == 4)
        await bench.until(lambda: not bench.master.waiting)

    bench = play(story)
    assert sum("has not answered" in line for line in bench.said) == 1
    assert "memory answers again" in bench.said


def test_a_flaw_of_an_adapter_is_an_error_like_others() -> None:
    async def story(bench: Bench) -> None:
        async def current() -> Any:
            raise KeyError("spec")

        bench.scheduler.current = current  # type: ignore[method-assign]
        await bench.until(lambda: "KeyError" in bench.master.waiting)

    play(story)


def test_a_watch_that_gives_up_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "WATCH_AGAIN_S", 0.02)

    async def story(bench: Bench) -> None:
        watch, begun = bench.scheduler.watch, 0

        def counted() -> AsyncIterator[Observation]:
            nonlocal begun
            begun += 1
            return watch()

        bench.scheduler.watch = counted  # type: ignore[method-assign]
        bench.scheduler.failure = SchedulerError("memory: 403", retry=False)
        await bench.until(lambda: begun >= 4)
        bench.scheduler.failure = None
        bench.scheduler.resize(3)
        await bench.until(lambda: bench.master.desired == 3)

    bench = play(story, owner=SizeOwner.EXTERNAL)
    assert bench.said.count("memory: 403 (retrying every 0.02 s)") == 1


def test_a_flaw_in_a_watch_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "WATCH_AGAIN_S", 0.02)

    async def story(bench: Bench) -> None:
        watch, flaws = bench.scheduler.watch, [KeyError("spec"), SchedulerError("memory: 503", retry=True)]
        monkeypatch.setattr(shell, "WATCH_RETRY_S", 0.03)

        async def flawed() -> Any:
            if flaws:
                raise flaws.pop(0)
            async for observation in watch():
                yield observation

        bench.scheduler.watch = flawed  # type: ignore[method-assign]
        await bench.until(lambda: not flaws)
        await asyncio.sleep(0.1)
        bench.scheduler.doom("n-1", "spot")
        await bench.until(lambda: bool(bench.master.drained))

    bench = play(story, owner=SizeOwner.EXTERNAL)
    assert "the scheduler's adapter: KeyError: 'spec' (retrying every 0.02 s)" in bench.said
    assert "memory: 503 (retrying every 0.03 s)" in bench.said


@pytest.mark.parametrize("how", ["silent", "flawed"])
def test_a_request_that_the_master_cannot_take_is_put_to_it_again(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "REQUEST_LIMIT_S", 0.05)
    monkeypatch.setattr(reconcile, "UNHEARD_S", 0.05)

    async def story(bench: Bench) -> None:
        request = bench.master.submit

        async def trouble(request: ScaleRequest) -> Granted:
            if how == "silent":
                await asyncio.Event().wait()
            raise ValueError("flaw")

        await bench.until(lambda: bench.master.desired == 2)
        bench.master.submit = trouble  # type: ignore[method-assign]
        bench.scheduler.doom("n-1", "spot")
        await bench.until(lambda: any(line.startswith("memory: the Master") for line in bench.said))
        bench.master.submit = request  # type: ignore[method-assign]
        await bench.until(lambda: bench.master.drained == {"n-1"})

    play(story, owner=SizeOwner.EXTERNAL)


def test_a_reason_is_one_short_line_whatever_was_written() -> None:
    """It becomes an argument of programs: no zero bytes, nothing that cannot be encoded, and not a megabyte."""
    status = FakeMaster(MemoryScheduler()).status()
    for written, made in (
        ('two "words"\n; rm -rf $HOME\0\x1b[31m', 'two "words" ; rm -rf $HOME [31m'),
        ("größer \ud800 größer", "größer größer"),
        ("x" * 1_000_000, "x" * shell.MOST_REASON),
    ):
        scale = dataclasses.replace(status.scale, reason=written)
        assert job_of(dataclasses.replace(status, scale=scale)).reason == made


def test_at_the_end_it_asks_for_none_and_ends() -> None:
    async def run() -> None:
        bench = Bench(ask_none_at_end=True)
        bench.scheduler.resize(2)
        task = asyncio.ensure_future(bench.one.run())
        await bench.until(lambda: "current" in bench.scheduler.calls)
        bench.master.ended = True
        await asyncio.wait_for(task, LIMIT_S)
        assert bench.scheduler.names == []
        assert bench.scheduler.closed

    run_strictly(run())


def test_an_adapter_that_cannot_be_made_leaves_the_job_alone() -> None:
    async def run() -> list[str]:
        said: list[str] = []

        def make() -> Scheduler:
            raise SettingError("--scheduler", "it", "is not here")

        master = FakeMaster(MemoryScheduler())
        await Reconciler(make, master, SystemClock(), SizeOwner.MASTER, said.append).run()
        return said

    (line,) = asyncio.run(run())
    assert line.startswith("cannot use the scheduler")


def test_the_end_of_the_rule_is_no_error() -> None:
    async def story(bench: Bench) -> None:
        asked = 0

        async def changed() -> None:
            nonlocal asked
            asked += 1
            raise FencedOut("over")

        bench.master.changed = changed  # type: ignore[method-assign]
        await bench.until(lambda: asked > 0)

    play(story)


def test_what_it_makes_of_a_status() -> None:
    master = FakeMaster(MemoryScheduler())
    master.scheduler.resize(3)
    master.desired = 2
    status = master.status()
    scale = dataclasses.replace(status.scale, cordoned=("n-2",), suspended=True, reason="why")
    made = job_of(dataclasses.replace(status, scale=scale))
    assert (made.minimum, made.maximum, made.desired, made.asked, made.running) == (1, 6, 2, True, True)
    assert (made.suspended, made.ended, made.reason) == (True, False, "why")
    assert [(node.name, node.member, node.spare, node.cordoned, node.is_master) for node in made.nodes] == [
        ("n-0", True, False, False, True),
        ("n-1", True, False, False, False),
        ("n-2", False, True, True, False),
    ]
