"""The agent, event by event."""

from __future__ import annotations

from typing import TypeVar

import pytest

from edl.agent.machine import events as ev
from edl.agent.machine.machine import begin, describe_exit, step
from edl.agent.machine.state import AgentPhase, AgentState, Outcome
from edl.config import Timeouts
from edl.exit_codes import ExitCode
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.alarm import Alarm
from edl.wire.messages import (
    Alarms,
    Attach,
    Dismissed,
    Expelled,
    Finish,
    Leaving,
    MasterMessage,
    NotKept,
    NotLogged,
    StartRound,
    StopRound,
    WorkerFailed,
    WorkersDone,
)
from edl.wire.process_events import ForkServerLost, WorkersStopped
from edl.wire.records import Member, NodeInfo, World

T = TypeVar("T")
INFO = NodeInfo(NodeId("a"), Incarnation(1), "a", 1, 2)
SIGTERM, SIGKILL, SIGINT = 15, 9, 2


def world(round: int, incarnation: int = 1) -> World:
    other = Member(NodeId("z"), Incarnation(9), "z", 2, Rank(0), (1, 2, 3))
    return World(Round(round), (other, Member(INFO.node, Incarnation(incarnation), "a", 2, Rank(2), (4, 5, 6))), 0)


class Node:
    """An agent under test."""

    def __init__(self, shutdown_s: float = 10.0) -> None:
        self.now_s = 50.0
        self.state = AgentState(INFO, Timeouts(shutdown_s=shutdown_s, lease_ttl_s=3.0), contact_s=50.0)
        assert begin(self.state).effects == (ev.Warm(),)
        self.effects: tuple[ev.Effect, ...] = ()
        self.saves_at_once = True
        """There is nothing to wait for when the workers have ended."""

    def feed(self, *events: ev.Event) -> Node:
        self.effects = ()
        for event in events:
            decision = step(self.state, event, self.now_s)
            self.state = decision.state
            self.effects += decision.effects
            for effect in decision.effects:
                if isinstance(effect, ev.FlushSaves) and self.saves_at_once:
                    flushed = step(self.state, ev.SavesFlushed(effect.round), self.now_s)
                    self.state, self.effects = flushed.state, (*self.effects, *flushed.effects)
        return self

    def hear(self, message: MasterMessage) -> Node:
        return self.feed(ev.MasterSaid(message))

    def wait(self, for_s: float) -> Node:
        self.now_s += for_s
        return self.feed(ev.Tick())

    def did(self, kind: type[T]) -> list[T]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def said(self) -> list[object]:
        return [effect.message for effect in self.did(ev.Say)]


def idle() -> Node:
    return Node().feed(ev.Connected(), ev.ForkServerReady())


def running(shutdown_s: float = 10.0) -> Node:
    node = Node(shutdown_s).feed(ev.Connected(), ev.ForkServerReady())
    node.hear(StartRound(world(1), "2 nodes ready"))
    assert node.state.phase is AgentPhase.RUNNING
    return node


def ended(local_rank: int, code: int, *, round: int = 1, peer_loss: bool = False) -> ev.WorkerEnded:
    return ev.WorkerEnded(Round(round), local_rank, code, peer_loss=peer_loss)


def test_says_who_it_is_and_is_ready_when_warm() -> None:
    node = Node().feed(ev.Connected())
    assert node.said() == [Attach(INFO, Round(0), Round(0), False)]
    assert not node.did(ev.Announce)
    assert node.feed(ev.ForkServerReady()).did(ev.Announce)


def test_starts_a_world_once() -> None:
    node = idle()
    assert node.hear(StartRound(world(1), "why")).did(ev.Start) == [ev.Start(world(1), (0, 1))]
    assert node.state.reason == "why"
    assert [worker.rank for worker in node.state.workers] == [2, 3]
    node.hear(StopRound(Round(1), "over")).feed(ended(0, -SIGTERM), ended(1, -SIGTERM))
    assert node.hear(StartRound(world(1), "stale")).did(ev.Start) == []
    assert node.hear(StartRound(world(2), "next")).did(ev.Start) == [ev.Start(world(2), (0, 1))]


def test_a_start_order_for_another_life_is_ignored() -> None:
    assert idle().hear(StartRound(world(1, incarnation=7), "not me")).did(ev.Start) == []
    node = idle().feed(ev.LeaseGone())
    assert node.hear(StartRound(world(1), "too late")).did(ev.Start) == []


