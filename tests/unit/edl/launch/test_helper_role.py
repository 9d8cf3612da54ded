"""Launchers that have helpers only: a store that refuses by now, a job that is founded again, signals to leave."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import cast

import pytest

from edl import __version__
from edl.config import JobSpec
from edl.errors import StoreError
from edl.exit_codes import ExitCode
from edl.launch import helper_role as role_module
from edl.launch import helpers as helpers_module
from edl.launch.helper_role import _Departure, _FoundedJob, _JobPoll, _take_part
from edl.launch.helpers import Helpers
from edl.launch.settings import Backend, HelperSettings, StoreSettings
from edl.ports import Delete, Put
from edl.tasks import end
from edl.types import NodeId
from edl.wire import plain
from tests.support.waiting import play, until
from tests.unit.edl.launch.test_helper_versions import founded
from tests.unit.edl.launch.test_helpers import ERRORS, FaultyStore, Kind
from tests.unit.edl.launch.test_registration import KEYS, SPEC, info

SETTINGS = HelperSettings(KEYS.job, StoreSettings(Backend.ETCD), "b", "127.0.0.1", recover_s=60.0, grace_s=5.0)
SERVERS = KEYS.helper("ps", "servers/")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_module, "LOOK_S", 0.001)
    for name in ("RETRY_S", "FIRST_PAUSE_S"):
        monkeypatch.setattr(helpers_module, name, 0.001)


def lasting(recover_s: float) -> _FoundedJob:
    """The job of ``SPEC`` with this ``--recover-timeout``, founded with an empty run."""
    timeouts = dataclasses.replace(SPEC.timeouts, recover_s=recover_s)
    return _FoundedJob(dataclasses.replace(SPEC, timeouts=timeouts), "t" * 32, (b"t" * 32, b""))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_it_waits_for_a_store_that_refuses_by_now(error: StoreError) -> None:
    async def scenario() -> None:
        store = FaultyStore()
        there = Put(KEYS.node(NodeId("a")), plain.dumps(info("a")))
        store.write_now([Put(KEYS.spec, plain.dumps(SPEC)), Put(KEYS.token, b"t" * 32), there])
        watching = asyncio.ensure_future(_JobPoll(store, KEYS, 60.0, None, "").until_ended(lasting(60.0)))
        store.error = error
        for _ in range(3):
            await store.refusals.acquire()
        assert not watching.done()
        watching.cancel()
        with pytest.raises(type(error)):
            await _JobPoll(store, KEYS, 60.0, None, "").until_ended(lasting(0.001))

    play(scenario())


class Serving:
    """A launcher of one pserver that takes part in a job."""

    def __init__(self) -> None:
        self.store, self.said = FaultyStore(), list[str]()
        self.kinds: list[Kind] = []
        self.jobs: list[tuple[JobSpec, str]] = []
        self.groups: list[Helpers] = []

    def make(self, spec: JobSpec, token: str) -> Kind:
        self.jobs.append((spec, token))
        self.kinds.append(Kind())
        return self.kinds[-1]

    def begin(self) -> asyncio.Future[int]:
        return asyncio.ensure_future(_take_part(SETTINGS, self.store, self.groups, self.make, self.said.append))

    def keys(self) -> list[str]:
        return [entry.key for entry in self.store.read_now(SERVERS).entries]

    async def end(self, work: asyncio.Future[int]) -> None:
        await end(work)
        for helpers in self.groups:
            await helpers.leave()


def test_a_job_that_is_founded_again_gets_pservers_with_its_new_secret() -> None:
    """All launchers with workers were killed, and one was started again with other settings. No launcher has said
    farewell, so only the token tells."""

    async def scenario() -> None:
        serving = Serving()
        founded(serving.store, __version__, b"t" * 32)
        work = serving.begin()
        await until(lambda: len(serving.keys()) == 1)
        founded(serving.store, __version__, b"u" * 32)
        await until(lambda: len(serving.kinds) == 2 and len(serving.keys()) == 1)
        assert [token for _, token in serving.jobs] == ["t" * 32, "u" * 32]
        assert serving.kinds[0].started[0].over.is_set() and not serving.kinds[1].started[0].over.is_set()
        assert len(serving.groups) == 1 and not work.done()
        assert any("has been founded again: replacing all processes" in line for line in serving.said)
        await serving.end(work)
        assert serving.kinds[1].started[0].over.is_set() and not serving.keys()

    play(scenario())


def test_with_a_secret_the_run_tells_that_the_job_was_founded_again() -> None:
    async def scenario() -> None:
        serving = Serving()
        founded(serving.store, __version__, b"t" * 32)
        serving.store.write_now([Put(KEYS.run, b"first")])
        work = serving.begin()
        await until(lambda: len(serving.keys()) == 1)
        serving.store.write_now([Put(KEYS.run, b"second")])
        await until(lambda: len(serving.kinds) == 2)
        await serving.end(work)

    play(scenario())


def test_it_ends_with_the_job() -> None:
    async def scenario() -> None:
        serving = Serving()
        founded(serving.store, __version__, b"t" * 32)
        work = serving.begin()
        await until(lambda: len(serving.keys()) == 1)
        serving.store.write_now([Delete(KEYS.token)])
        assert await work == ExitCode.OK
        assert serving.said[-1] == f"job {KEYS.job} has ended"
        await serving.end(work)

    play(scenario())


class Group:
    """Helpers that record what they are asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def drain(self) -> None:
        self.asked.append("drain")

    def kill(self) -> None:
        self.asked.append("kill")


def test_only_the_second_signal_to_leave_kills_however_often_it_was_announced() -> None:
    """Slurm sends SIGUSR2 some time before SIGTERM."""

    async def scenario() -> None:
        departure, group = _Departure(), Group()
        departure.groups.append(cast(Helpers, group))
        departure.announced()
        departure.interrupted()
        departure.announced()
        assert set(group.asked) == {"drain"} and departure.begun.is_set()
        departure.interrupted()
        assert group.asked.count("kill") == 1

    play(scenario())
