"""The services that a Master hosts: fed in order, written before heard, failed over with it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence

import pytest

from edl.exit_codes import ExitCode
from edl.master import guarded as guarded_module
from edl.master import service as sv
from edl.master.hosting import Hosting
from edl.master.shell import MasterShell
from edl.master.state import Phase, Record
from edl.ports import Condition, Delete, Operation, Put
from edl.types import Incarnation, NodeId, Round
from edl.wire.messages import Finish, ServiceFromWorker, ServiceToWorker, StartRound, WorkersDone
from edl.wire.records import NO_SETTINGS, Settings, World
from tests.support.master_fixture import KEYS, TTL_S, Agent, Bench, play, turns, until


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_module, "RETRY_S", 0)


class Echo:
    """An echo service with commands ``keep``, ``wake``, ``note``, ``flaw``, ``send``, ``fail``."""

    name = "echo"

    def __init__(self) -> None:
        self.events: list[sv.Event] = []
        self.kept: dict[str, bytes] = {}
        self.keeps_ends = False

    def load(self, kept: Mapping[str, bytes], now_s: float) -> tuple[sv.Effect, ...]:
        self.kept = dict(kept)
        return ()

    def step(self, event: sv.Event, now_s: float) -> tuple[sv.Effect, ...]:
        self.events.append(event)
        if isinstance(event, sv.WorldEnded) and self.keeps_ends:
            return (sv.Keep("end", event.reason.encode()),)
        if not isinstance(event, sv.Said):
            return ()
        word, _, rest = event.body.partition(" ")
        answer = sv.TellWorker(event.caller, event.body)
        match word:
            case "keep":
                return (sv.Keep("thing", rest.encode()), answer)
            case "twice":
                return (sv.Keep("thing", b"an older one"), sv.Keep("other", b"x"), sv.Keep("thing", b"last"), answer)
            case "large":
                return (*(sv.Keep(f"part-{n}", b"x" * 700_000) for n in range(int(rest))), answer)
            case "wake":
                return (sv.WakeAt(now_s + float(rest)), answer)
            case "note":
                return (sv.AddToHistory(rest), answer)
            case "send":
                return (sv.Send("helpers/h1", rest), answer)
            case "fail":
                return (sv.Keep("thing", b"last words"), sv.Fail(rest), answer)
            case "flaw":
                return (sv.ReportFlaw("data", rest), answer)
            case _:
                return (answer,)

    def report(self) -> tuple[sv.Progress, ...]:
        return (sv.Progress("numbers", f"{len(self.events)} events", {"seen_events": len(self.events)}),)


class Stage:
    """A job of one node with the service."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.echo = Echo()

    async def master(self) -> MasterShell:
        self.echo = Echo()
        deps = dataclasses.replace(self.bench.deps(), services=lambda: (self.echo,))
        shell = MasterShell(deps, self.bench.crown())
        self.run: asyncio.Future[Finish] = self.bench.start(shell.run())
        await until(lambda: shell.serving or self.run.done())
        return shell

    async def running(self) -> tuple[MasterShell, Agent]:
        shell = await self.master()
        agent = Agent(self.bench, shell, self.bench.register("a"))
        agent.attach()
        agent.ready()
        await agent.hears(StartRound)
        return shell, agent

    def kept(self) -> dict[str, bytes]:
        entries = self.bench.store.read_now(KEYS.services).entries
        return {entry.key[len(KEYS.services) :]: entry.value for entry in entries}


def say(agent: Agent, body: str) -> None:
    agent.say(ServiceFromWorker("echo", 1, Round(1), body))


async def answer(agent: Agent, body: str) -> None:
    await until(lambda: ServiceToWorker("echo", 1, body) in agent.heard)


def test_a_word_and_its_answer() -> None:
    async def scenario(bench: Bench) -> None:
        stage = Stage(bench)
        shell, agent = await stage.running()
        began = stage.echo.events[0]
        assert isinstance(began, sv.WorldBegan)
        assert (began.world.round, began.taken_over) == (1, False)
        say(agent, "hello")
        await answer(agent, "hello")
        assert stage.echo.events[1] == sv.Said(sv.Caller(NodeId("a"), 1), Round(1), "hello")
        (view,) = shell.status().services
        assert (view.service, view.name, view.text) == ("echo", "numbers", "2 events")
        assert [(count.name, count.value) for count in view.counts] == [("seen_events", 2)]

    play(scenario)


