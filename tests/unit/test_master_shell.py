"""The Master's and the candidate's shells: nothing is said that is not stored, and nobody rules twice."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

import pytest

from edl.config import JobSpec, NodeRange, Timeouts
from edl.errors import FencedOut, ProtocolError, StoreError, StoreRefused, StoreUnavailable
from edl.master import candidate as candidate_module
from edl.master import shell as shell_module
from edl.master.candidate import Callbacks, Candidate
from edl.master.election import Ruler
from edl.master.shell import MasterShell, Surroundings
from edl.master.state import Phase, Record
from edl.ports import Change, Condition, Delete, Operation, Put
from edl.testing.clock import FakeClock
from edl.testing.memory_store import MemoryStore
from edl.types import Incarnation, JobId, NodeId, Rank, Round, Token
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.messages import (
    AgentMessage,
    Attach,
    Failure,
    Finish,
    MasterMessage,
    NodeInfo,
    Ready,
    StartRound,
    StopRound,
    WorkerFailed,
    WorkersDone,
)
from edl.wire.status import EventsRequest, JournalEntry

JOB = JobId("my-job")
KEYS = JobKeys(JOB)
TTL_S = 3.0
SPEC = JobSpec(JOB, NodeRange(1, 1), timeouts=Timeouts(lease_ttl_s=TTL_S, join_grace_s=0))
TURNS = 2000
"""Turns of the event loop that a test waits for something to happen."""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_module, "RETRY_S", 0)
    monkeypatch.setattr(candidate_module, "CAMPAIGN_PAUSE_S", 0)


class FaultyStore(MemoryStore):
    """A store whose writes can fail, before or after they happened, and whose watches can break."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.fail_writes = 0
        self.fail_after_writing = 0
        self.break_watches: list[StoreError] = []
        self.watches = 0
        self.on_failure: Callable[[], None] = lambda: None

    async def write(self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()) -> int | None:
        if self.fail_writes:
            self.fail_writes -= 1
            self.on_failure()
            raise StoreUnavailable("no answer")
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
        self._tasks: list[asyncio.Future[None]] = []

    def around(self, node: str = "a", spec: JobSpec = SPEC) -> Surroundings:
        async def refuses(host: str, port: int, timeout_s: float = 1.0) -> bool:
            return port in self.dead_ports

        return Surroundings(
            self.store, self.clock, KEYS, spec, NodeId(node), refuses, self.said.append, lambda: 1_760_000_000.0
        )

    def crown(self) -> Token:
        """Replace the election key; returns its token."""
        self.store.write_now([Delete(KEYS.master)])
        revision = self.store.write_now([Put(KEYS.master, plain.dumps(Ruler(NodeId("a"), "h", 1)))])
        assert revision is not None
        return Token(revision)

    def register(self, name: str, port: int = 5000) -> NodeInfo:
        lease = Incarnation(self.store.grant_now(TTL_S))
        info = NodeInfo(NodeId(name), lease, "10.0.0.1", port, 2)
        self.store.write_now([Put(KEYS.node(info.node), plain.dumps(info), lease)])
        return info

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        return task

    async def master(self, spec: JobSpec = SPEC) -> tuple[MasterShell, asyncio.Future[None]]:
        """A Master that has taken over."""
        shell = MasterShell(self.around(spec=spec), self.crown())
        run = self.start(shell.run())
        await until(lambda: shell.serving or run.done())
        return shell, run

    def record(self) -> Record | None:
        found = [entry.value for entry in self.store.read_now(KEYS.record).entries]
        return plain.loads(Record, found[0]) if found else None

    def history(self) -> list[JournalEntry]:
        return [plain.loads(JournalEntry, entry.value) for entry in self.store.read_now(KEYS.journal).entries]

    def stored(self) -> list[str]:
        return [entry.key for entry in self.store.read_now("").entries]

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, StoreError):
                await task


class Agent:
    """A node's end of a stream."""

    def __init__(self, bench: Bench, shell: MasterShell, info: NodeInfo) -> None:
        self.info = info
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


