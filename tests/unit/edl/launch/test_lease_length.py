"""Leases that grow while a launcher keeps losing them although it lives."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from edl.config import JobSpec, NodeRange, Timeouts
from edl.errors import StoreUnavailable
from edl.launch import registration as registration_module
from edl.launch.lease_length import MOST_TIMES, WINDOW_S, LeaseLength
from edl.launch.registration import RETRY_S, Registration
from edl.ports import Put
from edl.testing.clock import FakeClock
from edl.testing.memory_store import MemoryStore
from edl.types import Incarnation, JobId, NodeId
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.records import NodeInfo

TTL_S = 3.0
SPEC = JobSpec(JobId("my-job"), NodeRange(1, 4), timeouts=Timeouts(lease_ttl_s=TTL_S))
KEYS = JobKeys(SPEC.job)
NODE = NodeInfo(NodeId("a"), Incarnation(0), "10.0.0.1", 5000, 1)


def test_one_loss_is_an_accident() -> None:
    length = LeaseLength(TTL_S)
    assert length.next_s(0.0) == TTL_S
    length.lost(10.0)
    assert length.next_s(10.0) == TTL_S


def test_each_further_loss_doubles_the_next_lease_up_to_a_limit() -> None:
    length, granted = LeaseLength(TTL_S), []
    for loss in range(8):
        length.lost(10.0 * loss)
        granted.append(length.next_s(10.0 * loss))
    assert granted == [3.0, 6.0, 12.0, 24.0, 24.0, 24.0, 24.0, 24.0]
    assert granted[-1] == MOST_TIMES * TTL_S


def test_old_losses_are_forgotten() -> None:
    length = LeaseLength(TTL_S)
    for at_s in (0.0, 100.0, 200.0):
        length.lost(at_s)
    assert length.next_s(200.0) == 12.0
    assert length.next_s(WINDOW_S) == 6.0, "the first one no longer counts"
    assert length.next_s(WINDOW_S + 200.0) == 3.0
    length.lost(5000.0)
    assert (length.next_s(5000.0), length.losses(5000.0)) == (3.0, 1)


class Store(MemoryStore):
    """Notes the durations of leases."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        super().__init__(self.clock)
        self.granted: list[float] = []

    async def grant_lease(self, ttl_s: float) -> int:
        self.granted.append(ttl_s)
        return await super().grant_lease(ttl_s)


async def _nobody(host: str, port: int) -> bool:
    return False


def test_a_launcher_asks_for_longer_leases_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    store, said, pauses = Store(), list[str](), list[float]()
    one = Registration(store, KEYS, SPEC, NODE.node, _nobody, _nobody, said.append)

    async def pass_time(seconds: float, until: asyncio.Event) -> None:
        pauses.append(seconds)
        store.revoke_now(one.lease)  # it was held up for too long

    async def lose() -> NodeInfo:
        await one.keep(lambda asked_s: None, lambda: None)
        return await one.rejoin(NODE)

    async def main() -> None:
        await one.agree()
        await one.join(NODE)
        monkeypatch.setattr(registration_module, "pause", pass_time)
        there = [await lose() for _ in range(3)]
        assert [info.lease_s for info in there] == store.granted[1:]

    asyncio.run(main())
    assert store.granted == [3.0, 3.0, 6.0, 12.0]
    assert pauses == [1.0, 1.0, 1.0], "the end of a longer lease is noticed as soon"
    assert [text.rpartition(" lasts ")[2] for text in said] == ["6 s instead of 3 s", "12 s instead of 6 s"]
    assert "has lost its lease 2 times within 10 min" in said[0]


def test_the_lease_of_a_silent_namesake_gets_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be longer than ``--lease-ttl``; a launcher that waits for its end must not give up before."""
    store, said = Store(), list[str]()
    lease = store.grant_now(24.0)
    namesake = NodeInfo(NODE.node, Incarnation(lease), "10.0.0.2", 5001, 1, lease_s=24.0)

    async def pass_time(seconds: float) -> None:
        store.clock.advance(seconds)

    async def main() -> None:
        one = Registration(store, KEYS, SPEC, NODE.node, _nobody, _nobody, said.append)
        await one.agree()
        store.write_now([Put(KEYS.node(NODE.node), plain.dumps(namesake), lease)])
        monkeypatch.setattr(asyncio, "sleep", pass_time)
        assert (await one.join(NODE)).lease_s == TTL_S

    asyncio.run(main())
    assert store.clock.now_s() >= 24.0


def test_a_lease_that_ended_according_to_another_call_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is too slow for renewals may have answered a campaign."""
    store = Store()
    one = Registration(store, KEYS, SPEC, NODE.node, _nobody, _nobody)
    missed: list[float] = []

    async def unanswered(lease: int) -> float:
        raise StoreUnavailable("no answer")

    async def pass_time(seconds: float, until: asyncio.Event) -> None:
        missed.append(seconds)
        assert len(missed) <= 3, "it does not give the lease up"
        one.ended(Incarnation(one.lease + 1) if len(missed) < 3 else one.lease)

    async def main() -> None:
        await one.agree()
        await one.join(NODE)
        monkeypatch.setattr(store, "renew_lease", unanswered)
        monkeypatch.setattr(registration_module, "pause", pass_time)
        await one.keep(lambda asked_s: None, lambda: None)

    asyncio.run(main())
    assert missed == [RETRY_S] * 3, "an earlier lease that has ended says nothing about this one"


def test_the_end_of_a_lease_ends_the_pause_before_the_next_renewal() -> None:
    """A store whose leader was frozen ends all leases at once: there is no Master until a launcher has noticed."""
    store, renewed = Store(), asyncio.Event()
    spec = dataclasses.replace(SPEC, timeouts=Timeouts(lease_ttl_s=3600.0))
    one = Registration(store, KEYS, spec, NODE.node, _nobody, _nobody)

    async def main() -> None:
        await one.agree()
        await one.join(NODE)
        keeping = asyncio.ensure_future(one.keep(lambda asked_s: renewed.set(), lambda: None))
        await renewed.wait()
        one.ended(Incarnation(one.lease + 1))
        one.ended(one.lease)
        await asyncio.wait_for(keeping, 60.0)

    asyncio.run(main())
