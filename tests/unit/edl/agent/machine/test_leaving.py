"""How a node leaves, its exit status, and nodes of a suspended job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from edl.agent.machine import events as ev
from edl.agent.machine.rounds import NO_WORLD
from edl.agent.machine.state import AgentPhase, Outcome, WorkerStatus
from edl.agent.machine.turn import BURY_S
from edl.exit_codes import ExitCode
from edl.types import Incarnation, Round
from edl.wire import local
from edl.wire.messages import (
    Depart,
    Dismissed,
    Finish,
    Hold,
    Idle,
    Leaving,
    Preparing,
    Prestart,
    StartRound,
    StopRound,
    Switch,
)
from edl.wire.purpose import Purpose
from edl.wire.records import Version
from edl.wire.scale_requests import DrainMode
from tests.unit.edl.agent.machine.test_machine import SIGINT, SIGKILL, SIGTERM, Node, ended, idle, running, world
from tests.unit.edl.agent.machine.test_rounds import entered, parked, phase, told, training

DRAINED = 21


def settled(node: Node) -> Node:
    node.state = dataclasses.replace(node.state, drained_exit_code=DRAINED)
    return node


def outcome(node: Node) -> Outcome:
    (effect,) = node.did(ev.Exit)
    return effect.outcome


def resting() -> Node:
    """A node outside any world, with workers that wait for one."""
    node = idle().hear(Prestart("rejoin")).feed(entered(0, born=0), parked(0, born=0), entered(1, born=0))
    return node.feed(parked(1, born=0))


class TestDepart:
    def test_workers_go_on_to_a_boundary_and_the_launcher_ends_as_drained(self) -> None:
        node = settled(training()).hear(Depart("edl drain: rack 7", 20.0))
        assert node.said() == [Leaving("edl drain: rack 7", 10.0)]
        assert phase(node) is AgentPhase.RUNNING
        node.hear(Hold(Round(1), 4)).hear(Switch(Round(1), 4, 9, Purpose.SWITCH, "a to leave"))
        node.feed(parked(0, left=1), parked(1, left=1))
        node.hear(Dismissed("the others continue without this node"))
        node.feed(ended(0, 0), ended(1, 0))
        assert outcome(node) == Outcome(DRAINED, "left the job: edl drain: rack 7", drained=True)

    def test_it_still_has_to_when_it_comes_back_under_a_new_lease(self) -> None:
        node = settled(idle()).hear(Depart("me", 20.0)).feed(ev.LeaseGone())
        fresh = dataclasses.replace(node.state.info, incarnation=Incarnation(7))
        node.feed(ev.Connected(), ev.Registered(fresh))
        assert Leaving("left the job: me", 5.0) in node.said()

    def test_without_a_deadline_it_has_as_long_as_on_sigterm(self) -> None:
        assert training().hear(Depart("me", 0.0)).said() == [Leaving("me", 5.0)]

    def test_one_that_the_job_waits_for_ends_as_on_sigterm(self) -> None:
        node = settled(idle()).hear(Depart("me", 20.0)).hear(Dismissed("too few nodes are left", needed=True))
        assert (outcome(node).exit_code, outcome(node).drained) == (ExitCode.TERMINATED, False)

    def test_one_that_does_not_get_away_in_time_as_well_and_a_late_word_changes_nothing(self) -> None:
        node = settled(training()).hear(Depart("me", 20.0)).wait(10.0)
        assert phase(node) is AgentPhase.LEAVING
        assert node.said() == [Leaving("left the job: me")]
        node.hear(Dismissed("the others continue without this node")).feed(ended(0, -SIGTERM), ended(1, -SIGTERM))
        assert outcome(node).exit_code == ExitCode.TERMINATED

    def test_a_launcher_does_not_wait_for_ever_for_one_that_cannot_be_killed(self) -> None:
        """It waits for a driver that hangs, for example."""
        node = running().hear(Finish(0, "done"))
        node.wait(node.state.timeouts.shutdown_s)
        assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGKILL, (0, 1))]
        node.feed(ended(0, -SIGKILL)).wait(BURY_S - 1)
        assert phase(node) is AgentPhase.LEAVING
        node.wait(1)
        assert outcome(node) == Outcome(0, "done", job_over=True)

    def test_without_care_nothing_is_saved_for_it(self) -> None:
        node = settled(idle()).hear(Depart("me", 20.0, DrainMode.NO)).hear(Dismissed("nothing to wait for"))
        assert (outcome(node).drained, outcome(node).save) == (True, False)

    @pytest.mark.parametrize(
        ("first", "then", "saves"), [(DrainMode.TRY, DrainMode.NO, False), (DrainMode.NO, DrainMode.TRY, True)]
    )
    def test_of_several_requests_the_newest_says_whether_to_save(
        self, first: DrainMode, then: DrainMode, saves: bool
    ) -> None:
        node = settled(idle()).hear(Depart("me", 20.0, first)).hear(Depart("me", 20.0, then))
        assert outcome(node.hear(Dismissed("nothing to wait for"))).save is saves

    def test_sigterm_meanwhile_changes_nothing_and_a_shorter_notice_counts(self) -> None:
        node = settled(training()).hear(Depart("me", 20.0))
        assert node.feed(ev.Interrupted(SIGTERM, again=False)).effects == (ev.WakeAt(55.0),)
        node.feed(ev.Noticed("spot", 2.0)).wait(1.0)
        assert phase(node) is AgentPhase.LEAVING

    def test_sigterm_while_its_workers_end_keeps_what_it_ends_with(self) -> None:
        node = settled(training()).hear(Depart("me", 20.0)).hear(Dismissed("the others go on"))
        assert phase(node) is AgentPhase.LEAVING
        node.feed(ev.Interrupted(SIGTERM, again=False)).feed(ended(0, -SIGTERM), ended(1, -SIGTERM))
        assert outcome(node).exit_code == DRAINED

    def test_the_end_of_the_job_counts_for_more(self) -> None:
        node = settled(training()).hear(Depart("me", 20.0)).hear(Finish(3, "no nodes"))
        node.hear(Dismissed("late")).feed(ended(0, -SIGTERM), ended(1, -SIGTERM))
        assert outcome(node).exit_code == 3


class TestSignals:
    def test_a_spare_asks_and_ends_as_drained(self) -> None:
        node = settled(idle()).feed(ev.Interrupted(SIGTERM, again=False))
        assert node.said() == [Leaving("SIGTERM", 5.0)]
        assert phase(node) is AgentPhase.IDLE
        assert outcome(node.hear(Dismissed("nothing to wait for"))).exit_code == DRAINED

    def test_a_spare_that_is_not_answered_leaves_all_the_same(self) -> None:
        node = settled(idle()).feed(ev.Interrupted(SIGTERM, again=False)).wait(5.0)
        assert outcome(node).exit_code == ExitCode.TERMINATED

    def test_a_spare_without_a_master_leaves_at_once(self) -> None:
        node = settled(idle()).feed(ev.Disconnected(), ev.Interrupted(SIGTERM, again=False))
        assert outcome(node).exit_code == ExitCode.TERMINATED

    def test_a_node_that_trains_waits_for_the_next_master_to_let_it_go(self) -> None:
        """As two nodes that are drained one after the other, the Master's first."""
        node = settled(training()).feed(ev.Disconnected(), ev.Interrupted(SIGTERM, again=False))
        assert (phase(node), node.said(), node.did(ev.SignalWorkers)) == (AgentPhase.RUNNING, [], [])
        node.feed(ev.Connected())
        assert Leaving("left the job on SIGTERM", 5.0) in node.said()

    def test_but_not_longer_than_a_node_without_a_master_may_train(self) -> None:
        node = settled(training()).feed(ev.Disconnected(), ev.Interrupted(SIGTERM, again=False)).wait(3.0)
        assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGTERM, (0, 1))]
        assert outcome(node.feed(ended(0, -SIGTERM), ended(1, -SIGTERM))).exit_code == ExitCode.TERMINATED

    def test_plain_workers_end_at_once_and_the_master_says_how_the_launcher_does(self) -> None:
        node = settled(running()).feed(ev.Interrupted(SIGTERM, again=False))
        assert node.said() == [Leaving("SIGTERM")]
        assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGTERM, (0, 1))]
        node.hear(Dismissed("nothing to wait for")).feed(ended(0, -SIGTERM), ended(1, -SIGTERM))
        assert outcome(node) == Outcome(DRAINED, "left the job on SIGTERM", drained=True)

    def test_plain_workers_that_are_gone_before_the_word_comes_are_no_reason_to_miss_it(self) -> None:
        node = settled(running()).feed(ev.Interrupted(SIGTERM, again=False), ended(0, -SIGTERM), ended(1, -SIGTERM))
        assert not node.did(ev.Exit)
        assert outcome(node.hear(Dismissed("nothing to wait for"))).exit_code == DRAINED

    @pytest.mark.parametrize("silent", [lambda node: node.wait(5.0), lambda node: node.feed(ev.Disconnected())])
    def test_but_nobody_waits_for_it_for_long(self, silent: Callable[[Node], Node]) -> None:
        node = settled(running()).feed(ev.Interrupted(SIGTERM, again=False), ended(0, -SIGTERM), ended(1, -SIGTERM))
        assert outcome(silent(node)).exit_code == ExitCode.TERMINATED

    @pytest.mark.parametrize("start", [idle, running, training])
    def test_ctrl_c_stays_ctrl_c(self, start: object) -> None:
        assert callable(start)
        node = settled(start()).feed(ev.Interrupted(SIGINT, again=False)).hear(Dismissed("go"))
        if not node.did(ev.Exit):
            node.feed(ended(0, -SIGINT), ended(1, -SIGINT))
        assert node.state.outcome is not None
        assert (node.state.outcome.exit_code, node.state.outcome.drained) == (ExitCode.INTERRUPTED, False)

    def test_on_the_way_to_a_boundary_it_goes_there_first(self) -> None:
        node = settled(training()).hear(Hold(Round(1), 4)).hear(Switch(Round(1), 4, 9, Purpose.SWITCH, "c joined"))
        node.feed(ev.Interrupted(SIGTERM, again=False))
        assert node.said() == [Leaving("SIGTERM", 5.0)]
        assert not node.did(ev.SignalWorkers)
        node.feed(parked(0, left=1), parked(1, left=1))
        assert (phase(node), bool(node.did(ev.Announce))) == (AgentPhase.IDLE, True)

    @pytest.mark.parametrize(
        "more",
        [
            ev.Noticed("spot", 30.0),
            ev.Interrupted(SIGTERM, again=False),
            ev.MasterSaid(Depart("me", 20.0)),
            ev.MasterSaid(Finish(1, "the job has ended")),
            ev.Fatal(Outcome(7, "no such program")),
        ],
        ids=["a notice", "a signal", "an order", "the end of the job", "an error"],
    )
    def test_workers_that_are_ending_get_no_second_signal_and_no_more_time(self, more: ev.Event) -> None:
        """A script may take a second SIGTERM as the word to give up what it is saving."""
        node = settled(running()).feed(ev.Interrupted(SIGTERM, again=False)).wait(4.0)
        node.feed(more)
        assert not node.did(ev.SignalWorkers)
        assert node.wait(6.0).did(ev.SignalWorkers) == [ev.SignalWorkers(SIGKILL, (0, 1))]

    def test_a_notice_that_comes_after_the_signal_says_how_long_there_is_to_save(self) -> None:
        node = settled(running()).feed(ev.Interrupted(SIGTERM, again=False), ev.Noticed("spot", 30.0))
        assert node.state.gone_by_s == node.now_s + 30.0

    @pytest.mark.parametrize("leaving", [True, False])
    def test_a_second_signal_ends_it_at_once(self, leaving: bool) -> None:
        node = settled(running())
        if leaving:
            node.feed(ev.Noticed("spot", 30.0))
        node.feed(ev.Interrupted(SIGTERM, again=True))
        assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGKILL)]
        why = "left the job: spot" if leaving else "SIGTERM twice"
        assert (phase(node), outcome(node)) == (AgentPhase.OVER, Outcome(int(ExitCode.TERMINATED), why))

    def test_so_does_a_first_one_once_its_workers_have_been_killed(self) -> None:
        node = settled(running()).feed(ev.Noticed("spot", 30.0)).wait(10.0)
        assert phase(node) is AgentPhase.LEAVING
        assert phase(node.feed(ev.Interrupted(SIGTERM, again=False))) is AgentPhase.OVER
        killed = settled(running()).hear(StopRound(Round(1), "over")).wait(10.0)
        assert phase(killed.feed(ev.Interrupted(SIGTERM, again=False))) is AgentPhase.LEAVING, "it did not leave yet"

    @pytest.mark.parametrize(
        ("start", "seconds"),
        [
            pytest.param(idle, 5.0, id="never in a world: only for the answer"),
            pytest.param(resting, 5.0, id="waiting for its first world: only for the answer"),
            pytest.param(
                lambda: training().hear(StopRound(Round(1), "z lost")).feed(parked(0, left=1), parked(1, left=1)),
                20.0,
                id="it may hold the state of the next world",
            ),
        ],
    )
    def test_a_node_outside_a_world_waits_as_long_as_it_may_be_needed(
        self, start: Callable[[], Node], seconds: float
    ) -> None:
        assert settled(start()).feed(ev.Noticed("spot", 40.0)).said() == [Leaving("spot", seconds)]

    def test_a_node_whose_round_is_interrupted_leaves_at_once(self) -> None:
        node = settled(training()).hear(StopRound(Round(1), "z lost")).feed(ev.Noticed("spot", 40.0))
        assert (phase(node), node.said()) == (AgentPhase.LEAVING, [Leaving("spot")])

    @pytest.mark.parametrize("cut", [ev.Disconnected(), ev.LeaseGone()], ids=["no Master", "no lease"])
    def test_nobody_answers_a_node_that_the_master_does_not_know(self, cut: ev.Event) -> None:
        node = settled(running()).feed(cut, ev.Interrupted(SIGTERM, again=False))
        node.feed(ended(0, -SIGTERM), ended(1, -SIGTERM))
        assert outcome(node).exit_code == ExitCode.TERMINATED

    def test_a_notice_is_like_a_signal_but_workers_get_sigterm(self) -> None:
        node = running().feed(ev.Noticed("spot instance ends", 30.0))
        assert node.said() == [Leaving("spot instance ends")]
        assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGTERM, (0, 1))]


