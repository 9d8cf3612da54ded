"""Random numbers of a ``State``: they depend on the seed, the rank and the commit, and on nothing that can be lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from edl.errors import StateError
from edl.wire.local import STATE
from edl.worker.numbers import RandomNumbers
from edl.worker.state import BaseState
from tests.support.fake_agent import TIMEOUT_S, FakeFramework, Worker, begin


class Generators:
    """Notes what it is set to."""

    def __init__(self, seed: str = "seed") -> None:
        self.seed = seed
        self.keys: list[bytes] = []

    def edl_seed(self) -> str:
        return self.seed

    def edl_reseed(self, key: bytes) -> None:
        self.keys.append(key)


class Alone(FakeFramework):
    """A world of one, or one in which the others have said something."""

    def __init__(self, *others: bytes) -> None:
        super().__init__()
        self.others = others
        self.said: list[bytes] = []

    def exchange(self, data: bytes) -> list[bytes]:
        self.said.append(data)
        return [*self.others, data]


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made = [Worker(), Worker()]
    yield made
    for one in made:
        one.close()


def a_state(framework: FakeFramework | None = None, seed: str = "seed") -> tuple[BaseState, Generators]:
    generators = Generators(seed)
    return BaseState(framework or Alone(), {"random": generators, "step": 0}), generators


def pass_on(one: Worker, other: Worker) -> None:
    """The second worker's node has what the first one's has."""
    one.settle()
    other.agent.kept.update(one.agent.kept)


def test_a_worker_that_is_new_or_one_behind_gets_the_numbers_of_the_undisturbed_run(workers: list[Worker]) -> None:
    first, second = workers
    state, undisturbed = a_state()
    begin(first, state)
    for _ in range(3):
        state.commit()
    pass_on(first, second)
    assert len(set(undisturbed.keys)) == 4, "one for the beginning and one for each commit"
    again, generators = a_state(seed="another process draws another one")
    begin(second, again, number=2, restore_era=1, restore_commit=2)
    again.commit()
    assert generators.keys == undisturbed.keys[2:]


def test_the_same_worker_gets_them_again(workers: list[Worker]) -> None:
    worker = workers[0]
    state, generators = a_state()
    begin(worker, state)
    state.commit()
    state.commit()
    worker.settle()
    begin(worker, state, restore_era=1, restore_commit=1)
    assert generators.keys[3] == generators.keys[1]
    begin(worker, state, restore_era=1, restore_commit=1)
    assert generators.keys[4] == generators.keys[1]


def test_each_rank_has_its_own(workers: list[Worker]) -> None:
    found = []
    for rank, worker in enumerate(workers):
        state, generators = a_state()
        begin(worker, state, rank=rank, local_rank=rank)
        found.append(generators.keys[0])
    assert found[0] != found[1]


def test_all_take_the_seed_of_rank_0(workers: list[Worker]) -> None:
    both, barrier = [b"", b""], threading.Barrier(2)

    class Two(FakeFramework):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

        def exchange(self, data: bytes) -> list[bytes]:
            both[self.rank] = data
            barrier.wait(TIMEOUT_S)
            return list(both)

    found: dict[int, BaseState] = {}

    def start(rank: int) -> None:
        found[rank], _ = a_state(Two(rank), f"seed of rank {rank}")
        begin(workers[rank], found[rank], rank=rank, local_rank=rank)

    workers[0].start(lambda: start(0))
    start(1)
    workers[0].join()
    assert [found[rank]._values["_random_seed"] for rank in (0, 1)] == ["seed of rank 0"] * 2


def test_where_the_job_begins_again_from_nothing_the_seed_is_that_of_who_was_there() -> None:
    there, new = RandomNumbers(), RandomNumbers()
    there.add("random", Generators("first"))
    new.add("random", Generators("second"))
    assert there.begin("", lambda mine: [mine]) == "first"
    said: list[bytes] = []
    there.begin("", lambda mine: [said.append(mine) or mine])  # type: ignore[func-returns-value]
    assert new.begin("", lambda mine: [mine, *said]) == "first"
    assert there.begin("committed", lambda mine: []) == "committed", "without a word to the others"


def test_a_snapshot_from_before_there_was_a_seed_is_taken(workers: list[Worker]) -> None:
    first, second = workers
    plain = BaseState(Alone(), {"step": 4})
    begin(first, plain)
    plain.commit()
    pass_on(first, second)
    framework = Alone()
    state, _ = a_state(framework)
    begin(second, state, number=2, restore_era=1, restore_commit=1)
    assert (state.step, state._values["_random_seed"], len(framework.said)) == (4, "seed", 1)
    begin(second, state, restore_era=1, restore_commit=1)
    assert len(framework.said) == 2, "a worker that has come meanwhile asks, so all do"


def test_a_script_may_do_without_again(workers: list[Worker], capfd: pytest.CaptureFixture[str]) -> None:
    first, second = workers
    state, _ = a_state()
    begin(first, state)
    state.commit()
    pass_on(first, second)
    plain = BaseState(Alone(), {"step": 1})
    begin(second, plain, number=2, restore_era=1, restore_commit=1)
    assert plain.step == 0
    assert "_random_seed" not in capfd.readouterr().err


def test_it_is_an_attribute_like_others_and_nothing_of_it_is_kept_for_a_rank(workers: list[Worker]) -> None:
    state, generators = a_state()
    begin(workers[0], state)
    state.commit()
    workers[0].settle()
    assert state.random is generators and state.keeps_numbers
    assert repr(state) == "State(random, step; 1 commits)" and "_random_seed" not in dir(state)
    assert {stream for stream, *_ in workers[0].agent.kept} == {STATE}
    with pytest.raises(AttributeError, match=r"state\.random is an object"):
        state.random = Generators()


@pytest.mark.parametrize("values", [{"one": Generators(), "two": Generators()}])
def test_one_is_enough(values: dict[str, Any]) -> None:
    with pytest.raises(StateError, match=r"state\.two: one RandomState sets all generators, and this state has one"):
        BaseState(Alone(), values)
    assert not BaseState(Alone(), {"step": 0}).keeps_numbers


def test_ranks_of_one_replica_may_share_numbers() -> None:
    def keys_of(together: int) -> list[bytes]:
        generators = Generators()
        if together > 1:
            generators.edl_model_parallel = together  # type: ignore[attr-defined]
        numbers = RandomNumbers()
        numbers.add("random", generators)
        for rank in range(4):
            numbers.derive(rank, 7)
        return generators.keys

    assert len(set(keys_of(1))) == 4
    one, two, three, four = keys_of(2)
    assert (one, two, three) == (two, one, four) and one != three