def play(scene: Callable[[Bench], Coroutine[None, None, None]]) -> None:
    async def whole() -> None:
        bench = Bench()
        try:
            await asyncio.wait_for(scene(bench), 10)
        finally:
            await bench.end()

    asyncio.run(whole())


async def running(bench: Bench, spec: JobSpec = SPEC) -> tuple[MasterShell, asyncio.Future[None], Agent]:
    """A job of one node that runs its first world."""
    shell, run = await bench.master(spec)
    agent = Agent(bench, shell, bench.register("a"))
    agent.attach()
    agent.ready()
    await agent.hears(StartRound)
    return shell, run, agent


def failure(code: int = 1) -> WorkerFailed:
    return WorkerFailed(Failure(NodeId("a"), Round(1), Rank(0), 0, code, f"ended with exit status {code}"))


class TestStoreFirst:
    def test_what_is_decided_is_stored_before_anybody_is_told(self) -> None:
        async def scene(bench: Bench) -> None:
            _, _, agent = await running(bench)
            order = agent.heard[0]
            assert isinstance(order, StartRound)
            record = bench.record()
            assert record is not None
            assert (record.phase, record.round, record.world) == (Phase.RUNNING, 1, order.world)
            assert [entry.kind for entry in bench.history()][-2:] == ["node-joined", "world-formed"]

        play(scene)

    def test_while_the_store_is_away_nothing_is_said(self) -> None:
        async def scene(bench: Bench) -> None:
            shell, run = await bench.master()
            agent = Agent(bench, shell, bench.register("a"))
            agent.attach()
            await until(lambda: shell.status().nodes != () and shell.status().nodes[0].attached)
            heard_then: list[int] = []
            bench.store.on_failure = lambda: heard_then.append(len(agent.heard))
            bench.store.fail_writes = 5
            agent.ready()
            await agent.hears(StartRound)
            assert heard_then == [0, 0, 0, 0, 0]
            assert not run.done()
            assert len([text for text in bench.said if "the store is away" in text]) == 1
            kinds = [entry.kind for entry in bench.history()]
            assert (kinds.count("node-joined"), kinds.count("world-formed")) == (1, 1)  # and nothing was written twice

        play(scene)

    def test_a_decision_waits_as_long_as_the_store_is_away(self) -> None:
        async def scene(bench: Bench) -> None:
            _, _, agent = await running(bench)
            bench.store.available = False
            agent.say(failure())
            await turns(200)
            assert agent.last() is StartRound
            bench.store.available = True
            await agent.hears(StopRound)
            record = bench.record()
            assert record is not None
            assert record.restarts == 1

        play(scene)

    def test_a_take_over_waits_for_the_store_as_well(self) -> None:
        async def scene(bench: Bench) -> None:
            shell = MasterShell(bench.around(), bench.crown())
            bench.store.available = False
            run = bench.start(shell.run())
            await turns()
            assert not shell.serving
            assert not run.done()
            bench.store.available = True
            await until(lambda: shell.serving)

        play(scene)


class TestFencing:
    def test_a_master_that_was_replaced_says_nothing_more(self) -> None:
        async def scene(bench: Bench) -> None:
            shell, run, agent = await running(bench)
            bench.crown()
            before = bench.store.revision
            agent.say(failure())
            await until(run.done)
            assert isinstance(run.exception(), FencedOut)
            await until(agent.stream.done)
            assert [type(message) for message in agent.heard] == [StartRound]
            assert bench.store.revision == before
            assert shell.status().restarts_used == 0
            assert not shell.serving

        play(scene)

    def test_one_whose_key_is_just_gone_neither(self) -> None:
        async def scene(bench: Bench) -> None:
            _, run, agent = await running(bench)
            bench.store.write_now([Delete(KEYS.master)])
            agent.say(failure())
            await until(run.done)
            assert isinstance(run.exception(), FencedOut)
            assert [type(message) for message in agent.heard] == [StartRound]

        play(scene)

    def test_one_that_was_replaced_while_the_store_was_away_neither(self) -> None:
        async def scene(bench: Bench) -> None:
            _, run, agent = await running(bench)
            bench.store.fail_writes = 3

            def replaced_meanwhile() -> None:
                if not bench.store.fail_writes:
                    bench.crown()

            bench.store.on_failure = replaced_meanwhile
            agent.say(failure())
            await until(run.done)
            assert isinstance(run.exception(), FencedOut)
            assert [type(message) for message in agent.heard] == [StartRound]

        play(scene)


