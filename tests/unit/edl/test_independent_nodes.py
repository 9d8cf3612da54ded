"""The agent of a job whose workers need no others, event by event."""

from __future__ import annotations

import pytest

from edl.agent.machine import events as ev
from edl.agent.machine import independent
from edl.agent.machine.machine import begin, step
from edl.agent.machine.state import AgentPhase, AgentState, Outcome
from edl.config import JobSpec, NodeRange, SlotRules, Timeouts
from edl.exit_codes import START_OVER, ExitCode
from edl.job_records import Training
from edl.master import events as ms
from edl.master import machine as master
from edl.master.state import MasterState, Phase
from edl.types import Incarnation, JobId, NodeId, Rank, Round
from edl.wire.messages import (
    AgentMessage,
    Asked,
    Attach,
    Dismissed,
    Finish,
    Hold,
    Leaving,
    Ready,
    StartRound,
    StopRound,
    WorkerFailed,
    WorkersDone,
)
from edl.wire.process_events import ForkServerLost
from edl.wire.purpose import Purpose
from edl.wire.records import Member, NodeInfo, World
from tests.unit.edl.agent.machine.test_machine import INFO, SIGKILL, SIGTERM, Node, ended, world


def trainers(shutdown_s: float = 10.0) -> Node:
    """A node with two trainers in round 1."""
    node = Node(shutdown_s)
    timeouts = Timeouts(shutdown_s=shutdown_s, lease_ttl_s=3.0)
    node.state = AgentState(INFO, timeouts, contact_s=50.0, independent=True)
    begin(node.state)
    node.feed(ev.Connected(), ev.ForkServerReady()).hear(StartRound(world(1), "2 nodes ready"))
    assert node.state.phase is AgentPhase.RUNNING
    return node


def without(round: int) -> World:
    """A world in which the node under test has no part."""
    return World(Round(round), (Member(NodeId("z"), Incarnation(9), "z", 2, Rank(0), (1, 2, 3)),), 0)


def moved(round: int, rank: int) -> World:
    """A world in which its ranks have changed."""
    return World(Round(round), (Member(INFO.node, INFO.incarnation, "a", 2, Rank(rank), (4, 5, 6)),), 0)


def undisturbed(node: Node) -> bool:
    return not node.did(ev.SignalWorkers) and not node.did(ev.TellWorkers)


# --- from one world to the next --------------------------------------------------------------------------------------


def test_a_stopped_round_disturbs_nobody() -> None:
    node = trainers().hear(StopRound(Round(1), "node z lost"))
    assert undisturbed(node)
    assert node.did(ev.Announce)
    assert (node.state.phase, len(node.state.in_world)) == (AgentPhase.IDLE, 2)


def test_those_that_live_are_told_their_new_places() -> None:
    node = trainers().hear(StopRound(Round(1), "node z lost")).hear(StartRound(moved(2, 0), "1 node is left"))
    assert undisturbed(node)
    assert node.did(ev.GivePlace) == [ev.GivePlace(moved(2, 0), (0, 1))]
    assert not node.did(ev.Start)
    assert [(one.rank, one.born) for one in node.state.workers] == [(0, 1), (1, 1)]


def test_only_who_failed_is_started_again() -> None:
    node = trainers().feed(ended(1, 3))
    (failed,) = node.said()
    assert isinstance(failed, WorkerFailed)
    node.hear(StopRound(Round(1), "worker 3 ended with exit status 3")).hear(StartRound(world(2), "again"))
    assert undisturbed(node)
    assert node.did(ev.Start) == [ev.Start(world(2), (1,))]
    assert node.did(ev.GivePlace) == [ev.GivePlace(world(2), (0,))]
    assert node.state.workers[1].how == "restarted (ended with exit status 3)"
    # The event names the process by the round it was born in.
    assert node.feed(ended(1, 0, round=1)).state.workers[1].status.value == "alive"
    assert node.feed(ended(1, 0, round=2)).state.workers[1].status.value == "done"


def test_a_trainer_may_fail_between_two_worlds() -> None:
    node = trainers().hear(StopRound(Round(1), "node z lost")).feed(ended(0, -SIGKILL))
    (failed,) = node.said()
    assert isinstance(failed, WorkerFailed)
    assert not node.did(ev.Announce)
    assert node.hear(StartRound(world(2), "again")).did(ev.Start) == [ev.Start(world(2), (0,))]