def test_nothing_is_heard_that_is_not_stored() -> None:
    async def scenario(bench: Bench) -> None:
        stage = Stage(bench)
        _, agent = await stage.running()
        heard_then: list[int] = []
        before = len(agent.heard)
        bench.store.on_failure = lambda: heard_then.append(len(agent.heard))
        bench.store.fail_writes = 4
        say(agent, "keep this")
        await answer(agent, "keep this")
        assert heard_then == [before] * 4
        assert stage.kept() == {"echo/thing": b"this"}
        say(agent, "keep ")
        await answer(agent, "keep ")
        assert stage.kept() == {}

    play(scenario)


def test_large_things_are_written_in_parts_that_the_store_takes() -> None:
    async def scenario(bench: Bench) -> None:
        stage = Stage(bench)
        _, agent = await stage.running()
        sizes: list[int] = []
        write = bench.store.write

        async def counted(
            operations: Sequence[Operation], conditions: Sequence[Condition] = (), *, repeatable: bool = False
        ) -> int | None:
            puts = [one for one in operations if isinstance(one, Put) and one.key != KEYS.last_write]
            sizes.append(sum(len(one.value) for one in puts))
            return await write(operations, conditions)

        bench.store.write = counted  # type: ignore[method-assign]
        say(agent, "large 5")
        await answer(agent, "large 5")
        assert len(stage.kept()) == 5
        assert sizes == [700_000] * 5

    play(scenario)


def test_of_several_values_for_one_name_the_last_counts() -> None:
    """Several events may come before the store is written, and etcd takes no key twice in one transaction."""

    async def scenario(bench: Bench) -> None:
        stage = Stage(bench)
        _, agent = await stage.running()
        say(agent, "twice")
        await answer(agent, "twice")
        assert stage.kept() == {"echo/thing": b"last", "echo/other": b"x"}

    play(scenario)


def test_the_next_master_loads_what_was_kept() -> None:
    async def scenario(bench: Bench) -> None:
        stage = Stage(bench)
        _, agent = await stage.running()
        say(agent, "keep state")
        await answer(agent, "keep state")
        bench.store.write_now([Put(KEYS.helper("echo", "readers/r1"), b"here", 0)])
        await stage.master()
        began, helper = stage.echo.events[1], stage.echo.events[0]
        assert stage.echo.kept == {"thing": b"state"}
        assert helper == sv.KeyPut("readers/r1", b"here")
        assert isinstance(began, sv.WorldBegan)
        assert (began.world.round, began.taken_over) == (1, True)

    play(scenario)


def test_helpers_come_and_go() -> None:
    async def scenario(bench: Bench) -> None:
        stage = Stage(bench)
        await stage.running()
        lease = bench.store.grant_now(TTL_S)
        bench.store.write_now([Put(KEYS.helper("echo", "readers/r1"), b"here", lease)])
        await until(lambda: stage.echo.events[-1] == sv.KeyPut("readers/r1", b"here"))
        bench.store.write_now([Delete(KEYS.helper("echo", "readers/r1"))])
        await until(lambda: stage.echo.events[-1] == sv.KeyGone("readers/r1"))

    play(scenario)


def test_services_hear_of_the_end_of_a_world() -> None:
    async def scenario(bench: Bench) -> None:
        stage = Stage(bench)
        _, agent = await stage.running()
        agent.ready(seen=1)  # it has stopped its workers
        await until(lambda: any(isinstance(event, sv.WorldEnded) for event in stage.echo.events))
        kinds = [type(event) for event in stage.echo.events]
        assert kinds[:2] == [sv.WorldBegan, sv.WorldEnded]

    play(scenario)


def test_a_world_that_is_being_left_goes_on_for_its_services() -> None:
    """At a planned change workers train on to the boundary agreed on, and need what services give."""
    echo = Echo()
    hosting = Hosting((echo,))
    first, second = World(Round(1), (), 0), World(Round(2), (), 0)
    for record in (
        Record(Phase.FORMING),
        Record(Phase.RUNNING, world=first),
        Record(Phase.FORMING, world=first),
        Record(Phase.RUNNING, world=second),
        Record(Phase.ENDED, world=second, reason="done"),
    ):
        hosting.follow(record, 0.0)
    assert echo.events == [
        sv.WorldBegan(first),
        sv.WorldEnded(Round(1), Record().reason),
        sv.WorldBegan(second),
        sv.WorldEnded(Round(2), "done"),
    ]