class TestTakingOver:
    def test_history_is_numbered_on(self) -> None:
        async def scene(bench: Bench) -> None:
            _, run, agent = await running(bench)
            run.cancel()
            await until(run.done)
            shell, _ = await bench.master()
            again = Agent(bench, shell, agent.info)
            again.attach(running=1)
            again.say(failure())
            await again.hears(StopRound)
            entries = bench.history()
            assert [entry.number for entry in entries] == list(range(1, len(entries) + 1))
            kinds = [entry.kind for entry in entries]
            assert kinds.index("world-formed") < kinds.index("worker-failed")
            assert shell.status().journal == tuple(entries[-10:])

        play(scene)

    def test_workers_go_on_when_their_agent_attaches_to_the_next_master(self) -> None:
        async def scene(bench: Bench) -> None:
            _, run, agent = await running(bench)
            run.cancel()
            await until(agent.stream.done)
            shell, _ = await bench.master()
            again = Agent(bench, shell, agent.info)
            again.attach(running=1)
            await until(lambda: shell.status().nodes[0].attached)
            await turns()
            assert again.heard == []
            assert (shell.status().phase, shell.status().round) == ("running", 1)

        play(scene)

    def test_followers_of_history_are_let_go(self) -> None:
        async def scene(bench: Bench) -> None:
            shell, run, _ = await running(bench)
            seen: list[int] = []

            async def follow() -> None:
                async for entry in shell.events(EventsRequest(0, True)):
                    seen.append(entry.number)

            follower = bench.start(follow())
            await until(lambda: len(seen) == len(bench.history()))
            run.cancel()
            await until(follower.done)
            assert seen == [entry.number for entry in bench.history()]

        play(scene)

    def test_a_straggler_does_not_run_an_ended_job_again(self) -> None:
        async def scene(bench: Bench) -> None:
            outcome = Finish(1, "worker 3 failed")
            bench.store.write_now([Put(KEYS.farewell, plain.dumps(outcome), bench.store.grant_now(10))])
            info = bench.register("straggler")
            shell, run = await bench.master()
            assert shell.ended
            agent = Agent(bench, shell, info)
            agent.attach()
            agent.ready()
            assert await agent.hears(Finish) == outcome
            agent.say(None)
            bench.store.revoke_now(info.incarnation)
            await until(run.done)
            assert run.exception() is None
            assert bench.record() is None

        play(scene)

    def test_the_end_of_another_job_is_not_its_end(self) -> None:
        async def scene(bench: Bench) -> None:
            bench.store.write_now([Put(KEYS.farewell + "-2", plain.dumps(Finish(0, "done")))])
            shell, _ = await bench.master()
            assert not shell.ended

        play(scene)


