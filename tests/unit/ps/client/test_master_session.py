"""Messages between a trainer and the Master: joining, placement maps, stops for checkpoints, repetitions."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from edl.errors import DataError, PsError
from edl.exit_codes import START_OVER
from edl.job_records import Mode, Training
from ps.client import checkpoint_stop, master_session
from ps.client.client import PsClient
from ps.client.member_count import MemberCount
from ps.errors import RolledBack
from ps.net.caller import FrameReply
from ps.protocol import messages
from ps.protocol.frames import Frame, FrameOp
from ps.spec import Optimizer, TableSpec
from ps.wait import BoundedWait
from tests.support.ps_fixture import PLAIN, WAIT_S, Bench, Master

KEYS = np.arange(100)
ONES = np.ones((100, 4), np.float32)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench().start(2)
    yield made
    made.stop()


@pytest.fixture
def master(bench: Bench) -> Master:
    return Master(bench)


class Doing:
    """A call on a thread of its own."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def end(self) -> Any:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "it hangs"
        if self.error is not None:
            raise self.error
        return self.result


# --- joining ---


@pytest.mark.parametrize("rests", [False, True])
def test_only_a_member_pushes_gradients_of_a_common_step(bench: Bench, rests: bool) -> None:
    """The pservers wait for the members of a step, and would never apply another's gradients."""
    client = bench.joined(Master(bench, Training(Mode.SYNC)))
    if rests:
        client.begin()
        client.push({"plain": (KEYS, ONES)})
        client.rest()
    pushed = [one.applied for one in bench.pservers.values()]
    for push in (
        lambda: client.push({"plain": (KEYS, ONES)}),
        lambda: client.push_and_pull({"plain": (KEYS, ONES)}, ["plain"]),
        lambda: client.begin_push({"plain": (KEYS, ONES)}, ["plain"]),
    ):
        with pytest.raises(PsError, match=r"trainer 5 is not a member.*call begin\(\) first"):
            push()
    assert [one.applied for one in bench.pservers.values()] == pushed
    client.assign("plain", KEYS, ONES)


