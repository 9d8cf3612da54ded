"""A launcher finds its place in a job: the same settings for all, one name for each, as long as its lease lives."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from edl.config import FaultTolerance, JobSpec, NodeRange, Timeouts
from edl.errors import JobConflict, StoreRefused, StoreUnavailable
from edl.exit_codes import ExitCode
from edl.launch import registration as registration_module
from edl.launch.registration import RETRY_S, JobEnded, Registration
from edl.ports import Delete, PrefixSnapshot, Put
from edl.tasks import end
from edl.testing.clock import FakeClock
from edl.testing.memory_store import MemoryStore
from edl.types import Incarnation, JobId, NodeId
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.messages import Finish
from edl.wire.records import NodeInfo
from edl.wire.secret import Secret

JOB = JobId("my-job")
KEYS = JobKeys(JOB)
TTL_S = 3.0
SPEC = JobSpec(JOB, NodeRange(1, 4), timeouts=Timeouts(lease_ttl_s=TTL_S))
OTHER_SPEC = dataclasses.replace(SPEC, max_restarts=9, fault_tolerance=FaultTolerance.RECOVER)


def info(name: str, port: int = 5000, node_rank: int = -1) -> NodeInfo:
    return NodeInfo(NodeId(name), Incarnation(0), "10.0.0.1", port, 1, node_rank)


class Hosts:
    """Which agents' ports refuse connections, and which take them without an answer."""

    def __init__(self, dead: set[int] | None = None) -> None:
        self.dead = dead or set()
        self.silent: set[int] = set()
        self.asked: list[int] = []

    async def refuses(self, host: str, port: int) -> bool:
        self.asked.append(port)
        return port in self.dead

    async def answers(self, host: str, port: int) -> bool:
        return port not in self.dead | self.silent


class Bench:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(self.clock)
        self.hosts = Hosts()
        self.said: list[str] = []

    def registration(
        self, spec: JobSpec = SPEC, store: MemoryStore | None = None, secret: Secret | None = None
    ) -> Registration:
        hosts = self.hosts
        return Registration(
            *(store or self.store, KEYS, spec, NodeId("a"), hosts.refuses, hosts.answers, self.said.append),
            secret=secret,
        )

    def leave_key(self, node: str, port: int) -> int:
        """A launcher's key under a lease that still runs; returns the lease."""
        lease = self.store.grant_now(TTL_S)
        there = dataclasses.replace(info(node, port), incarnation=Incarnation(lease))
        self.store.write_now([Put(KEYS.node(NodeId(node)), plain.dumps(there), lease)])
        return lease

    async def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def value(self, key: str) -> bytes | None:
        found = [entry.value for entry in self.store.read_now(key).entries if entry.key == key]
        return found[0] if found else None

    def keys(self) -> list[str]:
        return [entry.key for entry in self.store.read_now("").entries]