def test_services_hear_which_settings_hold() -> None:
    """When they change, and what a Master that takes over has found; nothing where nothing is prescribed."""
    world = World(Round(1), (), 0)
    first, second = Settings(1, global_batch=64), Settings(2, global_batch=64, scale=0.5)
    echo = Echo()
    hosting = Hosting((echo,))
    for settings in (NO_SETTINGS, first, first, second):
        hosting.follow(Record(Phase.RUNNING, world=world, settings=settings), 0.0)
    assert echo.events == [sv.WorldBegan(world), sv.SettingsHold(first), sv.SettingsHold(second)]
    heir = Echo()
    Hosting((heir,)).follow(Record(Phase.RUNNING, world=world, settings=second), 0.0, taken_over=True)
    assert heir.events == [sv.WorldBegan(world, True), sv.SettingsHold(second)]


def test_words_to_helpers_need_lines_and_are_dropped_without() -> None:
    async def scenario(bench: Bench) -> None:
        stage = Stage(bench)
        _, agent = await stage.running()
        say(agent, "send orders")
        await answer(agent, "send orders")

    play(scenario)


def test_ticks_come_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(bench: Bench) -> None:
        stage = Stage(bench)
        _, agent = await stage.running()
        say(agent, "wake 0")
        await until(lambda: sv.Tick() in stage.echo.events)
        say(agent, "wake 1000")
        await answer(agent, "wake 1000")
        await turns()
        assert stage.echo.events.count(sv.Tick()) == 1

    play(scenario)


def test_a_flaw_changes_what_success_means() -> None:
    async def scenario(bench: Bench) -> None:
        stage = Stage(bench)
        shell, agent = await stage.running()
        say(agent, "flaw two files could not be read: a, b")
        await answer(agent, "flaw two files could not be read: a, b")
        assert shell.status().flaws == ("two files could not be read: a, b",)
        agent.say(WorkersDone(Round(1)))
        await until(lambda: any(isinstance(message, Finish) for message in agent.heard))
        (finish,) = [message for message in agent.heard if isinstance(message, Finish)]
        assert finish.exit_code == ExitCode.INCOMPLETE
        assert finish.reason.endswith("ended with status 0; two files could not be read: a, b")

    play(scenario)


def test_a_flaw_can_be_taken_back() -> None:
    async def scenario(bench: Bench) -> None:
        stage = Stage(bench)
        shell, agent = await stage.running()
        for body in ("flaw something", "flaw ", "note all is well"):
            say(agent, body)
            await answer(agent, body)
        assert shell.status().flaws == ()
        assert bench.history()[-1].text == "all is well"
        assert bench.history()[-1].kind == "service"

    play(scenario)


def test_a_service_that_cannot_go_on_ends_the_job() -> None:
    async def scenario(bench: Bench) -> None:
        stage = Stage(bench)
        _, agent = await stage.running()
        say(agent, "fail 17 buckets are lost")
        finish = await agent.hears(Finish)
        assert isinstance(finish, Finish)
        assert (finish.exit_code, finish.reason) == (ExitCode.WORKER_FAILED, "17 buckets are lost")
        assert stage.kept() == {"echo/thing": b"last words"}
        say(agent, "fail again")  # too late to change the outcome
        agent.say(None)
        await until(stage.run.done)
        assert stage.run.result().reason == "17 buckets are lost"
        assert stage.kept() == {}  # nothing is written after the job's keys have been deleted

    play(scenario)


def test_what_a_service_wants_because_of_its_own_failure_needs_no_further_event() -> None:
    async def scenario(bench: Bench) -> None:
        stage = Stage(bench)
        _, agent = await stage.running()
        stage.echo.keeps_ends = True
        say(agent, "fail nothing is left to read")
        await until(lambda: "echo/end" in stage.kept())

    play(scenario)


def test_words_of_a_dead_incarnation_are_not_heard() -> None:
    async def scenario(bench: Bench) -> None:
        stage = Stage(bench)
        shell, agent = await stage.running()
        other = Agent(bench, shell, dataclasses.replace(agent.info, incarnation=Incarnation(99)))
        other.attach()
        await turns()
        say(agent, "from the grave")
        await turns()
        heard = [event for event in stage.echo.events if isinstance(event, sv.Said)]
        assert heard == []

    play(scenario)


def test_the_end_of_the_job_clears_what_was_kept() -> None:
    async def scenario(bench: Bench) -> None:
        stage = Stage(bench)
        _, agent = await stage.running()
        say(agent, "keep it")
        await answer(agent, "keep it")
        agent.say(WorkersDone(Round(1)))
        await until(lambda: any(isinstance(message, Finish) for message in agent.heard))
        agent.say(None)
        await until(stage.run.done)
        assert stage.kept() == {}

    play(scenario)