def test_who_leaves_unheard_says_no_farewell_so_that_pservers_tell_of_it(
    bench: Bench, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    farewells: list[bool] = []
    close = PsClient.close

    def closed(self: PsClient, *, farewell: bool = False) -> None:
        farewells.append(farewell)
        close(self, farewell=farewell)

    monkeypatch.setattr(PsClient, "close", closed)
    monkeypatch.setattr("ps.client.client.LEAVE_S", 0.3)
    first = bench.joined(master, name="a/0")
    first.begin()
    first.leave()
    second = bench.joined(master, name="a/0")
    second.begin()
    master.deaf = True
    second.leave()
    assert farewells == [True, False]
    assert master.expect(messages.LeaveMembership) == messages.LeaveMembership(5)


def test_it_is_told_what_it_waits_for(bench: Bench, master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.wait.QUIET_S", 0.2)
    told: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(
        master_session, "BoundedWait", lambda what, **given: BoundedWait(what, notify=told.put, **given)
    )
    master.deaf = True
    doing = Doing(lambda: bench.joined(master))
    master.expect(messages.Join)
    master.tell(messages.Waits("waiting for at least 2 pservers; 1 is there"))
    while "1 is there" not in told.get(timeout=WAIT_S):
        pass
    master.deaf = False
    master.tell(master.joined())
    doing.end()


def test_a_trainer_joins_and_counts_once_the_master_has_said_so(bench: Bench, master: Master) -> None:
    master.step, master.restored = 7, json.dumps({"run": "checkpoint-3", "checkpoint": 3})
    client = bench.joined(master, name="a/0")
    assert (client.number, client.step, client.restored, client.members) == (5, 7, master.restored, ())
    assert set(client.tables) == {"plain", "wide"} and master.joins[0].tables == tuple(bench.tables)
    master.step = 9
    client.begin()
    assert client.step == 9 and [one.number for one in client.members] == [5]
    client.rest()
    assert client.members == ()
    master.step = 12
    client.begin()
    assert client.step == 12
    client.leave()
    assert master.members == ()


def test_it_asks_again_as_the_same_one_when_there_was_no_master(bench: Bench, master: Master) -> None:
    master.deaf = True
    doing = Doing(lambda: bench.joined(master))
    first = master.expect(messages.Join)
    master.deaf = False
    master.lose()
    client = doing.end()
    assert master.joins[0] == first
    client.begin()
    master.deaf = True
    master.lose()
    assert master.expect(messages.Join).nonce == first.nonce and master.expect(messages.Begin).number == 5


def test_it_asks_again_by_itself(bench: Bench, master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_session, "AGAIN_S", 0.0)
    master.deaf = True
    doing = Doing(lambda: bench.joined(master))
    assert master.expect(messages.Join) == master.expect(messages.Join)
    master.deaf = False
    doing.end()


def test_another_table_of_the_same_name_is_refused(bench: Bench, master: Master) -> None:
    master.deaf = True
    doing = Doing(lambda: bench.joined(master))
    master.expect(messages.Join)
    master.tell(messages.RequestRefused("table", "table plain: dim 4 here, 8 there"))
    with pytest.raises(PsError, match="refused this trainer's tables: table plain: dim 4 here, 8 there"):
        doing.end()


def test_tables_that_are_defined_later(bench: Bench, master: Master) -> None:
    client = bench.joined(master)
    more = TableSpec("more", 3)
    client.define(more)
    client.define(PLAIN)
    assert client.tables["more"] == more and len(master.joins) == 2
    with pytest.raises(PsError, match=r"table plain is already defined differently: dim 5 here, 4 there"):
        client.define(TableSpec("plain", 5, PLAIN.optimizer, PLAIN.initial))
    master.deaf = True
    doing = Doing(lambda: client.define(TableSpec("last", 3)))
    master.expect(messages.Join)
    master.tell(messages.RequestRefused("table", "no more"))
    with pytest.raises(PsError, match="no more"):
        doing.end()
    master.lose()
    assert [one.name for one in master.expect(messages.Join).tables] == ["plain", "wide", "more"]


def test_a_learning_rate_is_the_master_s_matter(bench: Bench, master: Master) -> None:
    client = bench.joined(master)
    client.set_lr(0.5, "plain", 30)
    first = master.expect(messages.SetLr)
    assert first == messages.SetLr(5, messages.LrHold(30, 0.5, "plain"), first.ask) and first.ask
    for factor, table in ((-1, ""), (float("nan"), ""), (1, "none")):
        with pytest.raises(PsError):
            client.set_lr(factor, table)
    with pytest.raises(PsError, match=r"step=10000.0: must be an integer from 0"):
        client.set_lr(0.5, step=1e4)  # type: ignore[arg-type]  # the Master could not read it, and would be asked again
    with pytest.raises(PsError, match="needs a Master"):
        bench.client().set_lr(1)


def test_a_learning_rate_reaches_the_next_master(
    bench: Bench, master: Master, capsys: pytest.CaptureFixture[str]
) -> None:
    """There may be none while it is set."""
    client = bench.joined(master)
    for factor in (0.5, 0.25, 0.125):
        client.set_lr(factor)
    asks = [master.expect(messages.SetLr).ask for _ in range(3)]
    master.tell(messages.LrSet(asks[0]))
    master.lose()
    assert [master.expect(messages.SetLr).hold.factor for _ in range(2)] == [0.25, 0.125]
    master.tell(messages.LrSet(asks[1]))
    master.tell(messages.RequestRefused("word", "there is no such table", asks[2]))
    assert "no such table" in capsys.readouterr().err
    master.lose()
    assert master.said.empty()


def test_outdated_placement_maps_change_nothing(bench: Bench, master: Master) -> None:
    client = bench.joined(master)
    old = master.placement_update()
    bench.move(slice(0, 4096), 2)
    master.tell(master.placement_update())
    master.tell(old)
    client.pull("plain", KEYS)
    assert not bench.pservers[1].heads


# --- rolled back ---


def test_a_new_history_ends_this_process(bench: Bench, master: Master) -> None:
    client = bench.joined(master)
    master.tell(master.placement_update(history=2))
    for call in (lambda: client.pull("plain", KEYS), lambda: client.push({}), client.boundary, client.begin):
        with pytest.raises(RolledBack, match=r"history 2.*must restart.*launcher does that"):
            call()
    assert RolledBack.worker_status == START_OVER


def test_it_says_which_checkpoint(bench: Bench, master: Master) -> None:
    client = bench.joined(master)
    joined = messages.Joined(
        5, 0, bench.placement(history=3), 1, (), Training(), (), 4, json.dumps({"run": "ps/j/checkpoint-8"})
    )
    master.tell(joined)
    with pytest.raises(RolledBack, match=r"the checkpoint ps/j/checkpoint-8 \(history 3\)"):
        client.boundary()


def test_one_who_is_counted_as_gone_starts_over(bench: Bench, master: Master) -> None:
    client = bench.joined(master)
    master.number = 6
    master.tell(master.joined())
    with pytest.raises(RolledBack, match="considers trainer 5 lost"):
        client.pull("plain", KEYS)
    other = bench.joined(Master(bench))
    other._session._heard(messages.encode(messages.RequestRefused("stale", "trainer 5 is revoked")))  # type: ignore[union-attr]
    with pytest.raises(RolledBack, match="trainer 5 is revoked"):
        other.push({})


def test_callers_that_wait_for_a_pserver_are_notified(bench: Bench, master: Master) -> None:
    client = bench.joined(master)
    bench.pservers[1].faults.append(
        lambda frame, head: FrameReply.no(FrameOp.MOVED, placement_version=1, text="not yet")
    )
    doing = Doing(lambda: client.pull("plain", KEYS))
    master.expect(messages.GetPlacement)
    master.tell(master.placement_update(history=2))
    with pytest.raises(RolledBack):
        doing.end()


# --- stops for checkpoints ---


def listening(client: PsClient) -> list[str]:
    """Names of the callbacks that were called."""
    asked: list[str] = []

    def name(one: str) -> dict[str, str]:
        asked.append(one)
        return {"clicks": "ledger", "ads": "other"}

    client.on_checkpoint(lambda: {"epoch": 3}, name, lambda: asked.append("settle"))
    return asked


def test_it_stops_at_a_boundary_until_rows_are_marked(bench: Bench, master: Master) -> None:
    client = bench.joined(master)
    asked = listening(client)
    client.boundary()
    assert not asked
    client.push({"plain": (KEYS, ONES)}, wait=False)
    master.tell(messages.Halt(4))
    doing = Doing(client.boundary)
    at = master.expect(messages.AtCheckpoint)
    assert (at.checkpoint, at.step, json.loads(at.value)) == (4, 1, {"epoch": 3}) and asked == ["settle"]
    assert bench.pservers[1].applied == bench.pservers[2].applied == 1
    master.tell(messages.NameData(4))
    assert master.expect(messages.DataNamed) == messages.DataNamed(4, (("ads", "other"), ("clicks", "ledger")))
    assert asked == ["settle", "checkpoint-4"]
    # What it has said may be lost.
    master.lose()
    assert (master.expect(messages.AtCheckpoint), master.expect(messages.DataNamed).checkpoint) == (at, 4)
    master.tell(messages.GoOn(4))
    doing.end()
    client.boundary()
    master.lose()
    assert master.said.empty() and client.statistics["checkpoints"] == 1


def test_the_next_checkpoint_may_come_while_it_stands(bench: Bench, master: Master) -> None:
    client = bench.joined(master)
    master.tell(messages.Halt(4))
    doing = Doing(client.boundary)
    assert master.expect(messages.AtCheckpoint).checkpoint == 4
    master.tell(messages.Halt(5))
    assert master.expect(messages.AtCheckpoint).checkpoint == 5
    master.tell(messages.GoOn(4))
    master.tell(messages.GoOn(5))
    doing.end()


def test_a_rollback_while_it_stands(bench: Bench, master: Master) -> None:
    client = bench.joined(master)
    master.tell(messages.Halt(4))
    doing = Doing(client.boundary)
    master.expect(messages.AtCheckpoint)
    master.tell(master.placement_update(history=2))
    with pytest.raises(RolledBack):
        doing.end()


def test_nobody_stands_for_ever(
    bench: Bench, master: Master, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint_stop, "STAND_S", 0.05)
    client = bench.joined(master)
    master.tell(messages.Halt(4))
    client.boundary()
    client.push({"plain": (KEYS, ONES)})
    assert "no decision about checkpoint 4" in capsys.readouterr().err


def test_a_checkpoint_that_is_given_up_while_a_push_is_on_its_way_stops_nobody(
    bench: Bench, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_stop, "STAND_S", 0.05)
    client = bench.joined(master)
    asked = listening(client)
    master.tell(messages.Halt(4))
    monkeypatch.setattr(client._writer, "flush", lambda: master.tell(messages.GoOn(4)))
    client.boundary()
    assert master.said.empty() and not asked and client.statistics["checkpoints"] == 0


def test_data_that_cannot_be_named_and_values_that_are_no_json(
    bench: Bench, master: Master, capsys: pytest.CaptureFixture[str]
) -> None:
    client = bench.joined(master)

    def fail(name: str) -> dict[str, str]:
        raise DataError("no ledger")

    client.on_checkpoint(name_data=fail)
    master.tell(messages.Halt(4))
    doing = Doing(client.boundary)
    master.expect(messages.AtCheckpoint)
    master.tell(messages.NameData(4))
    assert master.expect(messages.DataNamed) == messages.DataNamed(4, (), "no ledger")
    master.tell(messages.GoOn(4))
    doing.end()
    assert "checkpoint 4, which is abandoned: no ledger" in capsys.readouterr().err
    client.on_checkpoint(value=lambda: {1, 2})
    master.tell(messages.Halt(5))
    with pytest.raises(PsError, match="not JSON"):
        client.boundary()


def test_a_checkpoint_on_demand(bench: Bench, master: Master) -> None:
    client = bench.joined(master)
    doing = Doing(client.save)
    ask = master.expect(messages.Save).ask
    master.lose()
    assert master.expect(messages.Save).ask == ask
    master.tell(messages.Halt(4))
    assert master.expect(messages.AtCheckpoint).checkpoint == 4
    master.tell(messages.GoOn(4))
    master.tell(messages.CheckpointSaved(ask - 1, 3, "old"))
    master.tell(messages.CheckpointSaved(ask, 4, "ps/job/checkpoint-4"))
    assert doing.end() == "ps/job/checkpoint-4"
    doing = Doing(client.save)
    ask = master.expect(messages.Save).ask
    master.tell(messages.RequestRefused("save", "the disk is full", ask))
    with pytest.raises(PsError, match="no checkpoint was written: the disk is full"):
        doing.end()
    with pytest.raises(PsError, match="needs a Master"):
        bench.client().save()


@pytest.mark.parametrize("op", [FrameOp.PUSH, FrameOp.PULL])
def test_one_that_waits_for_those_who_have_stopped_stops_as_well(bench: Bench, op: FrameOp) -> None:
    """Others stand at the boundary before: they will not come before this one stands, too."""
    training = Training(Mode.SYNC) if op is FrameOp.PUSH else Training(Mode.ASYNC, staleness=2)
    master = Master(bench, training)
    client = bench.joined(master)
    client.begin()
    asked = listening(client)
    client.push({"plain": (KEYS, ONES)})
    come = threading.Event()
    waited = threading.Semaphore(0)

    def wait(frame: Frame, head: dict[str, Any]) -> FrameReply | None:
        if frame.op is op and not come.is_set():
            waited.release()
            return FrameReply.no(FrameOp.WAIT, text="trainers 2 and 3 are not there", **{"for": "trainers"})
        return None

    for one in bench.pservers.values():
        one.faults.append(wait)
    doing = Doing(lambda: client.push({"plain": (KEYS, ONES)}) if op is FrameOp.PUSH else client.pull("plain", KEYS))
    assert waited.acquire(timeout=WAIT_S)
    master.tell(messages.Halt(4))
    at = master.expect(messages.AtCheckpoint)
    assert (at.checkpoint, at.step) == (4, 1) and asked == ["settle"]
    asked_before = [len(one.heads) for one in bench.pservers.values()]
    master.tell(messages.NameData(4))
    master.expect(messages.DataNamed)
    assert [len(one.heads) for one in bench.pservers.values()] == asked_before, "nothing is under way while it stands"
    come.set()
    master.tell(messages.GoOn(4))
    doing.end()
    assert (client.read("plain", KEYS) == (-2 if op is FrameOp.PUSH else -1)).all()
    assert {head["seq"] for head in bench.pservers[1].seen(FrameOp.PUSH)[1:]} == ({2} if op is FrameOp.PUSH else set())


def test_one_that_waits_for_rows_fetched_ahead_stops_as_well(bench: Bench) -> None:
    """They are held back for others, which have stopped and wait for this one."""
    master = Master(bench, Training(Mode.ASYNC, staleness=2))
    client = bench.joined(master)
    come, waited = threading.Event(), threading.Semaphore(0)

    def wait(frame: Frame, head: dict[str, Any]) -> FrameReply | None:
        if frame.op is FrameOp.PULL and not come.is_set():
            waited.release()
            return FrameReply.no(FrameOp.WAIT, text="trainers 2 and 3 are not there", **{"for": "trainers"})
        return None

    for one in bench.pservers.values():
        one.faults.append(wait)
    client.prefetch("plain", KEYS)
    doing = Doing(lambda: client.pull("plain", KEYS))
    assert waited.acquire(timeout=WAIT_S)
    master.tell(messages.Halt(4))
    assert master.expect(messages.AtCheckpoint).checkpoint == 4
    come.set()
    master.tell(messages.GoOn(4))
    doing.end()
    assert client.statistics["prefetched"] == len(KEYS)


def test_one_whose_push_has_been_applied_somewhere_does_not_stop_within_it(bench: Bench) -> None:
    master = Master(bench, Training(Mode.SYNC))
    client = bench.joined(master)
    client.begin()
    come = threading.Event()
    waited = threading.Semaphore(0)

    def wait(frame: Frame, head: dict[str, Any]) -> FrameReply | None:
        if come.is_set():
            return None
        waited.release()
        return FrameReply.no(FrameOp.WAIT, text="copies", **{"for": "trainers"})

    bench.pservers[2].faults.append(wait)
    master.tell(messages.Halt(4))
    doing = Doing(lambda: client.push({"plain": (KEYS, ONES)}))
    for _ in range(3):
        assert waited.acquire(timeout=WAIT_S)
    assert master.said.empty()
    come.set()
    doing.end()
    doing = Doing(client.boundary)
    assert master.expect(messages.AtCheckpoint).step == 1
    master.tell(messages.GoOn(4))
    doing.end()


def test_differences_are_exchanged_before_a_checkpoint(bench: Bench) -> None:
    master = Master(bench, Training(Mode.GEO, geo_steps=100))
    client = bench.joined(master)
    client.pull("plain", KEYS)
    client.push({"plain": (KEYS, ONES)})
    master.tell(messages.Halt(4))
    doing = Doing(client.boundary)
    master.expect(messages.AtCheckpoint)
    assert (bench.client(number=2).read("plain", KEYS) == -1).all()
    master.tell(messages.GoOn(4))
    doing.end()


def test_an_unreadable_message_is_ignored(bench: Bench, master: Master, capsys: Any) -> None:
    client = bench.joined(master)
    master.tell(messages.RequestRefused("word", "what do you mean?"))
    assert "what do you mean?" in capsys.readouterr().err
    assert Optimizer().lr and client.pull("plain", KEYS).shape == (100, 4)


# --- how many there have been ---


def test_members_that_come_and_go_between_two_looks_have_been_there(bench: Bench, master: Master) -> None:
    """So that trainers which wait for each other, one to begin and one to rest, cannot miss each other."""
    other, third = messages.TrainerMember(6, "b/0", 0), messages.TrainerMember(7, "c/0", 0)
    client = bench.joined(master, name="a/0")
    master.tell(messages.MembersChanged(0, 1, 2, (other, third), ()))
    seen = client.watch_members()
    assert (seen.fewest, seen.most) == (2, 2)
    own = messages.TrainerMember(client.number, "a/0", 0)
    master.tell(messages.MembersChanged(0, 2, 3, (own,), (7,)))
    assert (seen.fewest, seen.most) == (2, 2), "it counts with those that train together with it"
    master.tell(messages.MembersChanged(0, 3, 4, (third,), ()))
    master.tell(messages.MembersChanged(0, 4, 5, (), (6, 7)))
    assert len(client.members) == 1 and (seen.fewest, seen.most) == (1, 3)
    master.tell(messages.MembersChanged(0, 5, 6, (other,), (client.number,)))
    assert (seen.fewest, seen.most) == (1, 1)
    master.tell(messages.MembersChanged(0, 6, 7, (), (6,)))
    master.tell(messages.PlacementUpdate(0, bench.placement(), 8, (other, own)))
    assert len(client.members) == 2 and (seen.fewest, seen.most) == (2, 2)
    assert client.watch_members() is not seen


@pytest.mark.parametrize("numbers", [(1, 0), (0, 1)])
def test_the_fewest_and_the_most_of_a_membership(numbers: tuple[int, int]) -> None:
    members = [tuple(messages.TrainerMember(n + 6, "b/0", 0) for n in range(count)) for count in numbers]
    count = MemberCount(5, members[0])
    count.take(members[1])
    assert (count.fewest, count.most) == (0, 1)
