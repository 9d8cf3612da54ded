"""Votes on a commit, callbacks after a reset, and who may commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edl.errors import CheckpointError, StateError
from edl.wire import local
from edl.worker.boundary import RoundOver
from edl.worker.loop import make_run
from edl.worker.session import Session
from edl.worker.state import BaseState
from tests.support.fake_agent import TIMEOUT_S, Barriers, FakeFramework, Generator, a_seat
from tests.unit.edl.worker.test_loop import Trainer, commit_of, newest, seat_all, underway

Votes = Callable[[int, int], bool]
"""By rank and commit."""


class Voter(Trainer):
    """Votes on each of its commits."""

    def __init__(self, barriers: Barriers, votes: Votes, steps: int = 6) -> None:
        super().__init__(barriers, steps)
        self.votes = votes
        self.random = Generator(0)
        self.state = BaseState(self.framework, {"model": self.model, "step": 0, "random": self.random})
        self.answers: list[tuple[int, bool]] = []

    def train(self, state: BaseState) -> str:
        group = self.framework.groups[-1]
        rank = group.seat.rank
        self.entered.append((group.seat.round, state.step))
        while state.step < self.steps:
            group.collective()
            state.model.weight.data[:] += 1
            state.step += 1
            state.random.at += 10
            at = state.commits + 1
            self.answers.append((at, state.commit(ok=self.votes(rank, at))))
        return "trained"


@pytest.fixture
def voters() -> Iterator[Callable[..., list[Voter]]]:
    made: list[Voter] = []

    def make(count: int, votes: Votes, **settings: Any) -> list[Voter]:
        barriers = Barriers()
        made.extend(Voter(barriers, votes, **settings) for _ in range(count))
        for one in made:
            one.start()
            one.until(local.Enter)
        return made

    yield make
    for one in made:
        one.worker.close()


def kept(one: Trainer, versions: list[tuple[int, int]]) -> bool:
    """True if the agent keeps exactly these versions, once it has read all messages."""
    for _ in range(int(TIMEOUT_S / 0.01)):
        if one.agent.versions() == versions:
            return True
        threading.Event().wait(0.01)
    return False


def once(rank: int, commit: int) -> Votes:
    """This rank is against this commit, the first time."""
    left = [True]

    def votes(who: int, at: int) -> bool:
        if (who, at) == (rank, commit) and left:
            left.clear()
            return False
        return True

    return votes


def test_who_all_agree_with_is_committed(voters: Any) -> None:
    members = voters(2, lambda rank, commit: True)
    seat_all(members, 1)
    underway(members, 1)
    for one in members:
        assert one.worker.join() == "trained"
        assert one.answers == [(commit, True) for commit in range(1, 7)]
        assert kept(one, [(1, at) for at in range(1, 7)])


@pytest.mark.parametrize("commit", [1, 4])
def test_one_vote_against_is_enough_and_everything_is_put_back(voters: Any, commit: int) -> None:
    """Also where nothing has been committed yet."""
    members = voters(2, once(1, commit))
    seat_all(members, 1)
    underway(members, 1)
    for one in members:
        assert one.worker.join() == "trained"
        assert one.answers == [
            *((at, True) for at in range(1, commit)), (commit, False), *((at, True) for at in range(commit, 7)),
        ]  # fmt: skip
        assert (one.state.step, one.state.commits, one.model.weight.data[0, 0], one.random.at) == (6, 6, 6, 60)
        assert kept(one, [(1, at) for at in range(1, 7)])
        assert len(one.entered) == 1


def test_who_does_not_copy_takes_the_commit_of_who_does(voters: Any) -> None:
    """The second worker of a node asks its agent only when the first one's agent, which is the same, has the commit."""
    first, second = voters(2, once(1, 3), steps=3)
    second.agent.kept = first.agent.kept
    for one, rank in ((first, 0), (second, 1)):
        one.until(local.Parked)
        one.agent.place(seat(1, rank))
    underway([first, second], 1)
    for one in (first, second):
        assert one.worker.join() == "trained"
        assert one.answers == [(1, True), (2, True), (3, False), (3, True)]
        assert (one.state.step, one.model.weight.data[0, 0]) == (3, 3)
    assert not [said for said in second.agent.said if isinstance(said, local.Committed) and said.stream == local.STATE]


def seat(number: int, rank: int) -> Any:
    return a_seat(number, rank=rank, local_rank=rank, world_size=2, local_world_size=2)


def test_without_an_earlier_commit_in_memory_a_vote_against_is_an_error(voters: Any) -> None:
    members = voters(1, once(0, 2))
    members[0].agent.refusal = "raise --state-memory"
    seat_all(members, 1)
    with pytest.raises(CheckpointError, match="voted against commit 2, and there is no earlier state to restore"):
        members[0].worker.join()