class TestStreams:
    def test_a_stream_that_ends_detaches_its_node(self) -> None:
        async def scene(bench: Bench) -> None:
            shell, _, agent = await running(bench)
            assert [view.attached for view in shell.status().nodes] == [True]
            agent.say(None)
            await until(agent.stream.done)
            await until(lambda: not shell.status().nodes[0].attached)
            assert shell.status().phase == "running"

        play(scene)

    def test_so_does_one_that_the_other_side_gives_up(self) -> None:
        async def scene(bench: Bench) -> None:
            shell, _, agent = await running(bench)
            agent.stream.cancel()
            await until(lambda: not shell.status().nodes[0].attached)

        play(scene)

    def test_a_peer_that_breaks_the_protocol_loses_its_stream_and_nothing_else(self) -> None:
        async def scene(bench: Bench) -> None:
            shell, run, agent = await running(bench)
            agent.say(ProtocolError("not a FromAgent message"))
            await until(agent.stream.done)
            assert agent.stream.exception() is None
            await until(lambda: not shell.status().nodes[0].attached)
            assert not run.done()
            assert [text for text in bench.said if "closing the stream of a: not a FromAgent message" in text]

        play(scene)

    def test_words_before_the_introduction_are_ignored(self) -> None:
        async def scene(bench: Bench) -> None:
            shell, _ = await bench.master()
            agent = Agent(bench, shell, bench.register("a"))
            agent.ready()
            agent.attach()
            await until(lambda: shell.status().nodes != () and shell.status().nodes[0].attached)
            await turns()
            assert agent.heard == []

        play(scene)

    def test_a_second_stream_of_a_node_takes_over_from_the_first(self) -> None:
        async def scene(bench: Bench) -> None:
            shell, _, first = await running(bench)
            second = Agent(bench, shell, first.info)
            second.attach(running=1)
            await turns()
            first.say(None)
            await until(first.stream.done)
            await turns()
            assert [view.attached for view in shell.status().nodes] == [True]
            second.say(failure())
            await second.hears(StopRound)
            assert first.last() is StartRound

        play(scene)


class TestNodes:
    def test_one_whose_lease_ends_is_lost(self) -> None:
        async def scene(bench: Bench) -> None:
            shell, _, _ = await running(bench)
            bench.clock.advance(TTL_S)
            bench.store.tick()
            await until(lambda: shell.status().nodes == ())
            await until(lambda: shell.status().phase == "forming")
            assert "node-lost" in [entry.kind for entry in bench.history()]

        play(scene)

    def test_one_that_detaches_and_refuses_connections_is_lost_before_that(self) -> None:
        async def scene(bench: Bench) -> None:
            shell, _, agent = await running(bench)
            bench.dead_ports = {agent.info.port}
            agent.say(None)
            await until(lambda: shell.status().phase == "forming")
            await until(lambda: agent.info.incarnation not in bench.store._leases)
            assert KEYS.node(agent.info.node) not in bench.stored()

        play(scene)

    def test_a_master_that_cannot_see_them_any_more_gives_up(self) -> None:
        async def scene(bench: Bench) -> None:
            _, run, _ = await running(bench)
            bench.store.break_watches = [StoreError("compacted")]
            bench.register("b", port=6000)
            await until(run.done)
            assert str(run.exception()) == "compacted"

        play(scene)


class TestEnd:
    def test_leaves_its_outcome_and_nothing_else(self) -> None:
        async def scene(bench: Bench) -> None:
            bench.store.write_now([Put(KEYS.spec, b"{}"), Put(KEYS.token, b"secret")])
            shell, run, agent = await running(bench)
            agent.say(WorkersDone(Round(1)))
            outcome = await agent.hears(Finish)
            assert isinstance(outcome, Finish)
            assert outcome.exit_code == 0
            assert shell.ended
            assert not shell.concluded.is_set()
            agent.say(None)
            bench.store.revoke_now(agent.info.incarnation)
            await until(run.done)
            assert run.exception() is None
            assert shell.concluded.is_set()
            assert bench.stored() == [KEYS.farewell, KEYS.master]
            (farewell,) = bench.store.read_now(KEYS.farewell).entries
            assert plain.loads(Finish, farewell.value) == outcome
            bench.clock.advance(shell_module.FAREWELL_TTL_S)
            assert bench.stored() == [KEYS.master]

        play(scene)

    def test_of_a_failed_job_names_the_failure(self) -> None:
        async def scene(bench: Bench) -> None:
            spec = dataclasses.replace(SPEC, max_restarts=0)
            _, _, agent = await running(bench, spec)
            agent.say(failure(7))
            await agent.hears(StopRound)
            agent.ready(seen=1)
            outcome = await agent.hears(Finish)
            assert isinstance(outcome, Finish)
            assert outcome.exit_code == 1
            assert [found.exit_code for found in outcome.failures] == [7]

        play(scene)

    def test_a_store_that_is_away_at_the_end_does_not_hold_it_up(self) -> None:
        async def scene(bench: Bench) -> None:
            _, run, agent = await running(bench)
            agent.say(WorkersDone(Round(1)))
            await agent.hears(Finish)
            bench.store.revoke_now(agent.info.incarnation)
            bench.store.fail_writes = 1_000_000
            agent.say(None)
            await until(run.done)

        play(scene)


