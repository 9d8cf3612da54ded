"""How a launcher ends: what its sidecars pass on, who is the Master meanwhile, and what becomes of the store's data."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from edl.agent.machine.events import Interrupted
from edl.agent.machine.state import Outcome
from edl.launch import launcher as launcher_module
from edl.launch.launcher import Launcher, LauncherDeps
from edl.master.candidate import Candidate, CandidateCallbacks
from edl.master.election import MasterInfo
from edl.testing.clock import FakeClock
from edl.testing.memory_store import MemoryStore
from edl.types import Incarnation, NodeId
from edl.wire.records import NodeInfo
from tests.support.master_fixture import KEYS, TTL_S, Bench
from tests.support.waiting import play, until

INFO = NodeInfo(NodeId("a"), Incarnation(1), "host-a", 5000, 1)


class Recorder:
    """A sidecar, an agent, a registration, a member of the store and what else a launcher has: records what happens."""

    lease_s = TTL_S

    def __init__(self) -> None:
        self.did: list[str] = []
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.lease = Incarnation(1)
        self.may_leave = asyncio.Event()
        """Whether the sidecar can leave."""
        self.renews = False
        self.posted: list[object] = []

    # --- the agent

    async def run(self) -> Outcome:
        return await self.outcome

    def post(self, event: object) -> None:
        self.posted.append(event)

    def leased(self, asked_s: float) -> None:
        pass

    def forward(self, number: int) -> None:
        pass

    # --- the registration

    async def keep(self, renewed: Callable[[float], None], missed: Callable[[], None]) -> None:
        self.renews = True
        try:
            await asyncio.Event().wait()
        finally:
            self.renews = False

    # --- the member of the store

    async def wait_exit(self) -> int:
        await asyncio.Event().wait()
        return 0

    def discard(self) -> None:
        self.did.append("discard")

    # --- sidecar, server and member

    def drain(self) -> None:
        self.did.append("drain")

    def hurry(self) -> None:
        self.did.append("hurry")

    async def stop(self, grace_s: float = 0.0) -> None:
        pass


class Sidecar(Recorder):
    """A sidecar that leaves once it may."""

    async def leave(self) -> None:
        await self.may_leave.wait()
        self.did.append("left")


class Registered(Recorder):
    """A registration that revokes the lease in the store."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self._store = store

    async def leave(self) -> None:
        self.did.append("unregistered")
        await self._store.revoke_lease(self.lease)


class NoCandidate:
    """Takes no part in elections."""

    shell = None

    async def run(self) -> None:
        await asyncio.Event().wait()

    def registered(self, lease: Incarnation) -> None:
        pass

    async def resign(self) -> None:
        pass


def nothing(*_: object) -> None:
    pass


class Launch:
    """A launcher of recorders."""

    def __init__(self, store: MemoryStore, candidate: Candidate | NoCandidate) -> None:
        self.sidecar, self.member, self.agent = Sidecar(), Recorder(), Recorder()
        self.registration = Registered(store)
        self.registration.lease = Incarnation(store.grant_now(TTL_S))
        quiet = SimpleNamespace(write=nothing, keep=nothing, remove=nothing, holds=nothing, end=nothing, folder="")
        deps: Any = {
            "member": self.member,
            "server": self.agent,
            "registration": self.registration,
            "candidate": candidate,
            "agent": self.agent,
            "local_job": quiet,
            "reporter": quiet,
            "guard": lambda renewed: quiet,
            "sidecars": [self.sidecar],
        }
        self.launcher = Launcher(
            LauncherDeps(job=KEYS.job, clock=FakeClock(), store=store, info=INFO, log=nothing, **deps)
        )


@pytest.fixture(autouse=True)
def no_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    async def keep_room(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(launcher_module, "keep_room", keep_room)


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(7, "the fork server cannot be started again"),
        Outcome(4, "neither the store nor a Master was reachable"),
        Outcome(70, "a bug in edl's agent"),
        Outcome(5, "its lease ended; the store has lost its data"),
        Outcome(143, "left the job on SIGTERM"),
        Outcome(0, "left the job on SIGTERM", drained=True),
    ],
    ids=lambda outcome: str(outcome.exit_code),
)
def test_a_launcher_that_leaves_alone_drains_its_sidecars_and_keeps_the_data_of_the_store(outcome: Outcome) -> None:
    """The others still need them: it may be the only member."""

    async def scenario() -> None:
        launch = Launch(MemoryStore(FakeClock()), NoCandidate())
        launch.sidecar.may_leave.set()
        launch.agent.outcome.set_result(outcome)
        assert await launch.launcher.run() == outcome.exit_code
        assert launch.sidecar.did == ["drain", "left"]
        assert launch.member.did == []

    play(scenario())


@pytest.mark.parametrize("code", [0, 1, 143])
def test_when_the_job_is_over_nothing_is_passed_on_and_the_data_of_the_store_are_deleted(code: int) -> None:
    async def scenario() -> None:
        launch = Launch(MemoryStore(FakeClock()), NoCandidate())
        launch.sidecar.may_leave.set()
        launch.agent.outcome.set_result(Outcome(code, "over", job_over=True))
        assert await launch.launcher.run() == code
        assert launch.sidecar.did == ["left"]
        assert launch.member.did == ["discard"]

    play(scenario())


def test_a_leaving_master_gives_up_its_office_and_keeps_its_lease_until_its_sidecars_have_left() -> None:
    """Pservers hand over their buckets on the next Master's orders, and others find synchronised files by the node's
    key."""

    async def scenario() -> None:
        bench = Bench()
        callbacks = CandidateCallbacks(nothing, nothing, nothing, nothing)
        launch = Launch(bench.store, Candidate(bench.deps("a"), MasterInfo(NodeId("a"), "host-a", 5000), callbacks))
        running = asyncio.ensure_future(launch.launcher.run())
        await until(lambda: bool(bench.store.read_now(KEYS.master).entries))
        bench.store.fail_writes = 2  # it tries again
        launch.agent.outcome.set_result(Outcome(0, "drained", drained=True))
        await until(lambda: not bench.store.read_now(KEYS.master).entries)
        assert launch.sidecar.did == ["drain"] and launch.registration.did == []
        assert launch.registration.renews
        launch.sidecar.may_leave.set()
        await running
        assert launch.sidecar.did == ["drain", "left"] and launch.registration.did == ["unregistered"]
        assert not launch.registration.renews

    play(scenario())


def test_sidecars_drain_at_the_first_signal_and_hurry_at_the_second() -> None:
    async def scenario() -> None:
        launch = Launch(MemoryStore(FakeClock()), NoCandidate())
        for _ in range(2):
            launch.launcher._interrupt(signal.SIGTERM)
        assert launch.sidecar.did == ["drain", "hurry"]
        again = [event.again for event in launch.agent.posted if isinstance(event, Interrupted)]
        assert again == [False, True]

    play(scenario())