def test_nodes_whose_last_commits_differ_cannot_go_back(voters: Any) -> None:
    members = voters(2, once(0, 4))
    reached = threading.Event()
    commit: Callable[..., bool] = members[1].state.commit

    def lose(ok: bool) -> bool:
        if members[1].state.commits == 2:
            link = members[1].worker.link
            stream = link._streams[local.STATE]
            link._wait(lambda: not stream.due, TIMEOUT_S)
            members[1].agent.refusal, stream.ready = "full", None
            reached.set()
        return commit(ok=ok)

    object.__setattr__(members[1].state, "commit", lose)
    seat_all(members, 1)
    for one in members:
        with pytest.raises(CheckpointError, match=r"the nodes hold different ones, \[2, 3\]"):
            one.worker.join()
    assert reached.is_set()


def test_a_voter_that_is_lost_leaves_no_commit(voters: Any) -> None:
    """One that is gone cannot agree."""
    members = voters(2, lambda rank, commit: True, steps=1_000_000)
    lost, survivor = members

    def die(rank: int, commit: int) -> bool:
        if rank == 0 and commit == 5:
            lost.framework.groups[-1].barrier.abort()
            raise KeyboardInterrupt
        return True

    lost.votes = die
    seat_all(members, 1)
    survivor.until(local.TrainingStarted)
    with pytest.raises(KeyboardInterrupt):
        lost.worker.join()
    assert survivor.framework.groups[0].disconnected.wait(TIMEOUT_S)
    survivor.agent.send(local.Break(1, "node a is gone"))
    survivor.steps = 8
    seat_all([survivor], 2, restore=(1, 4))
    assert survivor.worker.join() == "trained"
    assert survivor.entered == [(1, 0), (2, 4)]
    assert (1, 5) not in survivor.agent.versions()


def test_votes_without_a_launcher() -> None:
    state = BaseState(FakeFramework(), {"step": 0})
    session = Session(None, {})
    answers: list[bool] = []

    def train(state: BaseState) -> None:
        for ok in (True, True, False, True):
            state.step += 1
            answers.append(state.commit(ok=ok))

    run: Any = make_run(FakeFramework(), lambda: session)
    run(train)(state)
    assert (answers, state.step, state.commits) == ([True, True, False, True], 3, 3)


def test_without_a_launcher_the_last_commit_is_put_back_whether_it_was_voted_on_or_not() -> None:
    state = BaseState(FakeFramework(), {"step": 0})
    session = Session(None, {})

    def train(state: BaseState) -> None:
        for ok in (True, None, None, False):
            state.step += 1
            state.commit(ok=ok)

    run: Any = make_run(FakeFramework(), lambda: session)
    run(train)(state)
    assert (state.step, state.commits) == (3, 3)


def test_without_a_vote_a_commit_is_made(voters: Any) -> None:
    (one,) = voters(1, lambda rank, commit: None)
    seat_all([one], 1)
    one.worker.join()
    assert all(answer for _, answer in one.answers)


# --- callbacks -------------------------------------------------------------------------------------------------------


def test_callbacks_are_called_in_each_further_world() -> None:
    one = Trainer(Barriers())
    called: list[tuple[str, int, int]] = []
    state = one.state
    state.register_reset_callbacks([lambda: called.append(("first", state.step, one.framework.groups[-1].seat.round))])
    state.register_reset_callbacks([lambda: called.append(("second", state.step, len(one.entered)))])
    one.start()
    one.until(local.Enter)
    seat_all([one], 1)
    underway([one], 1)
    while newest([one]) < (1, 3):
        threading.Event().wait(0.001)
    assert called == []
    one.agent.send(local.Break(1, "gone"))
    one.until(local.Parked)
    one.steps = 10
    one.agent.heard.put(local.Parked(1))
    restore = newest([one])
    seat_all([one], 2, restore)
    one.worker.join()
    assert called == [("first", restore[1], 2), ("second", restore[1], 1)]
    one.worker.close()


def test_callbacks_are_not_called_before_the_first_train() -> None:
    """The first world of a process ends while the state is restored."""
    one = Trainer(Barriers(), steps=2)
    commit, restoring, called = commit_of(one, 1, 3), threading.Event(), list[int]()
    one.state.register_reset_callbacks([lambda: called.append(one.framework.groups[-1].seat.round)])
    restore: Callable[..., None] = one.state._restore

    def observed(session: Session, place: local.Seat) -> None:
        restoring.set()
        restore(session, place)

    object.__setattr__(one.state, "_restore", observed)
    one.start()
    one.until(local.Enter)
    seat_all([one], 1, restore=(1, 3))  # nobody has that commit
    assert restoring.wait(TIMEOUT_S)
    one.agent.send(local.Break(1, "gone"))
    one.until(local.Parked)
    one.agent.kept[local.STATE, 1, 3, 0] = commit
    one.agent.place(a_seat(2, restore_era=1, restore_commit=3))
    assert one.worker.join() == "trained"
    assert (called, one.entered) == ([], [(2, 0)])
    one.worker.close()