def test_an_order_it_cannot_follow_is_remembered_as_seen() -> None:
    node = idle().feed(ForkServerLost("killed"))
    assert node.hear(StartRound(world(1), "why")).did(ev.Start) == []
    assert node.feed(ev.ForkServerReady()).did(ev.Announce)
    assert node.state.seen_round == 1, "so that the Master learns that nothing runs here"


def test_stops_on_the_masters_word_and_is_ready_again() -> None:
    node = running().hear(StopRound(Round(1), "node z lost"))
    assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGTERM, (0, 1))]
    assert node.state.reason == "node z lost"
    node.feed(ended(0, -SIGTERM))
    assert not node.did(ev.Announce)
    node.feed(ended(1, -SIGTERM))
    assert node.did(ev.Announce)
    assert node.said() == []
    assert node.state.phase is AgentPhase.IDLE


def test_kills_who_does_not_stop() -> None:
    node = running(shutdown_s=10.0).hear(StopRound(Round(1), "over")).feed(ended(0, -SIGTERM))
    assert ev.WakeAt(60.0) in node.effects
    node.wait(10.0)
    assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGKILL, (1,))]
    assert node.state.reason == "workers still run 10 s after the signal: killing them"
    assert node.feed(ended(1, -SIGKILL)).said() == []


def test_a_frozen_worker_is_killed_without_waiting() -> None:
    node = running().feed(ev.WorkerFroze(Round(1), 1)).hear(StopRound(Round(1), "over"))
    assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGKILL, (1,)), ev.SignalWorkers(SIGTERM, (0,))]


def test_a_worker_frozen_for_long_is_condemned() -> None:
    node = running().feed(ev.WorkerFroze(Round(1), 1))
    node.now_s += 2.0
    node.feed(ev.LeaseRenewed())
    node.wait(1.0)
    assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGKILL, (1,))]
    message = node.feed(ended(1, -SIGKILL, peer_loss=True)).said()[0]
    assert isinstance(message, WorkerFailed)
    assert message.failure.what == "was frozen (stopped by a signal) for 3 s and killed"
    assert not message.failure.peer_loss


def test_a_worker_that_goes_on_in_time_is_left_alone() -> None:
    node = running().feed(ev.WorkerFroze(Round(1), 1), ev.WorkerThawed(Round(1), 1))
    assert node.wait(5.0).did(ev.SignalWorkers) == []


def test_workers_killed_for_the_nodes_sake_are_no_failure() -> None:
    node = running().feed(WorkersStopped("the launcher was silent for 3.1 s"))
    assert ev.Log("the launcher was silent for 3.1 s") in node.effects
    said = node.feed(ended(0, -SIGKILL), ended(1, -SIGKILL)).said()
    assert [message for message in said if isinstance(message, WorkerFailed)] == []
    assert node.state.phase is AgentPhase.IDLE
    assert node.did(ev.Announce) == [ev.Announce()]
    assert node.state.stopped_itself, "the Master is told so, because it may have heard of consequences first"


def test_workers_killed_after_the_master_stopped_the_round_are_not_the_cause() -> None:
    stop = ev.MasterSaid(StopRound(Round(1), "a worker failed"))
    node = running().feed(stop, WorkersStopped("the launcher was silent for 3.1 s"))
    assert not node.state.stopped_itself


def test_a_failure_is_told_and_told_again() -> None:
    node = running().feed(ended(1, 3))
    (message,) = node.said()
    assert isinstance(message, WorkerFailed)
    assert (message.failure.rank, message.failure.what) == (3, "ended with exit status 3")
    again = node.feed(ev.Disconnected(), ev.Connected()).said()
    assert again == [Attach(INFO, Round(1), Round(1), False, unbroken=True), message]


def test_a_worker_that_gives_up_says_with_which_status_the_job_ends() -> None:
    node = running().feed(ev.WorkerGaveUp(Round(1), 1, 11), ended(1, 1))
    (message,) = node.said()
    assert isinstance(message, WorkerFailed)
    assert message.failure.final == 11
    other = running().feed(ev.WorkerGaveUp(Round(1), 1, 11), ended(0, 1)).said()[0]
    assert isinstance(other, WorkerFailed)
    assert other.failure.final == 0


def test_a_failure_without_a_master_is_logged_here() -> None:
    node = running().feed(ev.Disconnected(), ended(1, 3))
    assert node.said() == []
    assert node.state.reason == "worker 3 (local rank 1) ended with exit status 3"


