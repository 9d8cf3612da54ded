from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from edl.errors import StateError
from edl.wire import local
from edl.wire.local import STATE
from edl.wire.snapshot import Meta
from edl.worker import loop
from edl.worker.loop import make_run
from edl.worker.session import PeersLost
from edl.worker.state import BaseState
from tests.support.fake_agent import (
    JOB,
    TIMEOUT_S,
    Barriers,
    FakeFramework,
    Model,
    PeerGone,
    Worker,
    a_seat,
)


@pytest.fixture(autouse=True, params=[False, True], ids=["synchronous", "asynchronous"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test on both kinds."""
    monkeypatch.setattr(FakeFramework, "asynchronous", request.param)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOST_TIMEOUT_S", TIMEOUT_S)


class Trainer:
    """A worker whose script trains a model for so many steps."""

    def __init__(self, barriers: Barriers, steps: int = 1_000_000, why_not: str = "") -> None:
        self.worker = Worker()
        self.agent = self.worker.agent
        self.framework = FakeFramework(barriers, why_not)
        self.model = Model()
        self.state = BaseState(self.framework, {"model": self.model, "step": 0})
        self.steps = steps
        self.entered: list[tuple[int, int]] = []
        """Round and step of each call of ``train``."""
        self.before_step: Callable[[int], None] = lambda step: None
        self.run = make_run(self.framework, lambda: self.worker.session)

    def train(self, state: BaseState) -> str:
        group = self.framework.groups[-1]
        self.entered.append((group.seat.round, state.step))
        while state.step < self.steps:
            self.before_step(state.step)
            group.step(self.apply)
            state.step += 1
            state.commit()
        return "trained"

    def apply(self, whole: bool) -> None:
        self.model.weight.data[:] += 1 if whole else 0.3

    def start(self) -> None:
        self.worker.start(lambda: self.run(lambda state: self.train(state))(self.state))

    def until(self, kind: type) -> Any:
        return self.agent.expect(kind)


@pytest.fixture
def trainers() -> Iterator[Callable[..., list[Trainer]]]:
    made: list[Trainer] = []
    barriers = Barriers()

    def make(count: int = 1, **settings: Any) -> list[Trainer]:
        new = [Trainer(barriers, **settings) for _ in range(count)]
        made.extend(new)
        for one in new:
            one.start()
            assert one.until(local.Enter).framework == "numpy"
        return new

    yield make
    for one in made:
        one.worker.close()


def seat_all(members: list[Trainer], number: int, restore: tuple[int, int] = (0, 0), **changes: Any) -> None:
    """Put them in one world; whoever is not on the way gets the state from the first that has it."""
    era, commit = restore
    for one in members:
        one.until(local.Parked)
    version = (STATE, era, commit, 0)
    kept = next((one.agent.kept[version] for one in members if version in one.agent.kept), None)
    for rank, one in enumerate(members):
        if kept is not None:
            one.agent.kept[version] = kept
        one.agent.place(
            a_seat(number, rank=rank, world_size=len(members), restore_era=era, restore_commit=commit, **changes)
        )


def underway(members: list[Trainer], number: int) -> None:
    for one in members:
        assert one.until(local.TrainingStarted).round == number


def commit_of(one: Trainer, era: int, commit: int) -> bytes:
    """What its state is now, as this commit."""
    found: list[bytearray] = []

    def room(size: int) -> memoryview:
        found.append(bytearray(size))
        return memoryview(found[0])

    one.state._write(STATE, Meta(JOB, era, commit, 1, 0, 1, "numpy"), room)
    return bytes(found[0])


NO_VERSION = (0, 0)


def newest(members: list[Trainer]) -> tuple[int, int]:
    """Of what the agents have read so far; ``NO_VERSION`` if that is none."""
    return max((version for one in members for version in one.agent.versions()), default=NO_VERSION)


def heard(members: list[Trainer], version: tuple[int, int]) -> bool:
    """Whether this is the newest version, once the agents have read what was said to them."""
    for _ in range(int(TIMEOUT_S / 0.01)):
        if newest(members) == version:
            return True
        threading.Event().wait(0.01)
    return False


def agree(members: list[Trainer], number: int, hold: int, purpose: str = "switch") -> int:
    """Agree on a boundary as the Master does."""
    for one in members:
        one.agent.send(local.HoldAtBoundary(number, hold))
    target: int = max(one.until(local.Here).commit for one in members) + 1
    for one in members:
        one.agent.send(local.Target(hold, target, purpose, "a node joins"))
    return target


# --- rounds ----------------------------------------------------------------------------------------------------------


def test_one_round(trainers: Any) -> None:
    (one,) = trainers(steps=5)
    seat_all([one], 1)
    underway([one], 1)
    assert one.worker.join() == "trained"
    assert (one.state.step, one.state.commits, one.entered) == (5, 5, [(1, 0)])
    assert one.worker.environment["RANK"] == "0"
    assert one.framework.groups[0].aborts == 0


def test_a_planned_change_loses_nothing(trainers: Any) -> None:
    members = trainers(2)
    seat_all(members, 1)
    underway(members, 1)
    target = agree(members, 1, hold=4)
    (third,) = trainers()
    for one in (*members, third):
        one.steps = target + 50
    seat_all([*members, third], 2, restore=(1, target))
    underway([*members, third], 2)
    for one in (*members, third):
        one.worker.join()
        assert one.entered[-1] == (2, target)
        assert (one.state.step, one.state.commits, one.model.weight.data[0, 0]) == (target + 50,) * 3


def test_an_unplanned_change_goes_back_to_the_newest_commit(trainers: Any) -> None:
    members = trainers(2)
    lost, survivor = members
    gate = threading.Event()

    def die(step: int) -> None:
        if step == 10:
            gate.wait(TIMEOUT_S)
            raise KeyboardInterrupt  # whatever ends a process

    lost.before_step = die
    seat_all(members, 1)
    underway(members, 1)
    gate.set()
    with pytest.raises(KeyboardInterrupt):
        lost.worker.join()
    assert heard([survivor], (1, 10))  # it may be a step behind
    survivor.agent.send(local.Break(1, "node a is gone"))
    survivor.steps = 30
    seat_all([survivor], 2, restore=(1, 10))
    underway([survivor], 2)
    assert survivor.worker.join() == "trained"
    assert survivor.entered == [(1, 0), (2, 10)]
    assert survivor.model.weight.data[0, 0] == 30
    old, new = survivor.framework.groups
    assert (old.aborts > 0, old.retired, new.aborts, new.retired) == (True, 1, 0, 0)


def test_a_lost_peer_is_passed_on_at_once(trainers: Any) -> None:
    """The neighbour of a lost peer disconnects its own group, and then waits for the Master's word. It aborts nothing
    before: a peer that knows nothing yet would get garbage from an asynchronous collective."""
    (one,) = trainers()

    def lose(step: int) -> None:
        if one.state.step == 3 and one.framework.groups[-1].seat.round == 1:
            raise PeerGone("connection reset")

    one.before_step = lose
    seat_all([one], 1)
    underway([one], 1)
    assert one.framework.groups[0].disconnected.wait(TIMEOUT_S)
    assert one.framework.groups[0].aborts == 0
    one.agent.send(local.Break(1, "node b is gone"))
    one.steps = 6
    seat_all([one], 2, restore=(1, 3))
    assert one.worker.join() == "trained"


def test_a_lost_peer_that_nobody_misses(trainers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOST_TIMEOUT_S", 0.01)
    (one,) = trainers()
    one.framework.connect = lambda group, seat: None

    def lose(step: int) -> None:
        raise PeerGone("connection reset")

    one.before_step = lose
    seat_all([one], 1)
    with pytest.raises(PeerGone, match="connection reset"):
        one.worker.join()


def test_the_scripts_own_errors_are_its_own(trainers: Any) -> None:
    (one,) = trainers()

    def fail(step: int) -> None:
        raise ZeroDivisionError("oops")

    one.before_step = fail
    seat_all([one], 1)
    with pytest.raises(ZeroDivisionError, match="oops"):
        one.worker.join()


def test_a_consequence_of_the_break_is_not_the_scripts(trainers: Any, capfd: pytest.CaptureFixture[str]) -> None:
    (one,) = trainers()
    reached = threading.Event()

    def fail(step: int) -> None:
        if one.framework.groups[-1].seat.round == 1 and step == 2:
            reached.set()
            assert one.framework.groups[-1].aborted.wait(TIMEOUT_S)
            raise ValueError("a strange way to say so")

    one.before_step = fail
    seat_all([one], 1)
    underway([one], 1)
    assert reached.wait(TIMEOUT_S)
    one.agent.send(local.Break(1, "node b is gone"))
    one.steps = 5
    seat_all([one], 2, restore=(1, 2))
    assert one.worker.join() == "trained"
    assert "in round 1, which is over: ValueError: a strange way" in capfd.readouterr().err


def test_a_script_that_swallows_everything(trainers: Any) -> None:
    (one,) = trainers()
    rounds: list[int] = []

    def train(state: BaseState) -> str:
        rounds.append(state.era)
        for _ in range(1_000_000):
            try:
                state.commit()
            except:  # noqa: E722
                if len(rounds) == 1:
                    return "swallowed"
            if len(rounds) == 2:
                return "done"
        return "never"

    one.train = train
    seat_all([one], 1)
    underway([one], 1)
    target = agree([one], 1, 1)
    seat_all([one], 2, restore=(1, target))
    assert one.worker.join() == "done"
    assert rounds == [1, 2]


def test_a_break_while_connecting(trainers: Any) -> None:
    (one,) = trainers(steps=2)
    one.until(local.Parked)
    one.agent.place(a_seat(1, world_size=2, rank=0))  # the other never comes
    one.agent.send(local.Break(1, "node b is gone"))
    parked = one.until(local.Parked)
    assert parked.round == 1
    one.agent.place(a_seat(2))
    assert one.worker.join() == "trained"


def test_a_break_while_restoring(trainers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = trainers(steps=2)
    monkeypatch.setattr(loop, "LOST_TIMEOUT_S", 0.01)
    one.agent.serving = False
    one.until(local.Parked)
    one.agent.place(a_seat(1, restore_era=1, restore_commit=5))
    one.until(local.Fetch)
    one.agent.send(local.Break(1, "node b is gone"))
    one.agent.serving = True
    one.until(local.Parked)
    one.agent.place(a_seat(2, restore_era=1, restore_commit=5))
    with pytest.raises(PeersLost, match="nobody has it"):
        one.worker.join()


def test_a_break_between_asking_for_the_state_and_connecting(trainers: Any) -> None:
    (one,) = trainers(steps=2)
    ask = one.state._ask

    def asked(session: Any, seat: Any) -> None:
        ask(session, seat)
        if seat.round == 1:
            one.agent.send(local.Break(1, "node b is gone"))
            assert one.worker.link.wait_until_broken(1, TIMEOUT_S)

    object.__setattr__(one.state, "_ask", asked)
    one.agent.kept[STATE, 1, 5, 0] = commit_of(one, 1, 5)
    seat_all([one], 1, restore=(1, 5))
    seat_all([one], 2, restore=(1, 5))
    underway([one], 2)
    one.worker.join()


def test_stop_while_parked(trainers: Any) -> None:
    (one,) = trainers()
    one.until(local.Parked)
    one.agent.send(local.Stop("the job is over"))
    with pytest.raises(SystemExit) as caught:
        one.worker.join()
    assert caught.value.code == 0


def test_stop_in_training_is_at_the_next_boundary(trainers: Any) -> None:
    (one,) = trainers()
    seat_all([one], 1)
    underway([one], 1)
    one.agent.send(local.Stop("the launcher leaves"))
    assert one.until(local.Parked).round == 1
    with pytest.raises(SystemExit):
        one.worker.join()
    assert newest([one])[1] == one.state.commits


def test_kill_saves_and_parks(trainers: Any) -> None:
    (one,) = trainers()
    seat_all([one], 1)
    underway([one], 1)
    target = agree([one], 1, 1, "kill")
    one.until(local.Parked)
    last = [said for said in one.agent.said if isinstance(said, local.Committed)][-1]
    assert (last.commit, last.save) == (target, True)
    one.agent.send(local.Stop("killed"))
    with pytest.raises(SystemExit):
        one.worker.join()


def test_a_worker_that_cannot_rejoin(trainers: Any) -> None:
    (one,) = trainers(why_not="no abort on this device")
    enter = next(said for said in one.agent.said if isinstance(said, local.Enter))
    assert (enter.rejoins, enter.why_not) == (False, "no abort on this device")
    one.agent.place(a_seat(1))
    underway([one], 1)
    target = agree([one], 1, 1)
    with pytest.raises(SystemExit) as caught:
        one.worker.join()
    assert caught.value.code == 0
    assert heard([one], (1, target))
    assert not [said for said in one.agent.said if isinstance(said, local.Parked)]


def test_a_worker_that_never_commits_is_told(trainers: Any) -> None:
    members = trainers(2)
    lazy = members[1]
    lazy.state.__class__ = type("Lazy", (BaseState,), {"commit": lambda self: None})
    seat_all(members, 1)
    underway(members, 1)
    reached = threading.Event()
    members[0].before_step = lambda step: reached.set() if step > 50 else None
    assert reached.wait(TIMEOUT_S)
    agree(members, 1, 1)
    members[0].until(local.Parked)
    # Where an abort raises nothing, such a script goes on to its end and learns of it there.
    lazy.steps = 2000
    lazy.agent.send(local.Break(1, "rank 1 did not come"))
    with pytest.raises(StateError, match=r"this one none: commit\(\) is to be called by every worker"):
        lazy.worker.join()


# --- unwinding -------------------------------------------------------------------------------------------------------


def test_what_train_held_is_gone_before_the_next_round(trainers: Any) -> None:
    (one,) = trainers()
    dead: list[bool] = []
    cleaned: list[str] = []
    held: list[weakref.ref[Any]] = []

    class Wrapper:
        pass

    def inner(state: BaseState, wrapper: Wrapper) -> Iterator[int]:
        try:
            while True:
                state.commit()
                yield 1
        finally:
            cleaned.append("generator")

    def train(state: BaseState) -> str:
        if held:
            dead.append(held[0]() is None)
            return "done"
        wrapper = Wrapper()
        held.append(weakref.ref(wrapper))
        try:
            for _ in inner(state, wrapper):
                pass
        except BaseException as error:  # noqa: BLE001 - it is raised again
            kept = error  # a cycle: frame, exception, traceback, frame
            raise kept from None
        finally:
            cleaned.append("train")
        return "never"

    one.train = train
    gc.collect()
    gc.disable()
    try:
        seat_all([one], 1)
        underway([one], 1)
        target = agree([one], 1, 1)
        seat_all([one], 2, restore=(1, target))
        assert one.worker.join() == "done"
    finally:
        gc.enable()
    assert dead == [True]
    assert cleaned == ["generator", "train"]


def test_old_groups_do_not_pile_up(trainers: Any) -> None:
    (one,) = trainers()

    def hang(step: int) -> None:
        one.framework.groups[-1].aborted.wait(TIMEOUT_S)

    one.before_step = hang
    seat_all([one], 1)
    for number in range(2, 12):
        underway([one], number - 1)
        one.agent.send(local.Break(number - 1, "gone"))
        seat_all([one], number)
    underway([one], 11)
    assert sum(not group.retired for group in one.framework.groups) <= 4
    one.agent.send(local.Stop("enough"))
    one.agent.send(local.Break(11, "gone"))
    with pytest.raises(SystemExit):
        one.worker.join()


# --- how it is called ------------------------------------------------------------------------------------------------


def test_a_second_run_in_the_same_round(trainers: Any) -> None:
    (one,) = trainers(steps=3)
    evaluated: list[int] = []

    def evaluate(state: BaseState, word: str) -> str:
        evaluated.append(state.step)
        return word

    def script() -> str:
        first = one.run(one.train)(one.state)
        return str(first + one.run(evaluate)(one.state, word=" and evaluated"))

    seat_all([one], 1)
    underway([one], 1)
    one.worker.join()
    one.worker.start(script)
    assert one.worker.join() == "trained and evaluated"
    assert evaluated == [3]
    assert len([said for said in one.agent.said if isinstance(said, local.Parked | local.Enter)]) == 2


def test_a_second_run_after_the_round_was_broken(trainers: Any) -> None:
    (one,) = trainers(steps=3)
    seat_all([one], 1)
    underway([one], 1)
    one.worker.join()
    one.agent.send(local.Break(1, "gone"))
    assert one.worker.link.wait_until_broken(1, TIMEOUT_S)
    one.worker.start(lambda: one.run(lambda state: state.step)(one.state))
    seat_all([one], 2, restore=(1, 2))
    assert one.worker.join() == 2


def test_misuse_is_named(trainers: Any) -> None:
    (one,) = trainers(steps=1)
    seat_all([one], 1)
    one.worker.join()
    with pytest.raises(StateError, match="takes a State first, not a int"):
        one.run(lambda state: None)(5)
    with pytest.raises(StateError, match="only one State per process"):
        one.run(lambda state: None)(BaseState(one.framework, {}))
    inner = one.run(lambda state: None)
    with pytest.raises(StateError, match="called inside another one"):
        one.run(lambda state: inner(state))(one.state)


def test_the_decorator_keeps_the_name() -> None:
    run = make_run(FakeFramework())

    @run
    def train(state: BaseState, rate: float) -> None:
        """How it learns."""

    assert (train.__name__, train.__doc__) == ("train", "How it learns.")


# --- everything at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_random_changes_lose_no_step(trainers: Any, seed: int) -> None:
    """Worlds of one to four that change with and without notice: every worker ends with the same state, and a planned
    change never repeats a step."""
    chance = random.Random(seed)
    members: list[Trainer] = trainers(2)
    restore = (0, 0)
    for number in range(1, 9):
        seat_all(members, number, restore)
        underway(members, number)
        if chance.random() < 0.5:
            restore = (number, agree(members, number, hold=number))
            planned = True
        else:
            for one in members:
                one.agent.send(local.Break(number, "a node is gone"))
            planned = False
        for one in members:
            parked = one.agent.heard.get(timeout=TIMEOUT_S)
            assert parked == local.Parked(number)
            one.agent.heard.put(parked)
        if not planned and any(one.agent.kept for one in members):
            restore = newest(members)
        elif planned:
            assert newest(members) == restore
        if len(members) < 4 and chance.random() < 0.5:
            members += trainers(1)
    for one in members:
        one.steps = restore[1] + 20
    seat_all(members, 9, restore)
    for one in members:
        assert one.worker.join() == "trained"
        assert one.entered[-1] == (9, restore[1])
        assert np.all(one.model.weight.data == restore[1] + 20)
        assert one.state.commits == one.state.step == restore[1] + 20


def test_run_is_refused_where_workers_need_no_others() -> None:
    one = Trainer(Barriers(), steps=2)
    one.worker.environment["EDL_PS"] = "1"
    one.start()
    with pytest.raises(StateError, match="--run-mode=ps"):
        one.worker.join()
    one.worker.close()
