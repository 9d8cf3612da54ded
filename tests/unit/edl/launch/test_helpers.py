"""Helpers of a launcher outlast a store that does not answer or refuses, and a host without room for a process."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from edl.errors import StoreError, StoreFull, StoreRefused, StoreUnavailable, WorkerStartError
from edl.launch import helpers as helpers_module
from edl.launch.helper_process import HelperProcess
from edl.launch.helpers import HelperDeps, HelperProcesses, Helpers
from edl.launch.pservers import Pservers
from edl.ports import Put
from edl.tasks import end
from edl.testing.clock import FakeClock
from edl.testing.memory_store import MemoryStore
from ps.server.eviction_task import STOP_S
from ps.server.process import FINISH_S
from tests.support.waiting import play, until
from tests.unit.edl.launch.test_registration import KEYS

ERRORS: Sequence[StoreError] = (StoreUnavailable("silent"), StoreFull("no room"), StoreRefused("wrong password"))


class FaultyStore(MemoryStore):
    """Raises ``error``, if there is one, in reads and renewals."""

    def __init__(self) -> None:
        super().__init__(FakeClock())
        self.error: StoreError | None = None
        self.refusals = asyncio.Semaphore(0)

    async def read(self, prefix: str) -> Any:
        self._fail()
        return await super().read(prefix)

    async def renew_lease(self, lease: int) -> float:
        self._fail()
        return await super().renew_lease(lease)

    def _fail(self) -> None:
        if self.error is not None:
            self.refusals.release()
            raise self.error


class Pserver:
    """A process that runs until it is killed."""

    masterless = False
    writes = False
    ready: Mapping[str, Any] = {"port": 7}

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.over = asyncio.Event()
        self.stopped = (-1.0, False)

    async def ended(self) -> str:
        await self.over.wait()
        return "was killed"

    def kill(self) -> None:
        self.over.set()

    async def stop(self, grace_s: float, *, drains: bool = False) -> None:
        self.stopped = grace_s, drains
        self.over.set()


class Kind:
    """A kind with one process, which cannot be started while ``trouble`` lasts."""

    what, service, folder, count, fenced = "pserver", "ps", "servers", 1, True
    grace_s = farewell_s = drain_s = 0.0

    def __init__(self) -> None:
        self.started: list[Pserver] = []
        self.trouble: list[Exception] = []

    async def start(self, index: int, name: str, host: str) -> HelperProcess:
        if self.trouble:
            raise self.trouble.pop(0)
        self.started.append(Pserver(len(self.started) + 1))
        return cast(HelperProcess, self.started[-1])

    def key_content(self, process: HelperProcess, host: str) -> Mapping[str, Any]:
        return {"pid": process.pid}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_S", "FIRST_PAUSE_S"):
        monkeypatch.setattr(helpers_module, name, 0.001)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_store_that_refuses_by_now_counts_as_one_that_is_away(error: StoreError) -> None:
    """Processes continue, and have their keys again once the store answers. Said once."""

    async def scenario() -> None:
        store, kind, said = FaultyStore(), Kind(), list[str]()
        group = HelperProcesses(HelperDeps(store, KEYS, 0.03, "a", "host-a", said.append), kind)
        key = KEYS.helper("ps", "servers/a-1")
        await until(lambda: bool(store.read_now(key).entries))
        store.error = error
        for _ in range(5):
            await store.refusals.acquire()
        assert not kind.started[0].over.is_set()
        assert sum("the store " in line for line in said) == 1
        store.error = None
        store.write_now([Put(key, b"changed by somebody")])
        await until(lambda: store.read_now(key).entries[0].value != b"changed by somebody")
        assert "the store answers again" in said
        assert not any("continuing without" in line for line in said)
        await group.leave()
        assert kind.started[0].over.is_set()

    play(scenario())


def test_a_process_that_cannot_be_started_for_a_while_is_started_later() -> None:
    async def scenario() -> None:
        store, kind, said = FaultyStore(), Kind(), list[str]()
        group = HelperProcesses(HelperDeps(store, KEYS, 0.03, "a", "host-a", said.append), kind)
        await until(lambda: len(kind.started) == 1)
        kind.trouble = [WorkerStartError("no room")] * 5
        kind.started[0].kill()
        await until(lambda: len(kind.started) == 2)
        assert said.count("no room") == 5
        await group.leave()

    play(scenario())


def test_a_group_that_fails_says_so_and_ends_its_processes() -> None:
    """Nobody looks at the result of its task before the node leaves."""

    async def scenario() -> None:
        store, kind, said = FaultyStore(), Kind(), list[str]()
        kind.count = 2
        group = HelperProcesses(HelperDeps(store, KEYS, 0.03, "a", "host-a", said.append), kind)
        await until(lambda: len(kind.started) == 2)
        kind.trouble = [RuntimeError("a mistake")]
        kind.started[0].kill()
        await until(lambda: kind.started[1].over.is_set())
        assert not store.read_now(KEYS.helper("ps", "servers/")).entries
        (line,) = (line for line in said if "continuing without pservers on this node" in line)
        assert "a bug in edl" in line and "a mistake" in line
        await group.leave()

    play(scenario())


class LeavingPserver(Pserver):
    """A process that passes on its data until it is killed."""

    def ask_to_end(self) -> None:
        pass


class DrainingKind(Kind):
    """A kind whose processes pass on their data."""

    drain_s = 60.0

    async def start(self, index: int, name: str, host: str) -> HelperProcess:
        self.started.append(LeavingPserver(1))
        return cast(HelperProcess, self.started[-1])


def test_processes_of_a_launcher_whose_name_goes_on_can_take_over() -> None:
    """Those of node a-1 are not those of node a."""

    async def scenario() -> None:
        store, kind, said = FaultyStore(), DrainingKind(), list[str]()
        store.write_now([Put(KEYS.helper("ps", "servers/a-1-1"), b"{}")])
        helpers = Helpers(HelperDeps(store, KEYS, 10.0, "a", "host-a", said.append), kind)
        running = asyncio.ensure_future(helpers.run())
        await until(lambda: bool(kind.started))
        helpers.drain()
        await until(lambda: any(b"draining" in one.value for one in store.peek(KEYS.helper("ps", "servers/"))))
        leaving = asyncio.ensure_future(helpers.drained())
        for _ in range(20):
            await asyncio.sleep(0)
        kind.started[0].kill()
        await leaving
        assert not any("no other pserver" in text for text in said), said
        await end(running)

    play(scenario())


def test_a_host_without_room_for_a_process_is_an_error_that_names_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*command: str, **options: object) -> object:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(WorkerStartError, match=r"cannot start a reader process: Resource temporarily.*ulimit"):
        play(cast(Any, HelperProcess.start("reader", ("data_service", "reader"), {})))


@pytest.mark.parametrize("writes", [True, False])
def test_pservers_get_time_to_write_evicted_rows_at_the_end(writes: bool) -> None:
    """They serve no more by then: SIGTERM would let them wait for others that take over."""

    async def scenario() -> None:
        store, kind = FaultyStore(), Kind()
        kind.grace_s, kind.drain_s = Pservers.grace_s, 15.0
        group = HelperProcesses(HelperDeps(store, KEYS, 0.03, "a", "host-a", lambda line: None), kind)
        await until(lambda: bool(store.read_now(KEYS.helper("ps", "servers/a-1")).entries))
        kind.started[0].writes = writes
        await group.leave()
        assert not store.read_now(KEYS.helper("ps", "servers/")).entries
        grace_s, drains = kind.started[0].stopped
        assert drains and (grace_s > FINISH_S + STOP_S if writes else not grace_s)

    play(scenario())


def test_a_process_that_drains_at_sigterm_ends_when_its_input_is_closed() -> None:
    async def scenario() -> None:
        cat = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
        await HelperProcess(cat, {"port": 7}).stop(30.0, drains=True)
        assert cat.returncode == 0, "neither killed nor terminated"

    play(scenario())


def test_a_notice_and_a_signal_drain_once_and_only_the_second_signal_kills() -> None:
    """And none is started in their place."""

    async def scenario() -> None:
        store, kind = FaultyStore(), DrainingKind()
        store.write_now([Put(KEYS.helper("ps", "servers/other-1"), b"{}")])
        group = HelperProcesses(HelperDeps(store, KEYS, 10.0, "a", "host-a", lambda line: None), kind)
        await until(lambda: bool(store.read_now(KEYS.helper("ps", "servers/a-1")).entries))
        group.drain()
        group.drain()
        leaving = asyncio.ensure_future(group.leave())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not leaving.done() and not kind.started[0].over.is_set()
        group.hurry()
        await leaving
        assert kind.started[0].over.is_set() and len(kind.started) == 1

    play(scenario())