def test_an_idle_node_that_reaches_nobody_gives_up() -> None:
    node = idle().feed(ev.Disconnected())
    limit_s = node.state.timeouts.recover_s
    phases = [node.wait(seconds).state.phase for seconds in (limit_s - 0.5, 0.5)]
    assert phases == [AgentPhase.IDLE, AgentPhase.OVER]
    assert node.state.outcome is not None
    assert node.state.outcome.exit_code == ExitCode.STORE_UNREACHABLE


def test_success_is_told_when_all_have_ended() -> None:
    node = running().feed(ended(0, 0))
    assert node.said() == []
    assert node.feed(ended(1, 0)).said() == [WorkersDone(Round(1))]
    assert node.feed(ev.Disconnected(), ev.Connected()).said() == [
        Attach(INFO, Round(1), Round(1), True, unbroken=True)
    ]


def test_a_node_is_through_once_what_its_workers_saved_is_written() -> None:
    node = running()
    node.saves_at_once = False
    assert node.feed(ended(0, 0), ended(1, 0)).did(ev.FlushSaves) == [ev.FlushSaves(Round(1))]
    assert node.said() == []
    assert node.feed(ev.SavesFlushed(Round(1), pending=True)).said() == [WorkersDone(Round(1), saving=True)]
    again = Attach(INFO, Round(1), Round(1), True, saving=True, unbroken=True)
    assert node.feed(ev.Disconnected(), ev.Connected()).said() == [again]
    lost = "commit 9 is not in the checkpoint directory: disk full"
    assert node.feed(ev.SavesFlushed(Round(1), unsaved=lost)).said() == [WorkersDone(Round(1), unsaved=lost)]
    assert node.state.reason == lost
    after = Attach(INFO, Round(1), Round(1), True, unsaved=lost, unbroken=True)
    assert node.feed(ev.Disconnected(), ev.Connected()).said() == [after]


def test_what_was_saved_in_an_earlier_round_does_not_end_this_one() -> None:
    node = running()
    node.saves_at_once = False
    node.feed(ended(0, 0), ended(1, 0)).hear(StopRound(Round(1), "node z lost"))
    assert node.feed(ev.SavesFlushed(Round(1))).said() == []
    node.hear(StartRound(world(2), "again"))
    assert node.feed(ev.SavesFlushed(Round(1))).said() == []
    node.saves_at_once = True
    assert node.feed(ended(0, 0, round=2), ended(1, 0, round=2)).said() == [WorkersDone(Round(2))]


def test_commits_without_memory_are_told_once_and_to_each_master() -> None:
    node = running().feed(ev.KeepingChanged("no room"), ev.KeepingChanged("no room"))
    assert node.said() == [NotKept("no room")]
    assert NotKept("no room") in node.feed(ev.Disconnected(), ev.Connected()).said()
    assert node.feed(ev.KeepingChanged("")).said() == [NotKept("")]


def test_logs_without_room_are_told_once_and_to_each_master() -> None:
    node = running().feed(ev.LoggingChanged("no room"), ev.LoggingChanged("no room"))
    assert node.said() == [NotLogged("no room")]
    assert NotLogged("no room") in node.feed(ev.Disconnected(), ev.Connected()).said()
    assert node.feed(ev.LoggingChanged("")).said() == [NotLogged("")]


def test_alarms_are_told_when_they_change_and_to_each_master() -> None:
    full = Alarm("disk-space", "log directory /l", "critical", "1 GiB free")
    node = running()
    assert not [said for said in node.feed(ev.Disconnected(), ev.Connected()).said() if isinstance(said, Alarms)]
    assert node.feed(ev.AlarmsChanged(()), ev.AlarmsChanged(())).said() == [Alarms(())]
    assert node.feed(ev.AlarmsChanged((full,))).said() == [Alarms((full,))]
    assert Alarms((full,)) in node.feed(ev.Disconnected(), ev.Connected()).said()


def test_a_cause_that_shows_while_stopping_is_told() -> None:
    node = running().hear(StopRound(Round(1), "worker 0 on z ended with exit status 1"))
    (message,) = node.feed(ended(0, 1)).said()
    assert isinstance(message, WorkerFailed)


@pytest.mark.parametrize(("peer_loss", "told"), [(False, 1), (True, 0)])
def test_an_error_on_its_way_when_the_stop_came_is_told_but_not_the_loss_of_a_peer(peer_loss: bool, told: int) -> None:
    """The peer was stopped like this worker: what it met is no cause of anything."""
    node = running().hear(StopRound(Round(1), "b joined"))
    error = ev.WorkerEnded(Round(1), 0, -SIGTERM, "ValueError: the loss is not a number", peer_loss=peer_loss)
    assert [type(message) for message in node.feed(error).said()] == [WorkerFailed] * told