class Launcher:
    """A candidate and what it was told."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.follows: list[tuple[str, Token]] = []
        self.rules: list[MasterShell | None] = []
        self.ruler = Ruler(NodeId(name), f"{name}.host", 5000)
        self.candidate = Candidate(bench.around(name), self.ruler, Callbacks(self._follow, self.rules.append))
        self.run = bench.start(self.candidate.run())
        self.lease = Incarnation(0)

    def _follow(self, ruler: Ruler, token: Token) -> None:
        self.follows.append((ruler.node, token))

    def register(self, bench: Bench) -> None:
        self.lease = Incarnation(bench.store.grant_now(TTL_S))
        self.candidate.registered(self.lease)

    @property
    def rules_now(self) -> bool:
        return bool(self.rules) and self.rules[-1] is not None


async def two(bench: Bench) -> tuple[Launcher, Launcher]:
    """One that rules and one that follows."""
    first, second = Launcher(bench, "a"), Launcher(bench, "b")
    first.register(bench)
    await until(lambda: first.rules_now and bool(second.follows))
    second.register(bench)
    await turns()
    return first, second


class TestElection:
    def test_one_rules_and_all_follow(self) -> None:
        async def scene(bench: Bench) -> None:
            launchers = [Launcher(bench, name) for name in "abc"]
            for launcher in launchers:
                launcher.register(bench)
            await until(lambda: all(launcher.follows for launcher in launchers))
            await turns()
            assert [launcher.rules_now for launcher in launchers].count(True) == 1
            (ruler,) = [launcher for launcher in launchers if launcher.rules_now]
            (entry,) = bench.store.read_now(KEYS.master).entries
            assert (entry.lease, plain.loads(Ruler, entry.value)) == (ruler.lease, ruler.ruler)
            assert {launcher.follows[-1] for launcher in launchers} == {
                (ruler.ruler.node, Token(entry.create_revision))
            }

        play(scene)

    def test_who_has_no_lease_does_not_stand(self) -> None:
        async def scene(bench: Bench) -> None:
            launcher = Launcher(bench, "a")
            await turns(200)
            assert launcher.rules == []
            assert bench.stored() == []

        play(scene)

    def test_the_next_one_rules_when_the_lease_of_the_first_ends(self) -> None:
        async def scene(bench: Bench) -> None:
            first, second = await two(bench)
            bench.store.revoke_now(first.lease)
            first.candidate.unregistered()
            await until(lambda: second.rules_now and first.follows[-1][0] == "b")
            assert not first.rules_now
            assert second.follows[-1][1] > first.follows[0][1]

        play(scene)

    def test_a_master_whose_host_refuses_connections_is_replaced(self) -> None:
        async def scene(bench: Bench) -> None:
            first, second = await two(bench)
            second.candidate.ruler_refused(second.follows[-1][1])
            await until(lambda: second.rules_now and not first.rules_now)
            await turns()  # what the watch tells late about the old key unseats nobody
            assert second.rules_now
            assert first.follows[-1] == second.follows[-1] == ("b", second.follows[-1][1])
            assert first.candidate.shell is None

        play(scene)

    def test_an_old_hint_replaces_nobody(self) -> None:
        async def scene(bench: Bench) -> None:
            first, second = await two(bench)
            second.candidate.ruler_refused(Token(second.follows[-1][1] - 1))
            await turns()
            assert first.rules_now
            assert not second.rules_now

        play(scene)

    def test_whoever_leaves_stops_ruling(self) -> None:
        async def scene(bench: Bench) -> None:
            launcher = Launcher(bench, "a")
            launcher.register(bench)
            await until(lambda: launcher.rules_now)
            shell = launcher.candidate.shell
            assert shell is not None
            await until(lambda: shell.serving)
            launcher.run.cancel()
            await until(launcher.run.done)
            assert launcher.rules[-1] is None
            assert not shell.serving

        play(scene)


class TestElectionWithoutStore:
    def test_a_campaign_without_an_answer_that_was_won_is_found_out(self) -> None:
        async def scene(bench: Bench) -> None:
            bench.store.fail_after_writing = 1
            launcher = Launcher(bench, "a")
            launcher.register(bench)
            await until(lambda: launcher.rules_now)
            (entry,) = bench.store.read_now(KEYS.master).entries
            assert launcher.follows == [("a", Token(entry.create_revision))]
            assert entry.create_revision == entry.mod_revision  # it was not created a second time

        play(scene)

    def test_one_that_was_lost_is_tried_again(self) -> None:
        async def scene(bench: Bench) -> None:
            bench.store.fail_writes = 3
            launcher = Launcher(bench, "a")
            launcher.register(bench)
            await until(lambda: launcher.rules_now)

        play(scene)

    def test_it_begins_when_the_store_comes(self) -> None:
        async def scene(bench: Bench) -> None:
            bench.store.available = False
            launcher = Launcher(bench, "a")
            launcher.candidate.registered(Incarnation(1))
            await turns(200)
            assert launcher.rules == []
            bench.store.available = True
            assert bench.store.grant_now(TTL_S) == 1
            await until(lambda: launcher.rules_now)

        play(scene)

    def test_a_watch_that_lost_the_thread_begins_again(self) -> None:
        async def scene(bench: Bench) -> None:
            follower = Launcher(bench, "b")
            await turns()
            bench.store.break_watches = [StoreError("compacted")]
            token = bench.crown()
            await until(lambda: bench.store.watches >= 2)
            await until(lambda: follower.follows == [("a", token)])
            assert not follower.run.done()

        play(scene)

    def test_a_store_that_refuses_ends_the_launcher(self) -> None:
        async def scene(bench: Bench) -> None:
            follower = Launcher(bench, "b")
            await turns()
            bench.store.break_watches = [StoreRefused("wrong password")]
            bench.crown()
            await until(follower.run.done)
            assert isinstance(follower.run.exception(), StoreRefused)

        play(scene)

    def test_a_master_that_lost_the_thread_makes_room_for_one_with_a_fresh_view(self) -> None:
        async def scene(bench: Bench) -> None:
            launcher = Launcher(bench, "a")
            launcher.register(bench)
            await until(lambda: launcher.candidate.shell is not None and launcher.candidate.shell.serving)
            await until(lambda: launcher.follows != [])
            first = launcher.candidate.shell
            token = launcher.follows[-1][1]
            await turns()
            bench.store.break_watches = [StoreError("compacted")]
            bench.register("b", port=6000)
            await until(lambda: launcher.candidate.shell not in (None, first))
            assert [text for text in bench.said if "giving the Master's place up: compacted" in text]
            await until(lambda: launcher.follows[-1][1] > token)
            await until(lambda: launcher.rules_now)

        play(scene)

    def test_a_master_that_finds_itself_replaced_follows(self) -> None:
        async def scene(bench: Bench) -> None:
            launcher = Launcher(bench, "a")
            launcher.register(bench)
            await until(lambda: launcher.rules_now and launcher.follows != [])
            other = Ruler(NodeId("z"), "z.host", 1)
            bench.store.write_now([Delete(KEYS.master)])
            revision = bench.store.write_now([Put(KEYS.master, plain.dumps(other))])
            await until(lambda: launcher.follows[-1] == ("z", revision))
            assert not launcher.rules_now
            assert launcher.candidate.shell is None
            assert [text for text in bench.said if "no longer the Master" in text]

        play(scene)