def test_who_has_finished_stays_finished() -> None:
    node = trainers().feed(ended(0, 0)).hear(StopRound(Round(1), "node z lost"))
    node.feed(ended(1, 0))
    assert node.said() == [], "there is no world to be done with"
    node.hear(StartRound(world(2), "again"))
    assert not node.did(ev.Start) and not node.did(ev.GivePlace)
    assert node.said() == [WorkersDone(Round(2))]
    node.hear(StopRound(Round(2), "node y joins")).hear(StartRound(world(3), "once more"))
    assert node.said() == [WorkersDone(Round(3))]
    assert node.hear(Finish(0, "all done")).did(ev.Exit) == [ev.Exit(Outcome(0, "all done", job_over=True))]


def test_a_node_without_a_part_in_the_world_ends_its_trainers() -> None:
    node = trainers().hear(StopRound(Round(1), "node y joins")).hear(StartRound(without(2), "again"))
    assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGTERM, (0, 1))]
    node.feed(ended(0, -SIGTERM))
    assert not node.did(ev.Announce)
    assert node.feed(ended(1, -SIGTERM)).did(ev.Announce)
    # Later it has one again.
    assert node.hear(StartRound(world(3), "again")).did(ev.Start) == [ev.Start(world(3), (0, 1))]


def test_an_old_world_without_it_means_nothing() -> None:
    node = trainers().hear(StartRound(without(1), "stale"))
    assert undisturbed(node)


def test_nobody_is_held_at_a_step_boundary() -> None:
    node = trainers().feed(ev.WorkerEntered(Round(1), 0, rejoins=True), ev.WorkerUnderway(Round(1), 0, Round(1)))
    node.feed(ev.WorkerEntered(Round(1), 1, rejoins=False), ev.WorkerUnderway(Round(1), 1, Round(1)))
    assert node.said() == []
    assert undisturbed(node.hear(Hold(Round(1), 4)))


def test_a_trainer_gets_its_place_when_it_asks() -> None:
    node = trainers().feed(ev.WorkerEntered(Round(1), 0, rejoins=False))
    assert node.did(ev.GivePlace) == [ev.GivePlace(world(1), (0,))]
    node.hear(StopRound(Round(1), "node y joins")).feed(ev.WorkerEntered(Round(1), 1, rejoins=False))
    assert not node.did(ev.GivePlace), "the next world's is on its way"
    assert node.hear(StartRound(world(2), "again")).did(ev.GivePlace) == [ev.GivePlace(world(2), (0, 1))]


# --- starting over ---------------------------------------------------------------------------------------------------


def test_who_has_to_start_over_is_started_at_once_and_has_not_failed() -> None:
    node = trainers().feed(ended(1, START_OVER))
    assert node.said() == []
    assert node.did(ev.Start) == [ev.Start(world(1), (1,))]
    assert node.feed(ended(1, 0), ended(0, 0)).said() == [WorkersDone(Round(1))]


def test_between_two_worlds_it_waits_for_the_next() -> None:
    node = trainers().hear(StopRound(Round(1), "node y joins")).feed(ended(1, START_OVER))
    assert node.said() == []
    assert not node.did(ev.Start)
    assert node.hear(StartRound(world(2), "again")).did(ev.Start) == [ev.Start(world(2), (1,))]


def test_who_does_nothing_but_start_over_has_failed() -> None:
    node = trainers()
    for _ in range(independent.MOST_RENEWALS):
        assert node.feed(ended(1, START_OVER)).said() == []
    (failed,) = node.feed(ended(1, START_OVER)).said()
    assert isinstance(failed, WorkerFailed)


def test_a_long_life_between_two_beginnings_is_no_row_of_them() -> None:
    node = trainers()
    for _ in range(independent.MOST_RENEWALS):
        node.feed(ended(1, START_OVER))
    node.now_s += independent.LIVED_S
    assert node.feed(ended(1, START_OVER)).did(ev.Start) == [ev.Start(world(1), (1,))]
    node.hear(StopRound(Round(1), "node y joins")).feed(ended(1, START_OVER)).hear(StartRound(world(2), "again"))
    for _ in range(independent.MOST_RENEWALS - 2):
        assert node.feed(ended(1, START_OVER, round=2)).said() == []
    assert isinstance(node.feed(ended(1, START_OVER, round=2)).said()[0], WorkerFailed), (
        "those before the new world count too"
    )


def test_starting_over_while_the_launcher_leaves_is_an_end() -> None:
    node = trainers().feed(ev.Interrupted(SIGTERM, again=False), ended(0, START_OVER), ended(1, -SIGTERM))
    assert not node.did(ev.Start)
    assert node.hear(Dismissed("nothing to wait for")).did(ev.Exit)