# --- who may commit --------------------------------------------------------------------------------------------------


def test_another_thread_may_not_commit() -> None:
    one = Trainer(Barriers(), steps=1)
    caught: list[BaseException] = []

    def elsewhere(step: int) -> None:
        def commit() -> None:
            with pytest.raises(StateError, match=r"thread 'writer'.*for the thread that runs train") as error:
                one.state.commit()
            caught.append(error.value)

        thread = threading.Thread(target=commit, name="writer")
        thread.start()
        thread.join(TIMEOUT_S)

    one.before_step = elsewhere
    one.start()
    one.until(local.Enter)
    seat_all([one], 1)
    one.worker.join()
    assert caught and one.state.commits == 1
    one.worker.close()


def test_a_commit_inside_a_commit_is_refused() -> None:
    one = Trainer(Barriers(), steps=1)

    def inside() -> dict[str, Any]:
        with pytest.raises(StateError, match="inside another one, as by a signal handler"):
            one.state.save()
        return {"layer.weight": one.model.weight, "extra": {}}

    one.before_step = lambda step: setattr(one.model, "state_dict", inside)
    one.start()
    one.until(local.Enter)
    seat_all([one], 1)
    one.worker.join()
    assert one.state.commits == 1
    one.worker.close()


# --- failures that the script swallows -------------------------------------------------------------------------------


def test_after_a_swallowed_failure_nothing_is_committed(trainer: Trainer) -> None:
    def train(state: BaseState) -> str:
        group = trainer.framework.groups[-1]
        if group.seat.round == 1:
            group.failed = "a collective failed: connection reset"
        state.step += 1
        state.commit()
        return "trained"

    trainer.train = train  # type: ignore[method-assign]
    seat_all([trainer], 1)
    underway([trainer], 1)
    assert trainer.framework.groups[0].disconnected.wait(TIMEOUT_S)
    assert not trainer.agent.kept
    trainer.agent.send(local.Break(1, "node b is gone"))
    seat_all([trainer], 2)
    assert trainer.worker.join() == "trained"
    assert kept(trainer, [(2, 1)])


def test_a_swallowed_failure_that_nobody_explains_ends_the_worker(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edl.worker.loop.LOST_TIMEOUT_S", 0.01)

    def train(state: BaseState) -> None:
        trainer.framework.groups[-1].failed = "a collective failed: time out"
        while True:
            try:
                state.commit()
            except Exception:  # noqa: BLE001, S112 - it swallows everything
                continue

    trainer.train = train  # type: ignore[assignment, method-assign]
    seat_all([trainer], 1)
    with pytest.raises(StateError, match=r"a collective of round 1 failed on this worker.*: time out"):
        trainer.worker.join()
    assert not trainer.agent.kept


def test_what_train_returns_after_its_group_was_aborted_is_not_taken(trainer: Trainer) -> None:
    """It may rest on what an aborted collective left, such as a loss that looks like convergence."""
    rounds: list[int] = []

    def train(state: BaseState) -> str:
        rounds.append(trainer.framework.groups[-1].seat.round)
        if rounds == [1]:
            trainer.agent.send(local.Break(1, "node b is gone"))
            assert trainer.worker.link.wait_until_broken(1, TIMEOUT_S)
            return "garbage"
        return "trained"

    trainer.train = train  # type: ignore[method-assign]
    seat_all([trainer], 1)
    underway([trainer], 1)
    seat_all([trainer], 2)
    assert trainer.worker.join() == "trained"
    assert rounds == [1, 2]


def test_a_late_break_of_the_round_before_spoils_nothing(trainer: Trainer) -> None:
    link = trainer.worker.link

    def train(state: BaseState) -> str:
        return "trained" if trainer.framework.groups[-1].seat.round == 2 else str(link.wait_until_broken(1, TIMEOUT_S))

    trainer.train = train  # type: ignore[method-assign]
    seat_all([trainer], 1)
    underway([trainer], 1)
    assert link.spoilt(1) == ""
    trainer.agent.send(local.Break(1, "gone"))
    seat_all([trainer], 2)
    assert trainer.worker.join() == "trained"
    assert (link.spoilt(1), link.spoilt(2)) == ("gone", "")
    with pytest.raises(RoundOver, match="gone"):
        link.announce(1, [local.Committed(local.STATE, 0, 1, 1, 9, 0, 1, False)])


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    made = Trainer(Barriers())
    made.start()
    made.until(local.Enter)
    yield made
    made.worker.close()
