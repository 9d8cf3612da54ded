"""A store, a clock and agents' streams around a Master, for the tests of its shells."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from edl.config import JobSpec, NodeRange, Timeouts
from edl.errors import FencedOut, StoreError, StoreUnavailable
from edl.master.election import MasterInfo
from edl.master.shell import MasterDeps, MasterShell
from edl.master.state import Record
from edl.master.stored import record_in
from edl.ports import Change, Condition, Delete, Operation, Put
from edl.testing.clock import FakeClock
from edl.testing.memory_store import MemoryStore
from edl.types import FencingToken, Incarnation, JobId, NodeId, Round
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.messages import AgentMessage, Attach, Finish, MasterMessage, Ready
from edl.wire.records import NodeInfo
from edl.wire.status import HistoryEntry
from tests.support.unhandled import run_strictly

T = TypeVar("T")

JOB = JobId("my-job")
KEYS = JobKeys(JOB)
TTL_S = 3.0
SPEC = JobSpec(JOB, NodeRange(1, 1), timeouts=Timeouts(lease_ttl_s=TTL_S, join_grace_s=0))
TURNS = 2000
"""Turns of the event loop that a test waits for something to happen."""


class FaultyStore(MemoryStore):
    """A store whose writes can fail, before or after they happened, and whose watches can break."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.fail_writes = 0
        self.fail_after_writing = 0
        self.break_watches: list[StoreError] = []
        self.watches = 0
        self.writes = 0
        self.on_failure: Callable[[], None] = lambda: None

    async def write(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = (), *, repeatable: bool = False
    ) -> int | None:
        if self.fail_writes:
            self.fail_writes -= 1
            self.on_failure()
            raise StoreUnavailable("no answer")
        self.writes += 1
        revision = self.write_now(operations, conditions)
        if self.fail_after_writing:
            self.fail_after_writing -= 1
            raise StoreUnavailable("no answer, but it happened")
        return revision

    async def watch(self, prefix: str, after_revision: int) -> AsyncIterator[Change]:
        self.watches += 1
        async for change in super().watch(prefix, after_revision):
            if self.break_watches:
                raise self.break_watches.pop()
            yield change


class Bench:
    """A store, a clock, and what a Master said to its launcher's log."""

    def __init__(self) -> None:
        self.clock = FakeClock(100.0)
        self.store = FaultyStore(self.clock)
        self.said: list[str] = []
        self.dead_ports: set[int] = set()
        self._tasks: list[asyncio.Future[Any]] = []

    def deps(self, node: str = "a", spec: JobSpec = SPEC) -> MasterDeps:
        async def refuses(host: str, port: int, timeout_s: float = 1.0) -> bool:
            return port in self.dead_ports

        return MasterDeps(
            self.store, self.clock, KEYS, spec, NodeId(node), refuses, self.said.append, lambda: 1_760_000_000.0
        )

    def crown(self) -> FencingToken:
        """Replace the election key; returns its token."""
        self.store.write_now([Delete(KEYS.master)])
        revision = self.store.write_now([Put(KEYS.master, plain.dumps(MasterInfo(NodeId("a"), "h", 1)))])
        assert revision is not None
        return FencingToken(revision)

    def register(self, name: str, port: int = 5000) -> NodeInfo:
        lease = Incarnation(self.store.grant_now(TTL_S))
        info = NodeInfo(NodeId(name), lease, "10.0.0.1", port, 2)
        self.store.write_now([Put(KEYS.node(info.node), plain.dumps(info), lease)])
        return info

    def start(self, work: Coroutine[None, None, T]) -> asyncio.Future[T]:
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        return task

    async def master(self, spec: JobSpec = SPEC) -> tuple[MasterShell, asyncio.Future[Finish]]:
        """A Master that has taken over."""
        shell = MasterShell(self.deps(spec=spec), self.crown())
        run = self.start(shell.run())
        await until(lambda: shell.serving or run.done())
        return shell, run

    def record(self) -> Record | None:
        return record_in({entry.key: entry.value for entry in self.store.read_now(KEYS.prefix).entries}, KEYS)

    def history(self) -> list[HistoryEntry]:
        return [plain.loads(HistoryEntry, entry.value) for entry in self.store.read_now(KEYS.history).entries]

    def stored(self) -> list[str]:
        return [entry.key for entry in self.store.read_now("").entries]

    async def failure(self, task: asyncio.Future[Any]) -> BaseException | None:
        """The exception of a task that is expected to fail, or None."""
        await until(task.done)
        self._tasks.remove(task)
        return task.exception()

    async def end(self) -> None:
        """Cancel what still runs. A Master may have been replaced; any other failure is the test's."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, FencedOut):
                await task


class Agent:
    """A node's end of a stream."""

    def __init__(self, bench: Bench, shell: MasterShell, info: NodeInfo) -> None:
        self.info = info
        self.shell = shell
        self.heard: list[MasterMessage] = []
        self._outgoing: asyncio.Queue[AgentMessage | Exception | None] = asyncio.Queue()
        self.stream = bench.start(self._listen(shell))

    def say(self, message: AgentMessage | Exception | None) -> None:
        self._outgoing.put_nowait(message)

    def attach(self, running: int = 0) -> None:
        self.say(Attach(self.info, Round(running), Round(running), False))

    def ready(self, seen: int = 0) -> None:
        self.say(Ready(Round(seen), (100, 101, 102)))

    def last(self) -> type[MasterMessage] | None:
        return type(self.heard[-1]) if self.heard else None

    async def hears(self, kind: type[MasterMessage]) -> MasterMessage:
        await until(lambda: self.last() is kind)
        return self.heard[-1]

    async def _requests(self) -> AsyncIterator[AgentMessage]:
        while (message := await self._outgoing.get()) is not None:
            if isinstance(message, Exception):
                raise message
            yield message

    async def _listen(self, shell: MasterShell) -> None:
        async for message in shell.join(self._requests()):
            self.heard.append(message)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(TURNS):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come")


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def play(scenario: Callable[[Bench], Coroutine[None, None, None]]) -> None:
    """Also what goes wrong where only the event loop sees it counts."""

    async def whole() -> None:
        bench = Bench()
        try:
            await asyncio.wait_for(scenario(bench), 10)
        finally:
            await bench.end()

    run_strictly(whole())