# --- where nobody may be left ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", [False, True])
def test_without_its_lease_it_ends_its_trainers(between: bool) -> None:
    node = trainers()
    if between:
        node.hear(StopRound(Round(1), "node z lost"))
    node.feed(ev.LeaseGone())
    assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGTERM, (0, 1))]
    assert node.did(ev.Register)
    node.feed(ended(0, -SIGTERM), ended(1, -SIGTERM), ev.Connected())
    fresh = NodeInfo(INFO.node, Incarnation(2), "a", 1, 2)
    assert node.feed(ev.Registered(fresh)).said() == [Attach(fresh, Round(0), Round(0), False)]
    again = world(3, incarnation=2)
    assert node.hear(StartRound(again, "again")).did(ev.Start) == [ev.Start(again, (0, 1))]


@pytest.mark.parametrize("between", [False, True])
def test_cut_off_from_everybody_it_ends_its_trainers(between: bool) -> None:
    node = trainers()
    if between:
        node.hear(StopRound(Round(1), "node z lost"))
    node.feed(ev.Disconnected())
    assert node.wait(2.9).did(ev.SignalWorkers) == []
    assert node.wait(0.1).did(ev.SignalWorkers) == [ev.SignalWorkers(SIGTERM, (0, 1))]
    assert node.wait(10.0).did(ev.SignalWorkers) == [ev.SignalWorkers(SIGKILL, (0, 1))]


def test_a_new_master_finds_them_training() -> None:
    node = trainers().feed(ev.Disconnected())
    assert node.feed(ev.Connected()).said() == [Attach(INFO, Round(1), Round(1), False, unbroken=True)]
    node.hear(StopRound(Round(1), "node z lost")).feed(ev.Disconnected())
    assert node.feed(ev.Connected()).said() == [Attach(INFO, Round(1), Round(0), False, unbroken=True)]
    assert node.did(ev.Announce)
    assert undisturbed(node)


@pytest.mark.parametrize("between", [False, True])
def test_it_leaves_without_waiting_for_a_boundary(between: bool) -> None:
    node = trainers()
    if between:
        node.hear(StopRound(Round(1), "node z lost"))
    node.feed(ev.Interrupted(SIGTERM, again=False))
    assert node.said() == [Leaving("SIGTERM")]
    assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGTERM, (0, 1))]
    node.feed(ended(0, -SIGTERM), ended(1, 0)).hear(Dismissed("nothing to wait for", needed=True))
    assert node.did(ev.Exit) == [ev.Exit(Outcome(ExitCode.TERMINATED, "left the job on SIGTERM"))]


def test_when_the_fork_server_dies_the_trainers_are_started_with_the_next_world() -> None:
    node = trainers().hear(StopRound(Round(1), "node z lost"))
    node.feed(ForkServerLost("killed"), ended(0, -SIGKILL), ended(1, -SIGKILL))
    assert node.state.phase is AgentPhase.WARMING
    assert node.feed(ev.ForkServerReady()).did(ev.Announce)
    assert node.hear(StartRound(world(2), "again")).did(ev.Start) == [ev.Start(world(2), (0, 1))]


# --- with a Master ---------------------------------------------------------------------------------------------------


class Two:
    """A Master and two agents, each with one trainer; messages arrive at once and in order."""

    def __init__(self, *, maximum: int = 2, unit: int = 1, strikes: int = 2) -> None:
        spec = JobSpec(JobId("j"), NodeRange(unit, maximum, unit), servers=Training(), slots=SlotRules(strikes))
        self.now_s = 10.0
        self.agents: dict[NodeId, AgentState] = {}
        self.effects: dict[NodeId, list[ev.Effect]] = {}
        self.notes: list[str] = []
        self.state: MasterState
        self._rule(master.take_over(spec, None, [], self.now_s))

    def join(self, name: str) -> None:
        node = NodeId(name)
        info = NodeInfo(node, Incarnation(len(self.agents) + 1), name, 1, 1)
        self.agents[node] = AgentState(info, Timeouts(), contact_s=self.now_s, independent=True)
        self.effects[node] = []
        self.say(ms.NodeRegistered(info))
        for event in (ev.ForkServerReady(), ev.Connected()):
            self.feed(name, event)

    def feed(self, name: str, event: ev.Event) -> None:
        node = NodeId(name)
        decision = step(self.agents[node], event, self.now_s)
        self.agents[node] = decision.state
        self.effects[node] += decision.effects
        for effect in decision.effects:
            match effect:
                case ev.Say(Attach() as attach):
                    self.say(ms.NodeAttached(attach))
                case ev.Say(message):
                    self._said(node, message)
                case ev.FlushSaves(number):
                    self.feed(name, ev.SavesFlushed(number))
                case ev.Announce():
                    self._said(node, Ready(self.agents[node].seen_round, (1, 2)))

    def _said(self, node: NodeId, message: AgentMessage) -> None:
        self.say(ms.NodeSaid(node, self.agents[node].info.incarnation, message))

    def say(self, event: ms.Event) -> None:
        self._rule(master.step(self.state, event, self.now_s))

    def tick(self, for_s: float) -> None:
        self.now_s += for_s
        self.say(ms.Tick())

    def _rule(self, decision: ms.Decision) -> None:
        self.state = decision.state
        for effect in decision.effects:
            match effect:
                case ms.TellNode(node, _, message) if node in self.agents:
                    self.feed(node, ev.MasterSaid(message))
                case ms.HistoryNote(_, text, _):
                    self.notes.append(text)

    def did(self, name: str, kind: type[ev.Effect]) -> list[ev.Effect]:
        """Effects of this kind since the last call."""
        found = [effect for effect in self.effects[NodeId(name)] if isinstance(effect, kind)]
        self.effects[NodeId(name)].clear()
        return found

    def ends(self, name: str, code: int) -> None:
        born = self.agents[NodeId(name)].workers[0].born
        self.feed(name, ev.WorkerEnded(born, 0, code))


