"""A node that was cut off comes back to its job, or hears that there is none any more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from edl.errors import JobConflict
from edl.exit_codes import ExitCode
from edl.launch.registration import RETRY_S, JobEnded
from edl.ports import Condition, Delete, Operation, Put
from edl.tasks import end
from edl.types import NodeId
from edl.wire import plain
from edl.wire.messages import Finish
from tests.unit.edl.launch.test_registration import KEYS, Bench, info, play


def test_it_comes_back_to_its_job_under_a_new_lease() -> None:
    async def scene(bench: Bench) -> None:
        joining = bench.registration()
        await joining.agree()
        first = (await joining.join(info("a"))).incarnation
        bench.store.revoke_now(first)
        assert (await joining.rejoin(info("a"))).incarnation == joining.lease != first

    play(scene)


def test_it_does_not_join_another_job_of_the_same_id() -> None:
    async def scene(bench: Bench) -> None:
        joining = bench.registration()
        await joining.agree()
        bench.store.write_now([Delete(KEYS.spec), Delete(KEYS.token)])
        await bench.registration().agree()
        with pytest.raises(JobConflict, match=r"while this node was isolated, or .* Start this launcher again"):
            await joining.rejoin(info("a"))
        names = bench.keys()
        assert KEYS.node(NodeId("a")) not in names

    play(scene)


def test_a_launcher_that_is_frozen_while_it_registers_tries_again() -> None:
    """Its new lease has ended as well when it goes on."""

    async def scene(bench: Bench) -> None:
        joining = bench.registration()
        await joining.agree()
        granted: list[int] = []
        grant = bench.store.grant_lease

        async def frozen_after(ttl_s: float) -> int:
            lease = await grant(ttl_s)
            granted.append(lease)
            if len(granted) == 1:
                bench.store.revoke_now(lease)
            return lease

        bench.store.grant_lease = frozen_after  # type: ignore[method-assign]
        named = await joining.join(info("a"))
        assert named.incarnation == joining.lease == granted[1]

    play(scene)


@pytest.mark.parametrize("another_began", [False, True])
def test_a_slow_node_does_not_join_a_job_that_ended_after_it_agreed(another_began: bool) -> None:
    async def scene(bench: Bench) -> None:
        slow = bench.registration()
        await slow.agree()
        bench.store.write_now([Delete(KEYS.spec), Delete(KEYS.token)])
        if another_began:
            await bench.registration().agree()
        with pytest.raises(JobConflict, match="ended while this node was joining it"):
            await slow.join(info("a"))
        names = bench.keys()
        assert KEYS.node(NodeId("a")) not in names
        assert slow.lease == 0

    play(scene)


def test_a_new_job_waits_for_launchers_that_have_not_heard_of_the_end() -> None:
    """One of them would become its Master, with the settings of the job that has ended."""

    async def scene(bench: Bench) -> None:
        old = bench.registration()
        await old.agree()
        lease = bench.leave_key("b", 5000)
        farewell = Put(KEYS.farewell, plain.dumps(Finish(int(ExitCode.OK), "done")))
        bench.store.write_now([Delete(KEYS.spec), Delete(KEYS.token), farewell])
        new = bench.registration()
        founding = asyncio.ensure_future(new.agree())
        done, _ = await asyncio.wait({founding}, timeout=3 * RETRY_S)
        names = bench.keys()
        assert not done and KEYS.farewell in names and KEYS.token not in names, "the end is there to be heard of"
        bench.store.revoke_now(lease)
        await founding
        assert new.token not in ("", old.token)

    play(scene)


def test_a_slow_node_ends_as_the_job_did_that_it_agreed_on() -> None:
    async def scene(bench: Bench) -> None:
        slow = bench.registration()
        await slow.agree()
        outcome = Finish(int(ExitCode.OK), "all workers ended with status 0")
        bench.store.write_now([Delete(KEYS.spec), Delete(KEYS.token), Put(KEYS.farewell, plain.dumps(outcome))])
        with pytest.raises(JobEnded) as ended:
            await slow.join(info("a"))
        assert ended.value.outcome == outcome

    play(scene)


def test_it_ends_as_its_job_did_while_the_outcome_is_there() -> None:
    async def scene(bench: Bench) -> None:
        joining = bench.registration()
        await joining.agree()
        outcome = Finish(int(ExitCode.WORKER_FAILED), "worker 0 failed")
        bench.store.write_now([Delete(KEYS.token), Put(KEYS.farewell, plain.dumps(outcome))])
        with pytest.raises(JobEnded) as ended:
            await joining.rejoin(info("a"))
        assert (ended.value.outcome, ended.value.exit_code) == (outcome, ExitCode.WORKER_FAILED)

    play(scene)


def test_a_key_that_was_being_created_when_the_launcher_had_to_leave_does_not_stay() -> None:
    """The store has carried the write out, and nobody is there any more to hear of it."""

    async def scene(bench: Bench) -> None:
        joining = bench.registration()
        await joining.agree()
        written = asyncio.Event()

        async def unanswered(
            operations: Sequence[Operation], conditions: Sequence[Condition] = (), *, repeatable: bool = False
        ) -> None:
            bench.store.write_now(operations, conditions)
            written.set()
            await asyncio.Event().wait()

        bench.store.write = unanswered  # type: ignore[method-assign]
        joins = asyncio.ensure_future(joining.join(info("a")))
        await written.wait()
        await end(joins)
        assert bench.value(KEYS.node(NodeId("a"))) is not None
        await joining.leave()
        assert bench.value(KEYS.node(NodeId("a"))) is None

    play(scene)
