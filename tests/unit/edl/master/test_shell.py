"""The elected Master's shell: nothing is said that is not stored."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

import pytest

from edl.config import JobSpec, NodeRange
from edl.errors import FencedOut, ProtocolError, StoreError
from edl.master import candidate as candidate_module
from edl.master import guarded as guarded_module
from edl.master.chronicle import WrittenStep
from edl.master.farewell import FAREWELL_TTL_S, say_farewell
from edl.master.shell import MasterShell
from edl.master.state import Phase
from edl.ports import Delete, Guard, Put
from edl.types import NodeId, Rank, Round
from edl.wire import plain
from edl.wire.messages import Finish, StartRound, StopRound, WorkerFailed, WorkersDone
from edl.wire.records import Failure
from edl.wire.scale_requests import Resize
from edl.wire.status import EventsRequest
from tests.support.master_fixture import KEYS, SPEC, TTL_S, Agent, Bench, play, turns, until


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_module, "RETRY_S", 0)
    monkeypatch.setattr(candidate_module, "CAMPAIGN_PAUSE_S", 0)


async def running(bench: Bench, spec: JobSpec = SPEC) -> tuple[MasterShell, asyncio.Future[Finish], Agent]:
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
        async def scenario(bench: Bench) -> None:
            _, _, agent = await running(bench)
            order = agent.heard[0]
            assert isinstance(order, StartRound)
            record = bench.record()
            assert record is not None
            assert (record.phase, record.round, record.world) == (Phase.RUNNING, 1, order.world)
            assert [entry.kind for entry in bench.history()][-2:] == ["node-joined", "world-formed"]

        play(scenario)

    def test_while_the_store_is_away_nothing_is_said(self) -> None:
        async def scenario(bench: Bench) -> None:
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
            assert len([text for text in bench.said if "world changes wait for the store" in text]) == 1
            kinds = [entry.kind for entry in bench.history()]
            assert (kinds.count("node-joined"), kinds.count("world-formed")) == (1, 1)  # and nothing was written twice

        play(scenario)

    def test_a_decision_waits_as_long_as_the_store_is_away(self) -> None:
        async def scenario(bench: Bench) -> None:
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

        play(scenario)

    def test_while_a_decision_waits_a_node_that_breaks_off_is_missed(self) -> None:
        """It may follow another Master by now, so this one must not go on as if it had all nodes."""

        async def scenario(bench: Bench) -> None:
            shell, _, agent = await running(bench)
            assert not shell.misses_nodes
            bench.store.available = False
            agent.say(failure())
            await turns(200)
            assert not shell.misses_nodes, "its stream is open"
            agent.say(None)
            await until(lambda: shell.misses_nodes)
            bench.store.available = True

        play(scenario)

    def test_what_is_recorded_is_in_the_store(self) -> None:
        async def scenario(bench: Bench) -> None:
            written: list[WrittenStep] = []
            deps = dataclasses.replace(bench.deps(), written=written.append)
            shell = MasterShell(deps, token := bench.crown())
            run = bench.start(shell.run())
            await until(lambda: shell.serving)
            agent = Agent(bench, shell, bench.register("a"))
            agent.attach()
            agent.ready()
            await agent.hears(StartRound)
            entries = [entry for step in written for entry in step.added]
            assert entries == bench.history()
            assert (written[0].before, written[0].kept, {step.term for step in written}) == (None, (), {token})
            assert all(step.before is earlier.state for earlier, step in itertools.pairwise(written))
            bench.store.available = False
            agent.say(failure())
            await turns(200)
            assert [entry for step in written for entry in step.added] == entries
            bench.store.available = True
            bench.crown()
            with pytest.raises(FencedOut):
                await run
            assert [entry for step in written for entry in step.added] == entries, "another Master rules"
            later: list[WrittenStep] = []
            again = MasterShell(dataclasses.replace(deps, written=later.append), bench.crown())
            bench.start(again.run())
            await until(lambda: again.serving)
            assert later[0].kept == tuple(entries)

        play(scenario)

    def test_a_take_over_waits_for_the_store_as_well(self) -> None:
        async def scenario(bench: Bench) -> None:
            shell = MasterShell(bench.deps(), bench.crown())
            bench.store.available = False
            run = bench.start(shell.run())
            await turns()
            assert not shell.serving
            assert not run.done()
            bench.store.available = True
            await until(lambda: shell.serving)

        play(scenario)


class TestManyAtOnce:
    """What comes while a write is under way shares the next one."""

    def test_share_a_write_and_are_told_in_order(self) -> None:
        async def scenario(bench: Bench) -> None:
            shell, _ = await bench.master(dataclasses.replace(SPEC, nodes=NodeRange(40, 40)))
            agents = [Agent(bench, shell, bench.register(f"n{one}")) for one in range(40)]
            before = bench.store.writes
            for agent in agents:
                agent.attach()
                agent.ready()
            await asyncio.gather(*(agent.hears(StartRound) for agent in agents))
            assert bench.store.writes - before <= 8, "40 nodes, each of which joined and was ready"
            joined = [entry.number for entry in bench.history()]
            assert joined == list(range(1, len(joined) + 1))
            joins = [entry.text for entry in bench.history() if entry.kind == "node-joined"]
            assert joins == ["40 nodes are ready: n0, n1, n2, n3, n4, n5, n6, n7 and 32 more"]

        play(scenario)

    def test_a_request_among_them_is_answered_with_the_revision_of_its_own_write(self) -> None:
        async def scenario(bench: Bench) -> None:
            shell, _, agent = await running(bench, dataclasses.replace(SPEC, nodes=NodeRange(1, 4)))
            agent.say(failure())
            first, second = await asyncio.gather(shell.submit(Resize(2, "me")), shell.submit(Resize(3, "me")))
            assert first.ok and second.ok
            assert (first.generation, second.generation) == (1, 2)
            assert first.revision < second.revision == shell.status().scale.revision

        play(scenario)


class TestFencing:
    def test_a_master_that_was_replaced_says_nothing_more(self) -> None:
        async def scenario(bench: Bench) -> None:
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

        play(scenario)

    def test_one_whose_key_is_just_gone_neither(self) -> None:
        async def scenario(bench: Bench) -> None:
            _, run, agent = await running(bench)
            bench.store.write_now([Delete(KEYS.master)])
            agent.say(failure())
            await until(run.done)
            assert isinstance(run.exception(), FencedOut)
            assert [type(message) for message in agent.heard] == [StartRound]

        play(scenario)

    def test_one_that_was_replaced_while_the_store_was_away_neither(self) -> None:
        async def scenario(bench: Bench) -> None:
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

        play(scenario)


class TestTakingOver:
    def test_history_is_numbered_on(self) -> None:
        async def scenario(bench: Bench) -> None:
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
            assert shell.status().history == tuple(entries[-10:])

        play(scenario)

    def test_workers_go_on_when_their_agent_attaches_to_the_next_master(self) -> None:
        async def scenario(bench: Bench) -> None:
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

        play(scenario)

    def test_followers_of_history_are_let_go(self) -> None:
        async def scenario(bench: Bench) -> None:
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

        play(scenario)

    def test_a_straggler_does_not_run_an_ended_job_again(self) -> None:
        async def scenario(bench: Bench) -> None:
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

        play(scenario)

    def test_the_end_of_another_job_is_not_its_end(self) -> None:
        async def scenario(bench: Bench) -> None:
            bench.store.write_now([Put(KEYS.farewell + "-2", plain.dumps(Finish(0, "done")))])
            shell, _ = await bench.master()
            assert not shell.ended

        play(scenario)


class TestStreams:
    def test_a_stream_that_ends_detaches_its_node(self) -> None:
        async def scenario(bench: Bench) -> None:
            shell, _, agent = await running(bench)
            assert [view.attached for view in shell.status().nodes] == [True]
            agent.say(None)
            await until(agent.stream.done)
            await until(lambda: not shell.status().nodes[0].attached)
            assert shell.status().phase == "running"

        play(scenario)

    def test_so_does_one_that_the_other_side_gives_up(self) -> None:
        async def scenario(bench: Bench) -> None:
            shell, _, agent = await running(bench)
            agent.stream.cancel()
            await until(lambda: not shell.status().nodes[0].attached)

        play(scenario)

    def test_a_peer_that_breaks_the_protocol_loses_its_stream_and_nothing_else(self) -> None:
        async def scenario(bench: Bench) -> None:
            shell, run, agent = await running(bench)
            agent.say(ProtocolError("not a FromAgent message"))
            await until(agent.stream.done)
            assert agent.stream.exception() is None
            await until(lambda: not shell.status().nodes[0].attached)
            assert not run.done()
            assert [text for text in bench.said if "closing the stream of a: not a FromAgent message" in text]

        play(scenario)

    def test_words_before_the_introduction_are_ignored(self) -> None:
        async def scenario(bench: Bench) -> None:
            shell, _ = await bench.master()
            agent = Agent(bench, shell, bench.register("a"))
            agent.ready()
            agent.attach()
            await until(lambda: shell.status().nodes != () and shell.status().nodes[0].attached)
            await turns()
            assert agent.heard == []

        play(scenario)

    def test_a_stream_whose_first_message_comes_after_the_rule_is_closed(self) -> None:
        """Otherwise its node would wait for ever, connected to a Master that is no more."""

        async def scenario(bench: Bench) -> None:
            _, run, agent = await running(bench)
            late = Agent(bench, agent.shell, bench.register("b"))
            bench.crown()
            agent.say(failure())
            await until(run.done)
            assert isinstance(run.exception(), FencedOut)
            assert not late.stream.done(), "it has said nothing yet"
            late.attach()
            await until(late.stream.done)
            assert late.heard == []

        play(scenario)

    def test_a_second_stream_of_a_node_takes_over_from_the_first(self) -> None:
        async def scenario(bench: Bench) -> None:
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

        play(scenario)

    def test_an_order_decided_before_a_stream_opened_is_not_sent_on_it(self) -> None:
        """Otherwise a start order could reach an agent that the Master takes for free, as its new stream said
        (schedule 211588: the node ran a world that had been stopped, for ever)."""

        async def scenario(bench: Bench) -> None:
            shell, _ = await bench.master()
            first = Agent(bench, shell, bench.register("a"))
            first.attach()
            await until(lambda: shell.status().nodes != () and shell.status().nodes[0].attached)
            bench.store.available = False
            first.ready()
            await turns()  # decided to start, and waits for the store
            second = Agent(bench, shell, first.info)
            second.attach()
            await turns()
            bench.store.available = True
            await second.hears(StartRound)
            await turns()
            assert first.heard == [], "its stream had ended"
            assert [type(message) for message in second.heard] == [StartRound], "once: as the answer to its Attach"

        play(scenario)


class TestNodes:
    def test_one_whose_lease_ends_is_lost(self) -> None:
        async def scenario(bench: Bench) -> None:
            shell, _, _ = await running(bench)
            bench.clock.advance(TTL_S)
            bench.store.tick()
            await until(lambda: shell.status().nodes == ())
            await until(lambda: shell.status().phase == "forming")
            assert "node-lost" in [entry.kind for entry in bench.history()]

        play(scenario)

    def test_one_that_detaches_and_refuses_connections_is_lost_before_that(self) -> None:
        async def scenario(bench: Bench) -> None:
            shell, _, agent = await running(bench)
            bench.dead_ports = {agent.info.port}
            agent.say(None)
            await until(lambda: shell.status().phase == "forming")
            await until(lambda: agent.info.incarnation not in bench.store._leases)
            assert KEYS.node(agent.info.node) not in bench.stored()

        play(scenario)

    def test_a_master_that_cannot_see_them_any_more_gives_up(self) -> None:
        async def scenario(bench: Bench) -> None:
            _, run, _ = await running(bench)
            bench.store.break_watches = [StoreError("compacted")]
            bench.register("b", port=6000)
            assert str(await bench.failure(run)) == "compacted"

        play(scenario)


class TestWhatIsNotOurs:
    def test_an_unreadable_key_is_named_and_blinds_nobody(self) -> None:
        async def scenario(bench: Bench) -> None:
            bench.store.write_now([Put(f"{KEYS.nodes}old", b"of another program"), Put(KEYS.history_entry(1), b"[")])
            _, run, _ = await running(bench, dataclasses.replace(SPEC, nodes=NodeRange(1, 4)))
            bench.store.write_now([Put(f"{KEYS.nodes}new", b"{}")])
            later = bench.register("b")
            await until(lambda: any(f"ignoring {KEYS.nodes}new" in text for text in bench.said))
            bench.store.revoke_now(later.incarnation)
            await until(lambda: any(entry.kind == "node-lost" for entry in bench.history()[1:]))
            assert not run.done()
            assert [text.split(":")[0] for text in bench.said if "ignoring" in text][:2] == [
                f"ignoring {KEYS.nodes}old",
                f"ignoring {KEYS.history_entry(1)}",
            ]

        play(scenario)

    def test_a_mistake_in_a_background_task_ends_the_rule_instead_of_blinding_it(self) -> None:
        async def scenario(bench: Bench) -> None:
            _, run, _ = await running(bench)

            class Broken(Exception):
                pass

            bench.store.break_watches = [Broken()]  # type: ignore[list-item]
            bench.register("b")
            assert isinstance(await bench.failure(run), Broken)

        play(scenario)


class TestEnd:
    def test_leaves_its_outcome_and_nothing_else(self) -> None:
        async def scenario(bench: Bench) -> None:
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
            bench.clock.advance(FAREWELL_TTL_S)
            assert bench.stored() == [KEYS.master]

        play(scenario)

    def test_names_of_launchers_that_have_not_heard_stay_as_long_as_the_outcome(self) -> None:
        async def scenario(bench: Bench) -> None:
            names = [KEYS.launcher(NodeId(name)) for name in ("a", *(f"n{index}" for index in range(150)))]
            for name in names:
                bench.store.write_now([Put(name, b"")])
            _, run, agent = await running(bench)
            agent.say(WorkersDone(Round(1)))
            await agent.hears(Finish)
            bench.store.write_now([Delete(names[0])])  # this one has
            agent.say(None)
            bench.store.revoke_now(agent.info.incarnation)
            await until(run.done)
            assert bench.stored() == [KEYS.farewell, *sorted(names[1:]), KEYS.master]
            bench.clock.advance(FAREWELL_TTL_S)
            assert bench.stored() == [KEYS.master]

        play(scenario)

    def test_a_master_that_was_replaced_leaves_the_names_of_launchers_alone(self) -> None:
        """They may be those of the next run by now."""

        async def scenario(bench: Bench) -> None:
            token = bench.crown()
            name = KEYS.launcher(NodeId("n1"))
            bench.store.write_now([Put(name, b"")])
            bench.crown()
            with pytest.raises(FencedOut):
                await say_farewell(bench.store, KEYS, Guard(KEYS.master, token), Finish(0, "done"))
            assert KEYS.farewell not in bench.stored()
            bench.clock.advance(FAREWELL_TTL_S)
            assert name in bench.stored()

        play(scenario)

    def test_that_it_is_over_is_told_to_who_comes_before_all_have_heard(self) -> None:
        async def scenario(bench: Bench) -> None:
            _, run, agent = await running(bench)
            assert KEYS.over not in bench.stored()
            agent.say(WorkersDone(Round(1)))
            await agent.hears(Finish)
            assert KEYS.over in bench.stored()
            agent.say(None)
            bench.store.revoke_now(agent.info.incarnation)
            await until(run.done)
            assert KEYS.over not in bench.stored()

        play(scenario)

    def test_of_a_failed_job_names_the_failure(self) -> None:
        async def scenario(bench: Bench) -> None:
            spec = dataclasses.replace(SPEC, max_restarts=0)
            _, _, agent = await running(bench, spec)
            agent.say(failure(7))
            await agent.hears(StopRound)
            agent.ready(seen=1)
            outcome = await agent.hears(Finish)
            assert isinstance(outcome, Finish)
            assert outcome.exit_code == 1
            assert [found.exit_code for found in outcome.failures] == [7]

        play(scenario)

    def test_a_store_that_is_away_at_the_end_does_not_hold_it_up(self) -> None:
        async def scenario(bench: Bench) -> None:
            _, run, agent = await running(bench)
            agent.say(WorkersDone(Round(1)))
            await agent.hears(Finish)
            bench.store.revoke_now(agent.info.incarnation)
            bench.store.fail_writes = 1_000_000
            agent.say(None)
            await until(run.done)

        play(scenario)