def test_the_master_changes_worlds_in_one_go() -> None:
    job = Two()
    job.join("a")
    job.tick(2.0)
    assert job.state.record.round == 1
    assert job.did("a", ev.Start)
    job.join("b")
    assert (job.state.record.phase, job.state.record.round) == (Phase.RUNNING, 2)
    assert not job.did("a", ev.SignalWorkers)
    assert job.did("b", ev.Start)
    job.ends("b", 1)
    assert (job.state.record.phase, job.state.record.round, job.state.record.restarts) == (Phase.RUNNING, 3, 1)
    assert not job.did("a", ev.SignalWorkers)
    assert job.did("b", ev.Start)
    job.feed("b", ev.Interrupted(SIGTERM, again=False))
    assert [member.node for member in job.state.record.world.members] == ["a"] if job.state.record.world else False
    assert job.state.record.restarts == 1
    assert not job.did("a", ev.SignalWorkers)
    job.ends("a", 0)
    assert job.state.record.phase is Phase.ENDED
    assert job.state.record.outcome is not None and job.state.record.outcome.exit_code == 0


def test_a_lost_node_disturbs_nobody() -> None:
    job = Two()
    job.join("a")
    job.join("b")
    assert job.state.record.round == 1
    job.say(ms.NodeExpired(NodeId("b"), Incarnation(2)))
    assert (job.state.record.phase, job.state.record.round) == (Phase.RUNNING, 2)
    assert not job.did("a", ev.SignalWorkers)


def test_all_failures_together_are_charged_until_the_budget_is_spent() -> None:
    job = Two(strikes=0)
    job.join("a")
    job.join("b")
    for restarts in (1, 2, 3):
        job.ends("a", 1)
        assert job.state.record.restarts == restarts
    job.ends("a", 1)
    assert job.state.record.outcome is not None
    assert job.state.record.outcome.exit_code == ExitCode.WORKER_FAILED
    assert job.did("b", ev.SignalWorkers)


def test_a_surplus_node_ends_its_trainer() -> None:
    """Three nodes in units of two: whoever is left over is a spare, and must not train on."""
    job = Two(maximum=4, unit=2)
    for name in "abcd":
        job.join(name)
    job.tick(2.0)
    assert job.state.record.world is not None and len(job.state.record.world.members) == 4
    job.say(ms.NodeExpired(NodeId("a"), Incarnation(1)))
    members = {member.node for member in job.state.record.world.members}
    (spare,) = {"b", "c", "d"} - members
    assert job.did(spare, ev.SignalWorkers) == [ev.SignalWorkers(SIGTERM, (0,))]
    for member in members:
        assert not job.did(member, ev.SignalWorkers)


def test_settings_changed_by_hand_hold_at_once() -> None:
    job = Two()
    job.join("a")
    job.join("b")
    job.feed("a", ev.Report(Asked(Purpose.SET, "someone", "lr-scale=0.5")))
    assert (job.state.record.phase, job.state.record.round) == (Phase.RUNNING, 2)
    assert job.state.record.settings.scale == 0.5
    (given,) = job.did("b", ev.GivePlace)
    assert isinstance(given, ev.GivePlace) and given.world.settings.scale == 0.5
    assert not job.did("a", ev.SignalWorkers)
