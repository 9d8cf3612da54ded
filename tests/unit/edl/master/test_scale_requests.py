"""Requests at the elected Master's shell: in order, in the store first, and answered once they are."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from edl.config import JobSpec, NodeRange
from edl.errors import FencedOut
from edl.master import candidate as candidate_module
from edl.master import guarded as guarded_module
from edl.master.shell import MasterShell
from edl.master.sizing import Sizing
from edl.ports import ElectedMaster
from edl.wire import plain
from edl.wire.messages import StartRound
from edl.wire.scale_requests import Cordon, Granted, Resize, SetBounds, Verdict
from tests.support.master_fixture import KEYS, SPEC, Agent, Bench, play, turns, until

WIDE = dataclasses.replace(SPEC, nodes=NodeRange(1, 4))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_module, "RETRY_S", 0)
    monkeypatch.setattr(candidate_module, "CAMPAIGN_PAUSE_S", 0)


async def running(bench: Bench, names: str = "a", spec: JobSpec = WIDE) -> tuple[MasterShell, list[Agent]]:
    shell, _ = await bench.master(spec)
    agents = [Agent(bench, shell, bench.register(name)) for name in names]
    for agent in agents:
        agent.attach()
        agent.ready()
    for agent in agents:
        await agent.hears(StartRound)
    return shell, agents


def stored(bench: Bench) -> tuple[Sizing, int]:
    (entry,) = bench.store.read_now(KEYS.scale).entries
    return plain.loads(Sizing, entry.value), entry.mod_revision


def test_it_is_in_the_store_when_it_is_answered() -> None:
    async def scenario(bench: Bench) -> None:
        shell, _ = await running(bench, "ab")
        granted = await shell.submit(Resize(1, "me", "quiet night"))
        record = bench.record()
        assert record is not None
        assert (granted.verdict, granted.generation) == (Verdict.ACCEPTED, 1)
        sizing, revision = stored(bench)
        assert (sizing.desired, sizing.by, sizing.reason, granted.revision) == (1, "me", "quiet night", revision)
        assert record.sizing == sizing
        scale = shell.status().scale
        assert (scale.desired, scale.asked, scale.revision, scale.generation) == (1, 1, revision, 1)

    play(scenario)


def test_the_world_follows() -> None:
    async def scenario(bench: Bench) -> None:
        shell, agents = await running(bench, "ab")
        assert shell.status().scale.nodes == 2
        await shell.submit(Resize(1, "me"))
        for agent in agents:
            agent.ready(1)
        await until(lambda: shell.status().scale.nodes == 1)
        scale = shell.status().scale
        assert (scale.observed, scale.waiting) == (1, "")
        lines = [entry.text for entry in bench.history() if entry.kind == "scale"]
        assert lines == ["1 node requested by me", "1 node in round 2, as requested by me"]

    play(scenario)


def test_a_stale_revision_is_refused_and_one_of_the_last_look_is_not() -> None:
    async def scenario(bench: Bench) -> None:
        shell, _ = await running(bench)
        seen = shell.status().scale.revision
        assert seen
        first, second = await asyncio.gather(
            shell.submit(Resize(2, "me", revision=seen)), shell.submit(Resize(3, "you", revision=seen))
        )
        assert (first.verdict, second.verdict) == (Verdict.ACCEPTED, Verdict.STALE)
        assert second.revision == first.revision > seen
        assert stored(bench)[0].desired == 2
        assert "changed by me" in second.text

    play(scenario)


def test_only_the_first_request_with_a_key_counts_also_for_the_next_master() -> None:
    async def scenario(bench: Bench) -> None:
        shell, _ = await running(bench)
        first = await shell.submit(Resize(2, "me", key="k"))
        await shell.submit(Resize(3, "you"))
        other, _ = await bench.master(WIDE)
        again = await other.submit(Resize(2, "me", key="k"))
        assert (again.verdict, again.text) == (first.verdict, first.text)
        assert stored(bench)[0].desired == 3
        assert again.generation == 2

    play(scenario)


def test_what_is_refused_changes_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        shell, _ = await running(bench)
        before = bench.store.revision
        granted = await shell.submit(Resize(9, "me"))
        assert granted.verdict is Verdict.REFUSED
        assert bench.store.revision == before

    play(scenario)


def test_it_waits_as_long_as_the_store_is_away() -> None:
    async def scenario(bench: Bench) -> None:
        shell, _ = await running(bench)
        bench.store.available = False
        asked = bench.start(shell.submit(Resize(2, "me")))
        await turns(200)
        assert not asked.done()
        assert shell.status().scale.asked == 0
        bench.store.available = True
        assert (await asked).verdict is Verdict.ACCEPTED

    play(scenario)


def test_a_write_that_happened_without_an_answer_is_one_request_with_one_revision() -> None:
    async def scenario(bench: Bench) -> None:
        shell, _ = await running(bench)
        bench.store.fail_after_writing = 1
        granted = await shell.submit(Resize(2, "me"))
        assert (granted.generation, granted.revision) == (1, stored(bench)[1])

    play(scenario)


def test_a_master_that_was_replaced_grants_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        shell, _ = await running(bench)
        bench.crown()
        asked = [bench.start(shell.submit(Resize(nodes, "me"))) for nodes in (2, 3)]
        await until(lambda: all(one.done() for one in asked))
        assert all(isinstance(one.exception(), FencedOut) for one in asked)
        assert stored(bench)[0].desired == 0
        with pytest.raises(FencedOut):
            await shell.submit(Resize(4, "me"))
        with pytest.raises(FencedOut):
            await shell.changed()

    play(scenario)


def test_the_next_master_knows_it_and_goes_on_with_its_revision() -> None:
    async def scenario(bench: Bench) -> None:
        shell, _ = await running(bench)
        granted = await shell.submit(SetBounds(1, 8, "me"))
        other, _ = await bench.master(WIDE)
        scale = other.status().scale
        assert (scale.maximum, scale.revision, scale.generation) == (8, granted.revision, 1)
        assert other.status().nnodes == "1:8"

    play(scenario)


def test_somebody_who_does_not_wait_for_the_answer_harms_nobody() -> None:
    async def scenario(bench: Bench) -> None:
        shell, _ = await running(bench)
        asked = bench.start(shell.submit(Resize(2, "me")))
        await asyncio.sleep(0)
        asked.cancel()
        assert (await shell.submit(Cordon("x", True, "me"))).verdict is Verdict.UNKNOWN
        assert stored(bench)[0].desired == 2

    play(scenario)


def test_those_that_watch_see_every_change_each_from_where_it_has_looked() -> None:
    async def scenario(bench: Bench) -> None:
        shell, _ = await running(bench)
        seen: list[list[int]] = [[], []]

        async def watch(log: list[int]) -> None:
            while True:
                await shell.changed()
                log.append(shell.status().scale.generation)

        for log in seen:
            bench.start(watch(log))
        await turns(5)
        await shell.submit(Resize(2, "me"))
        await turns(5)
        await shell.submit(Resize(3, "me"))
        await turns(5)
        assert all(log[0] == 0 and sorted(set(log)) == [0, 1, 2] for log in seen)

    play(scenario)


def test_companions_work_beside_it_and_one_that_fails_is_said_to_have() -> None:
    async def scenario(bench: Bench) -> None:
        granted: list[Granted] = []
        ended: list[str] = []

        async def scaler(master: ElectedMaster) -> None:
            granted.append(await master.submit(Resize(2, "scaler", external=True)))
            master.explain("2 pods pending")
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("scaler")

        async def broken() -> None:
            raise RuntimeError("no such scheduler")

        deps = dataclasses.replace(bench.deps(spec=WIDE), companions=lambda master: (scaler(master), broken()))
        shell = MasterShell(deps, bench.crown())
        rule = bench.start(shell.run())
        await until(lambda: bool(granted))
        assert granted[0].verdict is Verdict.ACCEPTED
        await until(lambda: shell.status().scale.waiting.endswith("2 pods pending"))
        assert [text for text in bench.said if "no such scheduler" in text]
        assert not rule.done()
        rule.cancel()
        await until(lambda: ended == ["scaler"])

    play(scenario)