def test_lease_lost_for_good_stops_the_workers_and_hangs_up() -> None:
    node = running().feed(ev.LeaseGone())
    assert node.state.reason == "the lease of this node has ended: stopping the workers"
    assert node.did(ev.Register)
    assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGTERM, (0, 1))]
    node.feed(ended(0, -SIGTERM), ended(1, -SIGTERM))
    assert not node.did(ev.Announce), "it has no name to be ready under"
    assert node.feed(ev.Connected()).said() == []
    fresh = NodeInfo(INFO.node, Incarnation(2), "a", 1, 2)
    node.feed(ev.Registered(fresh))
    assert node.said() == [Attach(fresh, Round(0), Round(0), False)]
    assert node.did(ev.Announce)


def test_expelled_means_the_same_unless_it_carries_a_status() -> None:
    assert running().hear(Expelled("its lease ended")).did(ev.Register)
    node = running().hear(Expelled("bad node", 5))
    assert node.feed(ended(0, -SIGTERM), ended(1, -SIGTERM)).did(ev.Exit) == [ev.Exit(Outcome(5, "bad node"))]


def test_cut_off_from_store_and_master_it_stops_its_workers() -> None:
    node = running().feed(ev.Disconnected())
    assert ev.WakeAt(53.0) in node.effects
    node.now_s += 2.0
    assert node.feed(ev.LeaseRenewed()).did(ev.SignalWorkers) == []
    node.wait(3.0)
    assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGTERM, (0, 1))]
    assert node.did(ev.Log)[0].text.startswith("no contact with the store or the Master for 3 s: stopping the workers")
    assert ev.WakeAt(node.now_s + 10.0) in node.effects, "nothing else may happen here before they must be killed"
    assert node.wait(10.0).did(ev.SignalWorkers) == [ev.SignalWorkers(SIGKILL, (0, 1))]


def test_attached_it_outlives_the_store() -> None:
    assert running().wait(1000.0).did(ev.SignalWorkers) == []


def test_the_end_of_the_job_ends_the_launcher() -> None:
    node = running().feed(ended(0, 0), ended(1, 0)).hear(Finish(0, "all done"))
    assert node.did(ev.Exit) == [ev.Exit(Outcome(0, "all done", job_over=True))]
    assert node.feed(ev.Connected()).effects == ()


def test_an_error_after_the_end_of_the_job_does_not_bring_it_back() -> None:
    node = running().hear(Finish(0, "all done")).feed(ev.Fatal(Outcome(7, "no such program")))
    (effect,) = node.feed(ended(0, -SIGTERM), ended(1, -SIGTERM)).did(ev.Exit)
    assert effect.outcome.job_over and not node.state.leaves


def test_sigterm_is_announced_and_the_workers_get_their_grace() -> None:
    node = running().feed(ev.Interrupted(SIGTERM, again=False))
    assert node.said() == [Leaving("SIGTERM")]
    assert node.did(ev.Log)[0].text == "SIGTERM: leaving the job; the workers have 10 s"
    node.feed(ended(0, -SIGTERM), ended(1, 0)).hear(Dismissed("nothing to wait for", needed=True))
    assert node.did(ev.Exit) == [ev.Exit(Outcome(ExitCode.TERMINATED, "left the job on SIGTERM"))]


def test_a_second_signal_means_now() -> None:
    node = running().feed(ev.Interrupted(SIGINT, again=False), ev.Interrupted(SIGINT, again=True))
    assert node.did(ev.SignalWorkers)[-1] == ev.SignalWorkers(SIGKILL)
    assert node.did(ev.Exit) == [ev.Exit(Outcome(ExitCode.INTERRUPTED, "left the job on SIGINT"))]


def test_a_lost_fork_server_is_started_again() -> None:
    node = idle().feed(ForkServerLost("killed by SIGKILL"))
    assert node.did(ev.Warm)
    assert node.state.phase is AgentPhase.WARMING
    assert node.state.reason == "the fork server has died (killed by SIGKILL): starting another"


def test_fatal_leaves_the_job() -> None:
    node = idle().feed(ev.Fatal(Outcome(7, "no such program")))
    assert node.said() == [Leaving("no such program")]
    assert node.did(ev.Exit) == [ev.Exit(Outcome(7, "no such program"))]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "ended with exit status 0"),
        (3, "ended with exit status 3"),
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV"),
        (-99, "was killed by signal 99"),
    ],
)
def test_exits_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text
