"""A job's history and its state as people see them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine

import pytest

from edl.config import FaultTolerance, JobSpec, NodeRange
from edl.job_records import Training
from edl.master.events import HistoryNote, Kind
from edl.master.history import KEPT, JobHistory
from edl.master.state import Agreement, MasterState, NodeEntry, NodeStatus, Phase, Record
from edl.master.view import job_status, reply
from edl.types import Incarnation, JobId, NodeId, Rank, Round
from edl.wire.purpose import Purpose
from edl.wire.records import Failure, Member, NodeInfo, Version, World
from edl.wire.status import Answer, HistoryEntry

TURNS = 20


def filled(count: int) -> JobHistory:
    history = JobHistory()
    for number in range(1, count + 1):
        history.publish([history.make(HistoryNote(Kind.NODE_JOINED, f"text {number}", "a"), 3, 100.0 + number)])
    return history


def play(scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(scenario())


async def numbers(lines: AsyncIterator[HistoryEntry]) -> list[int]:
    return [entry.number async for entry in lines]


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


class TestNumbering:
    def test_counts_from_one_and_keeps_what_a_note_says(self) -> None:
        history = JobHistory()
        first = history.make(HistoryNote(Kind.NODE_LOST, "gone", "a"), 3, 12.5)
        assert first == HistoryEntry(1, 12.5, "node-lost", "gone", "a", 3)
        assert history.make(HistoryNote(Kind.WAITING, "why"), 3, 13.0).number == 2

    def test_a_line_is_not_shown_before_it_is_published(self) -> None:
        history = JobHistory()
        entry = history.make(HistoryNote(Kind.WAITING, "why"), 0, 1.0)
        assert history.last(10) == ()
        history.publish([entry])
        assert history.last(10) == (entry,)

    def test_goes_on_where_the_last_master_stopped(self) -> None:
        history = JobHistory()
        history.load([HistoryEntry(7, 2.0, "k", "b"), HistoryEntry(6, 1.0, "k", "a")])
        assert [entry.number for entry in history.last(10)] == [6, 7]
        assert history.make(HistoryNote(Kind.WAITING, "why"), 0, 3.0).number == 8

    def test_begins_at_one_when_there_is_nothing(self) -> None:
        history = JobHistory()
        history.load([])
        assert history.make(HistoryNote(Kind.WAITING, "why"), 0, 3.0).number == 1


class TestKeeping:
    def test_forgets_the_oldest(self) -> None:
        history = filled(KEPT + 5)
        kept = history.last(KEPT * 2)
        assert (len(kept), kept[0].number, kept[-1].number) == (KEPT, 6, KEPT + 5)

    def test_names_what_falls_out_of_the_store(self) -> None:
        history = filled(KEPT - 1)
        added = [history.make(HistoryNote(Kind.WAITING, "why"), 0, 1.0) for _ in range(3)]
        assert [entry.number for entry in added] == [KEPT, KEPT + 1, KEPT + 2]
        assert history.change(added) == (added, [1, 2])

    def test_of_checkpoints_in_a_row_the_newest_stays(self) -> None:
        history = JobHistory()
        notes = [
            HistoryNote(Kind.WORKER_FAILED, "why"),
            *(HistoryNote(Kind.STATE, f"commit {commit} is complete in /ckpt/{commit}", "a") for commit in (5, 9)),
            HistoryNote(Kind.STATE, "commit 12 could not be written: disk full", "a"),
            *(HistoryNote(Kind.STATE, f"commit {commit} is complete in /ckpt/{commit}", "a") for commit in (15, 20)),
        ]
        entries = [history.make(note, 1, 0.0) for note in notes]
        history.publish(entries[:2])
        assert history.change(entries[2:3]) == (entries[2:3], [2])
        history.publish(entries[2:3])
        assert history.change(entries[3:]) == ([entries[3], entries[5]], [])
        history.publish(entries[3:])
        assert history.last(9) == (entries[0], entries[2], entries[3], entries[5])
        again = JobHistory()
        again.load(history.last(9))
        assert again.make(notes[0], 1, 0.0).number == 7

    def test_thousands_of_checkpoints_leave_the_rest_of_the_history(self) -> None:
        history = filled(3)
        for commit in range(2 * KEPT):
            note = HistoryNote(Kind.STATE, f"commit {commit} is complete in /ckpt/{commit}", "a")
            history.publish([history.make(note, 1, 0.0)])
        assert [entry.text for entry in history.last(9)] == [
            *("text 1", "text 2", "text 3"),
            f"commit {2 * KEPT - 1} is complete in /ckpt/{2 * KEPT - 1}",
        ]

    def test_last_gives_the_newest_oldest_first(self) -> None:
        assert [entry.number for entry in filled(9).last(3)] == [7, 8, 9]


class TestReading:
    def test_everything_or_what_comes_after(self) -> None:
        async def scenario() -> None:
            history = filled(5)
            assert await numbers(history.read(0, False)) == [1, 2, 3, 4, 5]
            assert await numbers(history.read(3, False)) == [4, 5]
            assert await numbers(history.read(99, False)) == []

        play(scenario)

    def test_a_follower_gets_every_checkpoint(self) -> None:
        async def scenario() -> None:
            history = JobHistory()
            lines = history.read(0, True)
            reading = asyncio.ensure_future(anext(lines))
            await turns()
            notes = [HistoryNote(Kind.STATE, f"commit {commit} is complete in /ckpt", "a") for commit in (1, 2)]
            history.publish([history.make(note, 1, 0.0) for note in notes])
            assert ((await reading).number, (await anext(lines)).number) == (1, 2)

        play(scenario)

    def test_a_follower_gets_the_past_and_what_comes_without_gap_or_repetition(self) -> None:
        async def scenario() -> None:
            history = filled(3)
            lines = history.read(1, True)
            assert (await anext(lines)).number == 2
            # One more comes while the follower is still busy with the past.
            history.publish([history.make(HistoryNote(Kind.WAITING, "why"), 0, 1.0)])
            rest = asyncio.ensure_future(numbers(lines))
            await turns()
            history.publish([history.make(HistoryNote(Kind.WAITING, "why"), 0, 1.0) for _ in range(2)])
            await turns()
            assert not rest.done()
            history.close()
            assert await rest == [3, 4, 5, 6]

        play(scenario)

    def test_a_follower_of_the_future_is_not_shown_the_present(self) -> None:
        async def scenario() -> None:
            history = filled(3)
            rest = asyncio.ensure_future(numbers(history.read(5, True)))
            await turns()
            for _ in range(4):
                history.publish([history.make(HistoryNote(Kind.WAITING, "why"), 0, 1.0)])
            history.close()
            assert await rest == [6, 7]

        play(scenario)

    def test_several_follow_at_once_and_one_that_leaves_is_forgotten(self) -> None:
        async def scenario() -> None:
            history = filled(1)
            leaving = history.read(0, True)
            assert (await anext(leaving)).number == 1
            staying = asyncio.ensure_future(numbers(history.read(0, True)))
            await turns()
            assert len(history._followers) == 2
            assert isinstance(leaving, AsyncGenerator)
            await leaving.aclose()
            assert len(history._followers) == 1
            history.publish([history.make(HistoryNote(Kind.WAITING, "why"), 0, 1.0)])
            history.close()
            assert await staying == [1, 2]

        play(scenario)

    def test_nobody_waits_for_a_master_that_has_gone(self) -> None:
        async def scenario() -> None:
            history = filled(2)
            history.close()
            assert await asyncio.wait_for(numbers(history.read(0, True)), 1) == [1, 2]

        play(scenario)


SPEC = JobSpec(JobId("my-job"), NodeRange(1, 4), max_restarts=3, fault_tolerance=FaultTolerance.SHRINK)


def node(name: str, incarnation: int, joined: int, status: NodeStatus, slots: int = 2) -> NodeEntry:
    info = NodeInfo(NodeId(name), Incarnation(incarnation), f"{name}.host", 5000, slots)
    return NodeEntry(info, joined, status, registered=True, attached=status is not NodeStatus.STOPPING)


def member(name: str, incarnation: int, first_rank: int, slots: int = 2) -> Member:
    return Member(NodeId(name), Incarnation(incarnation), f"{name}.host", slots, Rank(first_rank), ())


WORLD = World(Round(5), (member("c", 13, 0), member("a", 11, 2, slots=1), member("d", 4, 3)), restarts=1)
NODES = [
    node("a", 11, 0, NodeStatus.RUNNING, slots=1),
    node("b", 12, 1, NodeStatus.READY),
    node("c", 13, 2, NodeStatus.STOPPING),
    node("d", 14, 3, NodeStatus.WARMING),  # another life of the member d
]
FAILURE = Failure(NodeId("d"), Round(5), Rank(3), 0, 1, "w")
RUNNING = Record(Phase.RUNNING, Round(5), WORLD, "two nodes are enough", restarts=1, failures=(FAILURE,))
STATE = MasterState(SPEC, RUNNING, {entry.info.node: entry for entry in NODES}, reason="a reason")
LINES = (HistoryEntry(1, 1.0, "k", "t"),)


class TestStatus:
    def test_says_how_the_job_stands(self) -> None:
        status = job_status(STATE, NodeId("a"), LINES)
        assert (status.job, status.phase, status.round, status.world_size) == ("my-job", "running", 5, 5)
        assert (status.nnodes, status.fault_tolerance, status.master) == ("1:4", "shrink", "a")
        assert (status.restarts_used, status.restarts_allowed) == (1, 3)
        assert (status.reason, status.history, status.failures) == ("a reason", LINES, (FAILURE,))

    def test_members_come_first_in_the_order_of_their_ranks(self) -> None:
        nodes = job_status(STATE, NodeId("a"), ()).nodes
        assert [view.node for view in nodes] == ["c", "a", "b", "d"]
        assert [(view.position, view.first_rank, view.slots) for view in nodes] == [
            (0, 0, 2),
            (1, 2, 1),
            (-1, -1, 2),
            (-1, -1, 2),
        ]
        assert [view.host for view in nodes] == ["c.host", "a.host", "b.host", "d.host"]
        assert [view.attached for view in nodes] == [False, True, True, True]

    def test_a_ready_node_outside_the_running_world_is_a_spare(self) -> None:
        nodes = job_status(STATE, NodeId("a"), ()).nodes
        assert [view.state for view in nodes] == ["stopping", "running", "spare", "warming"]

    @pytest.mark.parametrize("world", [WORLD, None])
    def test_while_no_world_runs_there_are_no_spares(self, world: World | None) -> None:
        state = dataclasses.replace(STATE, record=Record(Phase.FORMING, Round(5), world))
        assert {view.node: view.state for view in job_status(state, NodeId("a"), ()).nodes}["b"] == "ready"

    def test_before_the_first_world_nodes_come_in_the_order_of_their_arrival(self) -> None:
        status = job_status(dataclasses.replace(STATE, record=Record(), reason=""), NodeId("a"), ())
        assert [view.node for view in status.nodes] == ["a", "b", "c", "d"]
        assert (status.round, status.world_size, status.phase) == (0, 0, "forming")
        assert status.reason == "waiting for the first nodes"

    def test_the_failure_that_ends_the_job_is_no_restart(self) -> None:
        state = dataclasses.replace(STATE, record=dataclasses.replace(RUNNING, restarts=4))
        assert job_status(state, NodeId("a"), ()).restarts_used == 3


def underway(entry: NodeEntry, how: str = "in process") -> NodeEntry:
    return entry._replace(underway=True, how=how)


TRAINING = dataclasses.replace(WORLD, members=(member("c", 13, 0), member("a", 11, 2, slots=1)), era=4)
TRAINERS = [
    underway(node("c", 13, 2, NodeStatus.RUNNING)),
    underway(node("a", 11, 0, NodeStatus.RUNNING, slots=1), "restarted (was killed)"),
]
IN_TRAINING = dataclasses.replace(
    STATE,
    record=dataclasses.replace(RUNNING, world=dataclasses.replace(TRAINING, restore=Version(3, 40))),
    nodes={entry.info.node: entry for entry in TRAINERS},
)
AGREEMENT = Agreement(3, Purpose.SWITCH, "b joined", 9.0, {NodeId("a"): 7})


def kept(number: int, text: str) -> HistoryEntry:
    return HistoryEntry(number, 1.0, "state", text)


class TestState:
    def test_says_by_which_way_workers_came_into_the_round(self) -> None:
        nodes = job_status(IN_TRAINING, NodeId("a"), ()).nodes
        assert [(view.underway, view.how) for view in nodes] == [(True, "in process"), (True, "restarted (was killed)")]
        stale = TRAINERS[0]._replace(underway=False, draining=True)
        state = dataclasses.replace(IN_TRAINING, nodes={stale.info.node: stale})
        (view,) = job_status(state, NodeId("a"), ()).nodes
        assert (view.underway, view.how, view.draining) == (False, "", True)

    def test_says_what_the_world_began_from_and_what_is_being_agreed_on(self) -> None:
        status = job_status(dataclasses.replace(IN_TRAINING, agreement=AGREEMENT), NodeId("a"), ())
        assert (status.era, status.restored) == (4, Version(3, 40))
        assert status.boundary == "switch: b joined (1 of 2 nodes have answered)"
        plain = job_status(dataclasses.replace(STATE, record=Record()), NodeId("a"), ())
        assert (plain.era, plain.restored, plain.boundary, plain.kill) == (0, Version(), "", "")

    def test_a_job_that_is_suspended_is_not_called_killed(self) -> None:
        suspending = Agreement(3, Purpose.KILL, "suspended by me", 9.0)
        status = job_status(dataclasses.replace(IN_TRAINING, agreement=suspending), NodeId("a"), ())
        assert status.boundary == "stop: suspended by me (0 of 2 nodes have answered)"

    def test_says_who_has_asked_the_job_to_stop(self) -> None:
        state = dataclasses.replace(STATE, record=dataclasses.replace(RUNNING, kill="me"))
        assert job_status(state, NodeId("a"), ()).kill == "me"

    def test_says_where_the_last_checkpoint_is_as_long_as_history_knows(self) -> None:
        lying = [entry._replace(stored=Version(3, 40)) for entry in TRAINERS]
        state = dataclasses.replace(IN_TRAINING, nodes={entry.info.node: entry for entry in lying})
        history = (
            kept(1, "commit 40 is complete in /old/40"),
            kept(2, "commit 40 is complete in /ckpt/40 of mine"),
            kept(3, "commit 41 could not be written: disk full"),
            *(HistoryEntry(number, 1.0, "waiting", "") for number in range(4, 30)),
        )
        status = job_status(state, NodeId("a"), history)
        assert (status.saved, status.saved_in) == (Version(3, 40), "/ckpt/40 of mine")
        assert [entry.number for entry in status.history] == list(range(20, 30))
        status = job_status(state, NodeId("a"), history[2:])
        assert (status.saved, status.saved_in) == (Version(3, 40), "")


class TestReply:
    @pytest.mark.parametrize("purpose", [Purpose.SAVE, Purpose.KILL])
    def test_a_job_in_training_does_what_is_asked(self, purpose: Purpose) -> None:
        for checkpoint_dir in ("/ckpt", None):
            assert reply(IN_TRAINING, purpose, checkpoint_dir).ok
            assert not reply(IN_TRAINING, purpose, "").ok

    def test_while_the_world_changes_a_checkpoint_would_be_forgotten(self) -> None:
        changing = dataclasses.replace(IN_TRAINING, agreement=AGREEMENT)
        answer = reply(changing, Purpose.SAVE, "/ckpt")
        assert not answer.ok
        assert "b joined" in answer.text
        assert reply(changing, Purpose.KILL, "/ckpt").ok
        saving = dataclasses.replace(AGREEMENT, purpose=Purpose.SAVE)
        assert reply(dataclasses.replace(IN_TRAINING, agreement=saving), Purpose.SAVE, "/ckpt").ok

    def test_plain_scripts_can_be_ended_and_not_saved(self) -> None:
        assert reply(STATE, Purpose.KILL, "").ok
        answer = reply(STATE, Purpose.SAVE, "/ckpt")
        assert not answer.ok
        assert "a reason" in answer.text

    def test_with_parameter_servers_the_script_saves(self) -> None:
        state = dataclasses.replace(STATE, spec=dataclasses.replace(SPEC, servers=Training()))
        answer = reply(state, Purpose.SAVE, "/ckpt")
        assert not answer.ok
        assert "ps.save()" in answer.text
        answer = reply(state, Purpose.KILL, "")
        assert answer.ok
        assert "without a new checkpoint" in answer.text

    def test_a_job_that_ends_is_past_asking(self) -> None:
        ending = dataclasses.replace(IN_TRAINING, record=dataclasses.replace(IN_TRAINING.record, kill="me"))
        assert not reply(ending, Purpose.SAVE, "/ckpt").ok
        assert reply(ending, Purpose.KILL, "/ckpt").ok
        over = dataclasses.replace(STATE, record=Record(Phase.ENDED, reason="all done"))
        for purpose in Purpose:
            assert reply(over, purpose, "/ckpt") == Answer("the job has ended: all done", ok=False)

    def test_to_switch_is_the_masters_own_affair(self) -> None:
        assert not reply(IN_TRAINING, Purpose.SWITCH, "/ckpt").ok
