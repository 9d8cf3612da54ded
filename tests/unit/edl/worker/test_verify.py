from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edl.config import OnMismatch, VerifyRules
from edl.errors import SettingError, StateDiffers
from edl.wire import local
from edl.wire.local import STATE
from edl.worker import verify
from edl.worker.session import PeersLost
from edl.worker.state import BaseState
from edl.worker.state_comparison import StateComparison
from edl.worker.verify import Difference, Held, compare, describe
from tests.support import verifying
from tests.support.fake_agent import TIMEOUT_S, Barriers, FakeFramework, Model, NumpyArrays, Worker, a_seat


def strictly(path: str) -> bool:
    return not path.startswith("buffer")


@pytest.mark.parametrize(
    ("values", "blamed"),
    [
        ("aab", (2,)),
        ("baa", (0,)),
        ("abab", (0, 1, 2, 3)),
        ("ab", (0, 1)),
        ("abc", (0, 1, 2)),
        ("aabc", (0, 1, 2, 3)),
        ("aaabc", (3, 4)),
    ],
)
def test_the_minority_is_blamed_and_all_where_there_is_no_majority(values: str, blamed: tuple[int, ...]) -> None:
    parts = [{"weight": value, "same": "x"} for value in values]
    assert compare(parts, strictly) == [Difference("weight", blamed, strict=True)]


def test_a_path_that_a_rank_lacks_differs() -> None:
    parts: list[dict[str, str]] = [{"a": "1"}, {"a": "1", "buffer": "2"}, {"a": "1"}]
    assert compare(parts, strictly) == [Difference("buffer", (1,), strict=False)]


def test_differences_are_described_by_path_and_rank() -> None:
    found = [Difference(f"model.{number}", (3,), strict=True) for number in range(7)]
    text = describe(found, 8)
    assert text.startswith("state.model.0 (rank 3 of 8), state.model.1 (rank 3 of 8)")
    assert text.endswith("state.model.4 (rank 3 of 8) and 2 more")
    assert describe([Difference("w", (0, 1), strict=True)], 2) == "state.w (no majority among 2 ranks)"


def held(array: Any, **plain: Any) -> Held:
    array = np.asarray(array)
    return Held({"values": plain}, [("weight", array)], {"weight": f"{array.dtype}{array.shape}"}, frozenset())


def together(*ranks: Held) -> list[list[Difference]]:
    return verifying.together(NumpyArrays().digest, *ranks)


def test_equal_ranks_find_nothing() -> None:
    assert together(held([1.0, float("nan")], step=3), held([1.0, float("nan")], step=3)) == [[], []]


@pytest.mark.parametrize(
    ("other", "path"),
    [
        (held([1.0, 2.5], step=3, lr=[0.1]), "weight"),
        (held([1.0, -0.0], step=3, lr=[0.1]), "weight"),
        (held([[1.0], [0.0]], step=3, lr=[0.1]), "weight"),
        (held(np.zeros(2, np.int64), step=3, lr=[0.1]), "weight"),
        (held([1.0, 0.0], step=4, lr=[0.1]), "values.step"),
        (held([1.0, 0.0], step=3, lr=[0.2]), "values.lr.0"),
        (held([1.0, 0.0], step=3), "values.lr.0"),
    ],
)
def test_every_rank_finds_the_same_difference(other: Held, path: str) -> None:
    one = held([1.0, 0.0], step=3, lr=[0.1])
    answers = together(one, one, other)
    assert answers[0] == answers[1] == answers[2]
    assert [(found.path, found.ranks) for found in answers[0]] == [(path, (2,))]


def test_ranks_that_hold_stages_of_a_pipeline_compare_what_several_of_them_have() -> None:
    first, second = (
        Held(
            {"model": {"layers": {f"layer{stage}": {"scale": stage}}}},
            [(f"model.layer{stage}", np.zeros(2)), ("model.shared", np.zeros(2))],
            {f"model.layer{stage}": "F64[2]", "model.shared": "F64[2]"},
            frozenset({f"model.layer{stage}", "model.shared"}),
            whole=False,
        )
        for stage in (0, 1)
    )
    assert together(first, second, first, second) == [[]] * 4
    faulty = replace(second, leaves=[("model.layer1", np.ones(2)), ("model.shared", np.zeros(2))])
    expected = [Difference("model.layer1", (5,), strict=True)]
    assert together(first, second, first, second, first, faulty) == [expected] * 6, "the others know of it, too"
    assert together(first, second, faulty)[0] == [Difference("model.layer1", (1, 2), strict=True)]


# --- rules -----------------------------------------------------------------------------------------------------------