def play(scenario: Callable[[Bench], Coroutine[None, None, None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(scenario(Bench()), 5)

    asyncio.run(limited())


async def refused(work: Awaitable[object]) -> str:
    with pytest.raises(JobConflict) as caught:
        await work
    assert caught.value.exit_code is ExitCode.JOB_CONFLICT
    return str(caught.value)


class TestAgree:
    def test_the_first_writes_settings_and_secret(self) -> None:
        async def scenario(bench: Bench) -> None:
            first = bench.registration()
            await first.agree()
            assert plain.loads(JobSpec, bench.value(KEYS.spec) or b"") == SPEC
            assert len(first.token) == 32
            assert (bench.value(KEYS.token) or b"").decode() == first.token

        play(scenario)

    def test_the_second_takes_them_over(self) -> None:
        async def scenario(bench: Bench) -> None:
            first, second = bench.registration(), bench.registration()
            await first.agree()
            revision = bench.store.revision
            await second.agree()
            assert second.token == first.token
            assert bench.store.revision == revision

        play(scenario)

    def test_two_at_once_have_one_secret(self) -> None:
        async def scenario(bench: Bench) -> None:
            class Racing(MemoryStore):
                """Another launcher is faster between this one's look and its write."""

                async def write(self, *given: Any, **named: Any) -> int | None:
                    if not faster.token:
                        await faster.agree()
                    return bench.store.write_now(*given)

                async def read(self, prefix: str) -> PrefixSnapshot:
                    return bench.store.read_now(prefix)

            faster = bench.registration()
            slower = bench.registration(store=Racing(bench.clock))
            await slower.agree()
            assert faster.token
            assert slower.token == faster.token

        play(scenario)

    def test_each_job_has_its_own_secret(self) -> None:
        async def scenario(bench: Bench) -> None:
            first = bench.registration()
            await first.agree()
            bench.store.write_now([Delete(KEYS.prefix, prefix=True)])
            second = bench.registration()
            await second.agree()
            assert second.token != first.token

        play(scenario)

    def test_other_settings_than_those_of_a_living_job_are_a_conflict(self) -> None:
        async def scenario(bench: Bench) -> None:
            await bench.registration().agree()
            bench.leave_key("b", 5001)
            bench.leave_key("c", 5002)
            bench.hosts.silent.add(5001)
            before = bench.store.revision
            message = await refused(bench.registration(OTHER_SPEC).agree())
            assert "job my-job is running with other settings" in message
            assert "--max-restarts=9 (the running job has 3)" in message
            assert "--fault-tolerance=recover (the running job has elastic)" in message
            assert "another --rdzv-id" in message
            assert bench.store.revision == before

        play(scenario)

    def test_a_job_whose_launchers_are_all_dead_is_replaced_before_their_leases_end(self) -> None:
        async def scenario(bench: Bench) -> None:
            old = bench.registration()
            await old.agree()
            for port in (5001, 5002):
                bench.leave_key(f"node-{port}", port)
                bench.hosts.dead.add(port)
            new = bench.registration(OTHER_SPEC)
            await new.agree()
            assert plain.loads(JobSpec, bench.value(KEYS.spec) or b"") == OTHER_SPEC
            assert new.token != old.token
            assert bench.store.read_now(KEYS.nodes).entries == ()
            assert bench.said == []

        play(scenario)

    def test_launchers_that_do_not_answer_get_the_time_of_their_leases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def scenario(bench: Bench) -> None:
            monkeypatch.setattr(asyncio, "sleep", bench.pass_time)
            await bench.registration().agree()
            bench.leave_key("b", 5001)
            bench.hosts.silent.add(5001)
            new = bench.registration(OTHER_SPEC)
            await new.agree()
            assert plain.loads(JobSpec, bench.value(KEYS.spec) or b"") == OTHER_SPEC
            assert bench.said == ["job my-job has launchers that do not answer: waiting for their leases to expire"]

        play(scenario)

    def test_one_that_does_not_answer_but_renews_its_lease_lives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def scenario(bench: Bench) -> None:
            async def pass_time(seconds: float) -> None:
                bench.store.renew_now(lease)
                bench.clock.advance(seconds)

            monkeypatch.setattr(asyncio, "sleep", pass_time)
            await bench.registration().agree()
            lease = bench.leave_key("b", 5001)
            bench.hosts.silent.add(5001)
            assert "is running with other settings" in await refused(bench.registration(OTHER_SPEC).agree())

        play(scenario)

    def test_what_a_dead_job_left_is_replaced(self) -> None:
        async def scenario(bench: Bench) -> None:
            old = bench.registration()
            await old.agree()
            leftovers = [KEYS.record, KEYS.world, KEYS.scale, KEYS.history_entry(1), KEYS.history_entry(2)]
            leftovers += [KEYS.service("data", "plan"), KEYS.companion("denylist"), KEYS.goodput]
            bench.store.write_now([Put(key, b"{}") for key in leftovers])
            bench.store.write_now([Put(KEYS.node(NodeId("a")), b"{}", bench.store.grant_now(TTL_S))])
            bench.clock.advance(TTL_S)
            new = bench.registration(OTHER_SPEC)
            await new.agree()
            assert bench.keys() == [KEYS.spec, KEYS.token]
            assert plain.loads(JobSpec, bench.value(KEYS.spec) or b"") == OTHER_SPEC
            assert new.token != old.token

        play(scenario)

    def test_the_same_settings_go_on_with_what_a_dead_job_left(self) -> None:
        async def scenario(bench: Bench) -> None:
            old, new = bench.registration(), bench.registration()
            await old.agree()
            bench.store.write_now([Put(KEYS.record, b"kept")])
            await new.agree()
            assert bench.value(KEYS.record) == b"kept"

        play(scenario)

    def test_a_node_whose_launcher_did_not_hear_of_the_end_does_not_start_the_job_again(self) -> None:
        async def scenario(bench: Bench) -> None:
            outcome = Finish(1, "worker 3 failed")
            lease = bench.store.grant_now(10)
            mine = Put(KEYS.launcher(NodeId("a")), b"", lease)
            bench.store.write_now([Put(KEYS.farewell, plain.dumps(outcome), lease), mine])
            with pytest.raises(JobEnded, match="already ended: worker 3 failed") as caught:
                await bench.registration().agree()
            assert caught.value.outcome == outcome
            assert bench.keys() == [KEYS.farewell, KEYS.launcher(NodeId("a"))]
            bench.clock.advance(10)
            await bench.registration().agree()

        play(scenario)

    @pytest.mark.parametrize("others", [[], ["b", "ab"]])
    def test_anybody_else_begins_a_new_job_after_an_end(self, others: list[str]) -> None:
        async def scenario(bench: Bench) -> None:
            lease = bench.store.grant_now(10)
            names = [Put(KEYS.launcher(NodeId(name)), b"", lease) for name in others]
            bench.store.write_now([Put(KEYS.farewell, plain.dumps(Finish(0, "done")), lease), *names])
            await bench.registration().agree()
            assert bench.keys() == [KEYS.spec, KEYS.token], "nobody is told of the end of the one before"

        play(scenario)

    def test_who_has_left_in_good_order_begins_a_new_job(self) -> None:
        async def scenario(bench: Bench) -> None:
            before = bench.registration()
            await before.agree()
            await before.join(info("a"))
            assert bench.value(KEYS.launcher(NodeId("a"))) == b""
            await before.leave()
            bench.store.write_now([Delete(KEYS.spec), Put(KEYS.farewell, plain.dumps(Finish(0, "done")))])
            again = bench.registration()
            await again.agree()
            assert again.token != before.token

        play(scenario)

    def test_a_new_job_waits_until_the_launchers_of_the_ended_one_are_gone(self) -> None:
        async def scenario(bench: Bench) -> None:
            before, new = bench.registration(), bench.registration()
            await before.agree()
            other = Put(KEYS.node(NodeId("b")), plain.dumps(info("b")), bench.store.grant_now(TTL_S))
            bench.store.write_now([other, Put(KEYS.over, b""), Put(KEYS.record, b"ended")])
            waiting = asyncio.ensure_future(new.agree())
            await asyncio.sleep(2 * RETRY_S)
            assert not waiting.done()
            bench.clock.advance(TTL_S)
            await waiting
            assert new.token != before.token
            assert bench.keys() == [KEYS.spec, KEYS.token]

        play(scenario)

    def test_a_node_of_a_job_that_ended_while_all_launchers_died_hears_how(self) -> None:
        async def scenario(bench: Bench) -> None:
            before, after = bench.registration(), bench.registration()
            await before.agree()
            await before.join(info("a"))
            bench.store.write_now([Put(KEYS.over, b""), Put(KEYS.record, b"ended")])
            bench.clock.advance(TTL_S)
            await after.agree()
            assert after.token == before.token
            assert bench.value(KEYS.record) == b"ended", "its Master goes on from there"

        play(scenario)

    def test_the_end_of_a_job_with_a_longer_name_is_not_ours(self) -> None:
        async def scenario(bench: Bench) -> None:
            bench.store.write_now([Put(KEYS.farewell + "-2", plain.dumps(Finish(0, "done")))])
            await bench.registration().agree()
            assert bench.value(KEYS.spec) is not None

        play(scenario)

    def test_gives_up_when_others_never_stop_changing_them(self) -> None:
        async def scenario(bench: Bench) -> None:
            class Restless(MemoryStore):
                async def write(self, *given: Any, **named: Any) -> int | None:
                    return None

            message = await refused(bench.registration(store=Restless(bench.clock)).agree())
            assert "keep changing its settings" in message

        play(scenario)


class TestJoin:
    def test_takes_a_name_on_a_lease(self) -> None:
        async def scenario(bench: Bench) -> None:
            joining = bench.registration()
            named = await joining.join(info("a"))
            assert named == dataclasses.replace(info("a"), incarnation=joining.lease, lease_s=TTL_S)
            assert joining.lease > 0
            (entry,) = bench.store.read_now(KEYS.nodes).entries
            assert (entry.key, entry.lease) == (KEYS.node(NodeId("a")), joining.lease)
            assert plain.loads(NodeInfo, entry.value) == named
            bench.clock.advance(TTL_S)
            assert bench.keys() == [KEYS.launcher(NodeId("a"))], "it has not left in good order"

        play(scenario)

    def test_a_living_namesake_is_a_conflict(self) -> None:
        async def scenario(bench: Bench) -> None:
            await bench.registration().join(info("a", port=5000))
            late = bench.registration()
            message = await refused(late.join(info("a", port=6000)))
            assert "node id a is in use in job my-job" in message
            assert "10.0.0.1:5000" in message
            assert "another --node-id" in message
            assert bench.hosts.asked == [5000]
            assert late.lease == 0
            assert list(bench.store._leases) == [1]  # the one of the first; the late one's was given back

        play(scenario)

    def test_a_dead_namesake_is_cleared_before_its_lease_ends(self) -> None:
        async def scenario(bench: Bench) -> None:
            dead = await bench.registration().join(info("a", port=5000))
            bench.hosts.dead = {5000}
            named = await bench.registration().join(info("a", port=6000))
            (entry,) = bench.store.read_now(KEYS.nodes).entries
            assert plain.loads(NodeInfo, entry.value) == named
            assert dead.incarnation not in bench.store._leases

        play(scenario)

    @pytest.mark.parametrize("what", ["name", "place"])
    def test_a_silent_predecessor_is_followed_when_its_lease_ends(
        self, monkeypatch: pytest.MonkeyPatch, what: str
    ) -> None:
        """Its host is gone, or its launcher is frozen: nothing refuses, and nothing answers."""

        async def scenario(bench: Bench) -> None:
            await bench.registration().join(info("a", port=5000, node_rank=2))
            bench.hosts.silent = {5000}
            monkeypatch.setattr(asyncio, "sleep", bench.pass_time)
            name = "a" if what == "name" else "b"
            named = await bench.registration().join(info(name, port=6000, node_rank=2))
            assert bench.clock.now_s() == TTL_S
            (entry,) = bench.store.read_now(KEYS.nodes).entries
            assert plain.loads(NodeInfo, entry.value) == named
            assert list(bench.store._leases) == [named.incarnation]
            (said,) = bench.said
            assert said.endswith(", which does not answer: waiting for its lease to expire")

        play(scenario)

    def test_a_silent_predecessor_that_keeps_its_lease_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def scenario(bench: Bench) -> None:
            first = await bench.registration().join(info("a", port=5000))
            bench.hosts.silent = {5000}

            async def pass_time(seconds: float) -> None:
                await bench.store.renew_lease(first.incarnation)
                await bench.pass_time(seconds)

            monkeypatch.setattr(asyncio, "sleep", pass_time)
            message = await refused(bench.registration().join(info("a", port=6000)))
            assert message.endswith("It has not answered for 11 s, but it is alive, because it renews its lease")
            assert list(bench.store._leases) == [first.incarnation]

        play(scenario)

    def test_a_silent_predecessor_that_answers_again_is_a_conflict(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def scenario(bench: Bench) -> None:
            await bench.registration().join(info("a", port=5000))
            bench.hosts.silent = {5000}

            async def pass_time(seconds: float) -> None:
                bench.hosts.silent = set()

            monkeypatch.setattr(asyncio, "sleep", pass_time)
            message = await refused(bench.registration().join(info("a", port=6000)))
            assert "a running launcher at 10.0.0.1:5000" in message

        play(scenario)

    def test_ones_own_former_life_is_cleared_without_asking(self) -> None:
        async def scenario(bench: Bench) -> None:
            joining = bench.registration()
            first = await joining.join(info("a"))
            second = await joining.join(first)
            assert second.incarnation != first.incarnation
            assert joining.lease == second.incarnation
            assert bench.hosts.asked == []
            assert list(bench.store._leases) == [second.incarnation]

        play(scenario)

    def test_names_that_only_begin_alike_do_not_meet(self) -> None:
        async def scenario(bench: Bench) -> None:
            await bench.registration().join(info("node-1"))
            await bench.registration().join(info("node-12", port=6000))
            await bench.registration().join(info("node", port=7000))
            assert bench.hosts.asked == []
            bench.hosts.dead = {6000, 7000}
            await bench.registration().join(info("node", port=8000))
            assert bench.hosts.asked == [7000]
            assert len(bench.store.read_now(KEYS.nodes).entries) == 3

        play(scenario)

    def test_a_place_that_a_living_node_asked_for_is_taken(self) -> None:
        async def scenario(bench: Bench) -> None:
            await bench.registration().join(info("a", port=5000, node_rank=2))
            late = bench.registration()
            message = await refused(late.join(info("b", port=6000, node_rank=2)))
            assert "--node-rank=2 is taken in job my-job by node a" in message
            assert "its own rank, or omit --node-rank" in message
            assert list(bench.store._leases) == [1]

        play(scenario)

    def test_a_dead_nodes_place_is_free(self) -> None:
        async def scenario(bench: Bench) -> None:
            await bench.registration().join(info("a", port=5000, node_rank=2))
            bench.hosts.dead = {5000}
            named = await bench.registration().join(info("b", port=6000, node_rank=2))
            assert named.node_rank == 2

        play(scenario)

    def test_ones_own_place_is_free_after_a_restart(self) -> None:
        async def scenario(bench: Bench) -> None:
            await bench.registration().join(info("a", node_rank=2))
            named = await bench.registration().join(info("a", node_rank=2))
            (entry,) = bench.store.read_now(KEYS.nodes).entries
            assert plain.loads(NodeInfo, entry.value) == named
            assert bench.hosts.asked == []

        play(scenario)

    def test_other_places_and_none_at_all_are_free(self) -> None:
        async def scenario(bench: Bench) -> None:
            await bench.registration().join(info("a", port=5000, node_rank=2))
            await bench.registration().join(info("b", port=6000, node_rank=1))
            await bench.registration().join(info("c", port=7000))
            await bench.registration().join(info("d", port=8000))
            assert bench.hosts.asked == []
            assert len(bench.store.read_now(KEYS.nodes).entries) == 4

        play(scenario)

    def test_a_store_that_is_away_is_said_so(self) -> None:
        async def scenario(bench: Bench) -> None:
            bench.store.available = False
            with pytest.raises(StoreUnavailable):
                await bench.registration().join(info("a"))

        play(scenario)


class TestKeep:
    def test_renews_three_times_in_a_life_and_ends_with_the_lease(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def scenario(bench: Bench) -> None:
            pauses: list[float] = []

            async def pass_time(seconds: float, until: asyncio.Event) -> None:
                pauses.append(seconds)
                if len(pauses) == 10:
                    bench.store.revoke_now(joining.lease)
                bench.clock.advance(seconds)

            joining = bench.registration()
            await joining.join(info("a"))
            monkeypatch.setattr(registration_module, "pause", pass_time)
            renewed: list[float] = []
            await joining.keep(lambda _: renewed.append(bench.clock.now_s()), lambda: None)
            assert pauses == [TTL_S / 3] * 10
            assert renewed == [float(second) for second in range(10)]

        play(scenario)

    def test_a_lease_that_has_run_out_is_noticed_at_once(self) -> None:
        async def scenario(bench: Bench) -> None:
            joining = bench.registration()
            await joining.join(info("a"))
            bench.clock.advance(TTL_S)
            renewed: list[str] = []
            await joining.keep(lambda _: renewed.append("renewed"), lambda: None)
            assert renewed == []

        play(scenario)

    def test_asks_again_soon_while_the_store_is_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def scenario(bench: Bench) -> None:
            pauses: list[float] = []

            async def pass_time(seconds: float, until: asyncio.Event) -> None:
                pauses.append(seconds)
                bench.clock.advance(seconds)
                bench.store.available = len(pauses) >= 5
                if len(pauses) == 7:
                    bench.store.revoke_now(joining.lease)

            joining = bench.registration()
            await joining.join(info("a"))
            bench.store.available = False
            monkeypatch.setattr(registration_module, "pause", pass_time)
            renewed: list[float] = []
            await joining.keep(lambda _: renewed.append(bench.clock.now_s()), lambda: None)
            assert pauses == [RETRY_S] * 5 + [TTL_S / 3] * 2
            assert len(renewed) == 2

        play(scenario)

    def test_a_store_that_refuses_by_now_counts_as_one_that_is_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A password has changed; said once."""
        monkeypatch.setattr(registration_module, "RETRY_S", 0)

        async def scenario(bench: Bench) -> None:
            class Strict(MemoryStore):
                async def renew_lease(self, lease: int) -> float:
                    raise StoreRefused("wrong password")

            missed = asyncio.Semaphore(0)
            registration = bench.registration(store=Strict(bench.clock))
            keeping = asyncio.ensure_future(registration.keep(lambda _: None, missed.release))
            for _ in range(4):
                await missed.acquire()
            assert not keeping.done()
            await end(keeping)
            assert bench.said == ["cannot renew the lease: wrong password"]

        play(scenario)


class TestLeave:
    def test_gives_the_name_back(self) -> None:
        async def scenario(bench: Bench) -> None:
            joining = bench.registration()
            await joining.join(info("a"))
            await joining.leave()
            assert bench.keys() == []
            assert bench.store._leases == {}

        play(scenario)

    def test_without_a_lease_or_a_store_is_no_error(self) -> None:
        async def scenario(bench: Bench) -> None:
            joining = bench.registration()
            await joining.leave()
            await joining.join(info("a"))
            bench.store.available = False
            await joining.leave()

        play(scenario)