class TestIdle:
    def test_waiting_workers_end_and_none_is_started_instead(self) -> None:
        node = resting().hear(Idle("suspended by me"))
        assert told(node) == [local.Stop(NO_WORLD)]
        assert phase(node) is AgentPhase.PREPARING
        node.feed(ended(0, 0, round=0))
        assert not node.did(ev.Announce)
        node.feed(ended(1, 0, round=0))
        assert (phase(node), bool(node.did(ev.Announce)), node.state.parked) == (AgentPhase.IDLE, True, False)
        assert not node.did(ev.StartAhead)

    def test_what_is_in_memory_is_written_by_who_is_asked_to(self) -> None:
        node = idle().hear(Idle("suspended by me", Version(1, 9)))
        assert node.did(ev.Write) == [ev.Write(Version(1, 9), "suspended by me")]
        assert not idle().hear(Idle("suspended by me")).did(ev.Write)

    def test_those_that_do_not_end_are_killed(self) -> None:
        node = resting().hear(Idle("suspended by me")).wait(10.0)
        assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGKILL, (0, 1))]

    def test_the_next_world_starts_new_ones(self) -> None:
        node = resting().hear(Idle("suspended by me")).feed(ended(0, 0, round=0), ended(1, 0, round=0))
        node.hear(StartRound(world(1), "resumed"))
        assert node.did(ev.Start) == [ev.Start(world(1), (0, 1))]
        assert not node.state.idling

    def test_a_world_that_comes_while_they_end_is_not_given_to_them(self) -> None:
        node = resting().hear(Idle("suspended by me")).hear(StartRound(world(1), "resumed"))
        assert not node.did(ev.GivePlace)
        assert node.state.seen_round == 1
        node.feed(ended(0, 0, round=0), ended(1, 0, round=0))
        assert node.did(ev.Announce)

    def test_workers_that_park_later_end_as_well(self) -> None:
        node = training().hear(StopRound(Round(1), "stop")).hear(Idle("suspended by me"))
        node.feed(parked(0, left=1), parked(1, left=1))
        assert local.Stop(NO_WORLD) in told(node)
        assert phase(node) is AgentPhase.PREPARING

    def test_one_without_workers_says_that_it_is_ready(self) -> None:
        assert idle().hear(Idle("suspended by me")).did(ev.Announce)

    def test_prestart_takes_it_back(self) -> None:
        node = idle().hear(Idle("suspended by me")).hear(Prestart("go"))
        assert node.said() == [Preparing(Round(0), "starting workers ahead of the next world")]
        assert node.did(ev.StartAhead) == [ev.StartAhead((0, 1), Round(0))]

    def test_independent_workers_end(self) -> None:
        node = Node()
        node.state = dataclasses.replace(node.state, independent=True)
        node.feed(ev.Connected(), ev.ForkServerReady()).hear(StartRound(world(1), "go")).hear(
            StopRound(Round(1), "suspended")
        )
        assert [worker.status for worker in node.state.workers] == [WorkerStatus.ALIVE] * 2
        node.hear(Idle("suspended by me"))
        assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGTERM, (0, 1))]
        node.feed(ended(0, -SIGTERM), ended(1, -SIGTERM))
        assert (phase(node), bool(node.did(ev.Announce))) == (AgentPhase.IDLE, True)