def test_rules_travel_as_text() -> None:
    for rules in (VerifyRules(), VerifyRules(7, OnMismatch.SYNC)):
        assert VerifyRules.parse(rules.text) == rules
    assert VerifyRules.parse("") == VerifyRules()
    with pytest.raises(SettingError, match="EDL_VERIFY='x:stop'"):
        VerifyRules.parse("x:stop")
    with pytest.raises(SettingError, match="--verify-state=-1"):
        VerifyRules(-1)


# --- the state of several ranks --------------------------------------------------------------------------------------


class StrictState(BaseState):
    """All of a model must be equal on all ranks."""

    def _strict(self, name: str, obj: Any) -> frozenset[str]:
        return frozenset({name})


class Ranks:
    """The workers of one world, each with a state, in threads."""

    def __init__(self, size: int, rules: str = "", **values: Any) -> None:
        barriers = Barriers()
        self.workers = [Worker() for _ in range(size)]
        self.states = [StrictState(FakeFramework(barriers), {"model": Model(), **values}) for _ in range(size)]
        for worker in self.workers:
            worker.session.environment["EDL_VERIFY"] = rules

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def all(self, work: Callable[[int], object]) -> list[BaseException | None]:
        """Exception of each rank, or None."""
        ends: list[BaseException | None] = [None] * len(self.workers)

        def run(rank: int) -> None:
            self.workers[rank].session.trainer = threading.get_ident()
            try:
                work(rank)
            except BaseException as error:  # noqa: BLE001 - handed to the test
                ends[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        return ends

    def begin(self, **changes: Any) -> list[BaseException | None]:
        """Put them in one world, each on a node of its own, and restore."""

        def enter(rank: int) -> None:
            worker, state = self.workers[rank], self.states[rank]
            session = worker.session
            number = session.seat.round + 1 if session.seat else 1
            worker.agent.place(a_seat(number, rank=rank, world_size=len(self.workers), **changes))
            session.framework = state._framework
            session.leave()
            seat = session.connect()
            worker.agent.expect(local.Parked)
            state._ask(session, seat)
            state._begin(session, seat)
            session.training = True

        return self.all(enter)

    def commit(self) -> list[BaseException | None]:
        return self.all(lambda rank: self.states[rank].commit())

    def kept(self, rank: int) -> list[int]:
        """Commits that this rank has handed over."""
        self.workers[rank].settle()
        return [commit for _, commit in self.workers[rank].agent.versions()]

    def gives_up_with(self, rank: int) -> int:
        """The exit status that it wants the job to end with."""
        return self.workers[rank].agent.expect(local.GiveUp).exit_code


@pytest.fixture
def world() -> Any:
    made: list[Ranks] = []

    def make(size: int = 3, rules: str = "", **values: Any) -> Ranks:
        made.append(Ranks(size, rules, **values))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_equal_ranks_commit(world: Any) -> None:
    ranks = world(rules="1:stop")
    assert ranks.begin() == [None] * 3
    assert ranks.commit() == [None] * 3
    assert [ranks.kept(rank) for rank in range(3)] == [[1], [1], [1]]


def test_stop_ends_the_job_on_every_rank_and_keeps_nothing(world: Any) -> None:
    ranks = world(rules="2:stop")
    ranks.begin()
    ranks.states[1].model.weight.data[0, 0] = 9
    assert ranks.commit() == [None] * 3, "compared at each second commit"
    for end in ranks.commit():
        assert isinstance(end, StateDiffers), end
        assert "at commit 2 ranks hold different values of state.model.layer.weight (rank 1 of 3)" in str(end)
    assert [ranks.gives_up_with(rank) for rank in range(3)] == [11] * 3
    assert [ranks.kept(rank) for rank in range(3)] == [[1]] * 3


def test_a_save_is_compared_as_well(world: Any) -> None:
    ranks = world(rules="1000:stop")
    ranks.begin()
    ranks.states[1].model.weight.data[0, 0] = 9
    assert ranks.commit() == [None] * 3
    assert all(isinstance(end, StateDiffers) for end in ranks.all(lambda rank: ranks.states[rank].save()))


def test_rollback_fails_the_rank_that_differs_and_keeps_what_was_compared_only(world: Any) -> None:
    ranks = world(rules="2:rollback")
    ranks.begin()
    for _ in range(3):
        assert ranks.commit() == [None] * 3
    assert ranks.kept(0) == [2]
    ranks.states[2].model.weight.data[0, 0] = 9
    ends = ranks.commit()
    assert [type(end) for end in ends] == [PeersLost, PeersLost, StateDiffers]
    assert ranks.kept(0) == [2]


@pytest.mark.parametrize("purpose", ["switch", "kill"])
def test_with_rollback_the_commit_that_ends_a_world_is_compared(world: Any, purpose: str) -> None:
    """Else the next world would begin from it, though it is none that was compared."""
    ranks = world(rules="100:rollback")
    ranks.begin()
    for worker in ranks.workers:
        worker.agent.send(local.HoldAtBoundary(1, 7))
    for worker in ranks.workers:
        assert worker.agent.expect(local.Here).commit == 0
        worker.agent.send(local.Target(7, 1, purpose, "node b joins"))
    ranks.states[2].model.weight.data[0, 0] = 9
    assert [type(end) for end in ranks.commit()] == [PeersLost, PeersLost, StateDiffers]
    assert ranks.kept(0) == []


def test_the_boundary_after_the_training_is_not_compared(world: Any) -> None:
    """The others may have come to their end before they were to hold, and make none."""
    ranks = world(rules="1:stop")
    ranks.begin()
    assert ranks.all(lambda rank: ranks.states[0]._finish() if rank == 0 else None) == [None] * 3
    assert ranks.kept(0) == [1]


def test_without_a_majority_all_are_started_again(world: Any) -> None:
    ranks = world(2, rules="1:rollback")
    ranks.begin()
    ranks.states[1].model.weight.data[0, 0] = 9
    assert [type(end) for end in ranks.commit()] == [StateDiffers, StateDiffers]


def test_sync_takes_over_what_the_majority_holds(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = world(rules="1:sync")
    ranks.begin()
    ranks.states[0].model.weight.data[0, 0] = 9
    assert ranks.commit() == [None] * 3
    assert [state.model.weight.data[0, 0] for state in ranks.states] == [0, 0, 0]
    assert "all adopt those of rank 1" in capsys.readouterr().err


def test_values_may_differ_while_a_round_runs_and_are_named(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = world(rules="1:stop", seen=0)
    ranks.begin()
    for rank, state in enumerate(ranks.states):
        state.seen = rank
    assert ranks.commit() == [None] * 3
    assert [state.seen for state in ranks.states] == [0, 1, 2]
    said = capsys.readouterr().err
    assert said.count("state.seen (no majority among 3 ranks) differs; a restore uses rank 0's") == 1


def test_nan_and_infinity_are_named_once(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = world(2, rules="1:stop")
    ranks.begin()
    for state in ranks.states:
        state.model.weight.data[1, 1] = float("nan")
    assert ranks.commit() == [None] * 2
    assert ranks.commit() == [None] * 2
    assert capsys.readouterr().err.count("commit 1: NaN or infinity in state.model.layer.weight") == 1


def restore(ranks: Ranks) -> list[BaseException | None]:
    return ranks.begin(restore_era=1, restore_commit=1)


def test_after_a_restore_ranks_compare_without_being_asked_to(world: Any) -> None:
    ranks = world()
    ranks.begin()
    ranks.states[1].model.weight.data[0, 0] = 9
    assert ranks.commit() == [None] * 3
    ranks.kept(1)
    for end in restore(ranks):
        assert isinstance(end, StateDiffers), end
        assert "after the restore of commit 1 ranks hold different values of state.model.layer.weight" in str(end)


def test_after_a_restore_values_are_those_of_rank_0(world: Any) -> None:
    ranks = world(seen=0, table=np.zeros(3))
    ranks.begin()
    for rank, state in enumerate(ranks.states):
        state.seen, state.table = rank + 5, np.full(rank + 1, rank)
        state.model.weight.data[:] = 4
    assert ranks.commit() == [None] * 3
    for rank in range(3):
        ranks.kept(rank)
    assert restore(ranks) == [None] * 3
    assert [state.seen for state in ranks.states] == [5, 5, 5]
    assert [state.table.tolist() for state in ranks.states] == [[0], [0], [0]]
    assert all((state.model.weight.data == 4).all() for state in ranks.states)


def test_a_large_state_is_hashed_once_when_nothing_differs(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = world(2, rules="1:stop")
    ranks.begin()
    calls: list[int] = []
    monkeypatch.setattr(verify.Verifier, "_details", lambda *_: calls.append(1))
    assert ranks.commit() == [None] * 2
    assert calls == []


def test_a_state_alone_is_not_compared() -> None:
    worker = Worker()
    worker.session.environment["EDL_VERIFY"] = "1:rollback"
    state = StrictState(FakeFramework(), {"model": Model()})
    worker.agent.place(a_seat(1))
    worker.session.framework = state._framework
    seat = worker.session.connect()
    worker.agent.expect(local.Parked)
    state._begin(worker.session, seat)
    worker.session.training = True
    worker.session.trainer = threading.get_ident()
    state.commit()
    worker.settle()
    assert [key for key in worker.agent.kept] == [(STATE, 1, 1, 0)]
    assert not StateComparison(worker.session, state).rolls_back
    worker.close()
