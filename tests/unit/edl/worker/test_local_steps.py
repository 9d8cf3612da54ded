"""Several workers in threads make outer steps, come and go; arrays are NumPy's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from edl.arithmetic.outer_step import OuterRule
from edl.errors import StateError
from edl.worker.boundary import RoundOver
from edl.worker.local_steps import OuterSteps

TIMEOUT_S = 60.0
DILOCO = OuterRule(0.7, 0.9)


class Lost(Exception):
    """A peer is gone."""


class World:
    """The group of one round."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)

    def gather(self, rank: int, part: Any) -> list[Any]:
        self.parts[rank] = part
        try:
            self.barrier.wait()
            parts = list(self.parts)
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise Lost from None
        return parts

    def abort(self) -> None:
        self.barrier.abort()


class Vector:
    """A model of one parameter and one buffer; ``half`` keeps the parameter in 16 bits."""

    names = ("x",)

    def __init__(self, values: Sequence[float], half: bool = False) -> None:
        self.x = np.array(values, np.float16 if half else np.float32)
        self.buffer = np.zeros(1, np.float32)
        self.world, self.rank = World(1), 0
        self.sent = 0

    @property
    def workers(self) -> int:
        return self.world.size

    def check(self, objects: Mapping[str, Any]) -> None: ...

    def check_wire(self, wire: str) -> None: ...

    def read(self) -> list[Any]:
        return [self.x.astype(np.float32)]

    def write(self, arrays: Sequence[Any]) -> None:
        self.x[...] = arrays[0]

    def rounded(self, number: int, array: Any) -> Any:
        return array if self.x.dtype == array.dtype else array.astype(self.x.dtype).astype(array.dtype)

    def place(self, number: int, array: Any) -> Any:
        return array

    def zeros(self, array: Any) -> Any:
        return np.zeros_like(array)

    def read_buffers(self) -> list[Any]:
        return [self.buffer.copy()]

    def write_buffers(self, arrays: Sequence[Any]) -> None:
        self.buffer[...] = arrays[0]

    def copy(self) -> Any:
        return self.x.copy(), self.buffer.copy()

    def set(self, saved: Any) -> None:
        self.x[...], self.buffer[...] = saved

    def send_from_first(self) -> None:
        self.set(self.world.gather(self.rank, self.copy())[0])

    def sum_over_workers(self, arrays: list[Any], wire: str) -> list[Any]:
        self.sent += 1
        parts = self.world.gather(self.rank, [one.copy() for one in arrays])
        return [np.sum([part[number] for part in parts], 0, dtype=np.float32) for number in range(len(arrays))]

    def exchange(self, data: bytes) -> list[bytes]:
        return self.world.gather(self.rank, data)


class Worker:
    """Model, outer steps, and what a session and a state are to them."""

    def __init__(self, values: Sequence[float] = (0.0,), every: Any = 4, rule: OuterRule = DILOCO, **options: Any):
        half = options.pop("half", False)
        self.model = Vector(values, half)
        self.outer = OuterSteps(self.model, every, rule, "", options.pop("keep", True), lambda: self)
        self.training, self.state, self._objects = True, self, {"outer": self.outer}
        self.over = False

    def check(self) -> None:
        if self.over:
            raise RoundOver

    def enter(self, world: World, rank: int, commit: Any = None) -> None:
        """As ``State`` does at the beginning of a round."""
        self.over = False
        self.model.world, self.model.rank = world, rank
        self.outer.before_restore(self._objects, commit is None)
        if commit is not None:
            model, outer = commit
            self.model.set(model)
            self.outer.load_state_dict(outer)
        self.outer.restored(commit is None)

    def commit(self) -> Any:
        self.outer.check_equal("commit()")
        kept = self.outer.state_dict()
        parts = {name: {key: one.copy() for key, one in kept[name].items()} for name in ("momentum", "masters")}
        return self.model.copy(), {**kept, **parts}

    def train(self, changes: Sequence[float], samples: float = 1) -> bool:
        """One inner step for each change of the parameter; whether the last one ended in an outer step."""
        result = False
        for change in changes:
            self.model.x += self.model.x.dtype.type(change)
            result = self.outer.step(samples)
        return result


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [one.result(TIMEOUT_S) for one in [threads.submit(call) for call in calls]]


def enter(workers: Sequence[Worker], commit: Any = None) -> World:
    world = World(len(workers))
    together(*(lambda one=one, rank=rank: one.enter(world, rank, commit) for rank, one in enumerate(workers)))
    return world


def test_diloco_is_the_papers_algorithm() -> None:
    """Algorithm 1 of arXiv 2311.08105 with AdamW inside, written out for k replicas in 64 bits."""
    random = np.random.default_rng(4)
    k, t, h, n = 3, 6, 5, 40
    start = random.normal(size=n)
    targets = random.normal(size=(k, n))

    def adamw() -> Callable[[Any, Any], Any]:
        m, v, count = np.zeros(n), np.zeros(n), 0

        def update(x: Any, target: Any) -> Any:
            nonlocal m, v, count
            count += 1
            g = 2 * (x - target)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            step = (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.999**count)) + 1e-8)
            return x - 0.05 * (step + 0.01 * x)

        return update

    theta, buffer = start.astype(np.float32).astype(float), np.zeros(n)
    inner = [adamw() for _ in range(k)]
    expected = []
    for _ in range(t):
        deltas = []
        for replica in range(k):
            x = theta.copy()
            for _ in range(h):
                x = inner[replica](x, targets[replica])
            deltas.append(theta - x)
        gradient = np.mean(deltas, axis=0)
        buffer = 0.9 * buffer + gradient
        theta = theta - 0.7 * (gradient + 0.9 * buffer)
        expected.append(theta)

    workers = [Worker(start.tolist(), every=h) for _ in range(k)]
    enter(workers)

    def trained(rank: int) -> list[Any]:
        optimizer, found = adamw(), []
        for _ in range(t * h):
            model = workers[rank].model
            model.x[:] = optimizer(model.x.astype(float), targets[rank])
            if workers[rank].outer.step():
                found.append(model.x.copy())
        return found

    results = together(*(lambda rank=rank: trained(rank) for rank in range(k)))
    for result in results:
        assert [one.tobytes() for one in result] == [one.tobytes() for one in results[0]], "the same bits everywhere"
        np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6)  # 30 inner steps in 32 bits
    assert [one.outer.outer_steps for one in workers] == [t] * k
    assert [one.outer.inner_steps for one in workers] == [t * h] * k


def test_local_sgd_is_the_average_and_buffers_are_averaged() -> None:
    workers = [Worker(every=2, rule=OuterRule(1.0, 0.0)) for _ in range(2)]
    enter(workers)
    workers[0].model.buffer[:], workers[1].model.buffer[:] = 2.0, 4.0
    assert together(lambda: workers[0].train([1, 1]), lambda: workers[1].train([3, 3])) == [True, True]
    assert [one.model.x.item() for one in workers] == [4.0, 4.0]
    assert [one.model.buffer.item() for one in workers] == [3.0, 3.0]


def test_inner_steps_exchange_nothing() -> None:
    workers = [Worker(every=4) for _ in range(2)]
    world = enter(workers)
    world.abort()
    assert workers[0].train([1, 1, 1]) is False
    assert workers[0].outer.inner_steps == 3 and workers[0].outer.outer_steps == 0


def test_workers_count_by_their_samples() -> None:
    workers = [Worker(every=2, rule=OuterRule(1.0, 0.0)) for _ in range(2)]
    enter(workers)
    together(lambda: workers[0].train([2, 2], samples=3), lambda: workers[1].train([10, 10], samples=1))
    assert workers[0].model.x.item() == pytest.approx(0.75 * 4 + 0.25 * 20)


@pytest.mark.parametrize("samples", [2, 2.0, np.int64(2), np.float32(2)])
def test_samples_may_be_any_number(samples: Any) -> None:
    worker = Worker(every=1, rule=OuterRule(1.0, 0.0))
    enter([worker])
    assert worker.train([3], samples)
    assert worker.model.x.item() == 3


def test_without_samples_nothing_changes() -> None:
    workers = [Worker([5.0], every=1) for _ in range(2)]
    enter(workers)
    workers[0].model.buffer[:] = workers[1].model.buffer[:] = 7.0
    together(lambda: workers[0].train([np.nan], 0), lambda: workers[1].train([1], 0))
    assert [one.model.x.item() for one in workers] == [5.0, 5.0]
    assert workers[0].model.buffer.item() == 7.0


def test_the_length_may_depend_on_the_inner_steps() -> None:
    """Post-local SGD: averaged in each step at first."""
    worker = Worker(every=lambda inner_steps: 1 if inner_steps < 2 else 3)
    enter([worker])
    assert [worker.train([1]) for _ in range(5)] == [True, True, False, False, True]


def test_sync_makes_the_last_outer_step() -> None:
    worker = Worker(every=4, rule=OuterRule(1.0, 0.0))
    enter([worker])
    worker.train([1] * 6)
    assert worker.outer.sync() is True
    assert (worker.outer.inner_steps, worker.outer.outer_steps) == (6, 2)
    assert worker.outer.sync() is False, "there is nothing to add"


def test_a_commit_between_outer_steps_is_refused() -> None:
    worker = Worker(every=4)
    enter([worker])
    worker.outer.check_equal("commit()")
    worker.train([1])
    with pytest.raises(StateError, match=r"^commit\(\) after 1 of 4 inner steps.*or sync\(\) has returned True"):
        worker.outer.check_equal("commit()")


def test_workers_that_disagree_are_refused() -> None:
    workers = [Worker(every=2), Worker(every=3)]
    enter(workers)

    def fails(worker: Worker) -> str:
        with pytest.raises(StateError) as caught:
            worker.train([1, 1, 1])
        return str(caught.value)

    first, second = together(lambda: fails(workers[0]), lambda: fails(workers[1]))
    assert first == second
    assert "inner_steps is 3 on rank 1 and 2 on rank 0" in first


def test_a_survivor_keeps_its_inner_steps_and_a_new_worker_begins_in_the_middle() -> None:
    rule = OuterRule(1.0, 0.0)
    workers = [Worker(every=4, rule=rule) for _ in range(2)]
    enter(workers)
    together(*(lambda one=one: one.train([1] * 4) for one in workers))
    kept = workers[0].commit()
    survivor, new = workers[0], Worker([-50.0], every=4, rule=rule)
    survivor.train([1, 1])
    survivor.over = True
    with pytest.raises(RoundOver):
        survivor.train([1])
    enter([survivor, new], kept)
    assert survivor.model.x.item() == 7.0, "its progress is not lost"
    assert new.model.x.item() == 4.0, "from the last outer parameters"
    assert [one.outer.inner_steps for one in (survivor, new)] == [7, 7]
    assert together(lambda: survivor.train([1]), lambda: new.train([5])) == [True, True]
    assert survivor.model.x.item() == pytest.approx(4 + 0.8 * 4 + 0.2 * 5), "four inner steps against one"
    assert [one.outer.outer_steps for one in (survivor, new)] == [2, 2]


def test_a_loss_in_the_outer_step_costs_the_survivor_nothing() -> None:
    workers = [Worker(every=2, rule=OuterRule(1.0, 0.0)) for _ in range(2)]
    world = enter(workers)
    kept = workers[0].commit()
    world.abort()
    with pytest.raises(Lost):
        workers[0].train([1, 1])
    enter([workers[0]], kept)
    assert workers[0].model.x.item() == 2.0
    assert workers[0].train([1]) is True, "the outer step that was due follows after the next inner step"
    assert (workers[0].model.x.item(), workers[0].outer.inner_steps, workers[0].outer.outer_steps) == (3.0, 3, 1)


def test_an_outer_step_of_which_no_commit_is_left_is_made_again_by_all() -> None:
    worker = Worker(every=2)
    enter([worker])
    worker.train([1, 1])
    kept = worker.commit()
    worker.train([1, 1, 9])
    enter([worker], kept)
    assert worker.model.x.tobytes() == kept[0][0].tobytes(), "its inner steps belonged to what is gone"
    assert (worker.outer.inner_steps, worker.outer.outer_steps) == (2, 1)
    worker.outer.check_equal("commit()")


def test_progress_can_be_given_up() -> None:
    worker = Worker(every=4, keep=False)
    enter([worker])
    kept = worker.commit()
    worker.train([1, 1])
    enter([worker], kept)
    assert (worker.model.x.item(), worker.outer.inner_steps) == (0.0, 0)


def test_progress_outlives_a_restore_that_is_interrupted() -> None:
    worker = Worker(every=4)
    enter([worker])
    kept = worker.commit()
    worker.train([1, 1])
    worker.outer.before_restore({}, False)
    worker.model.set(kept[0])  # and then a peer is lost
    enter([worker], kept)
    assert (worker.model.x.item(), worker.outer.inner_steps) == (2.0, 2)


def test_a_job_without_a_commit_begins_from_the_first_worker() -> None:
    workers = [Worker([1.0]), Worker([2.0])]
    workers[1].outer._position = 3  # a survivor of a round without a commit
    enter(workers)
    assert [one.model.x.item() for one in workers] == [1.0, 1.0]
    assert [one.outer.inner_steps for one in workers] == [0, 0]


def test_the_outer_state_is_restored_bit_for_bit() -> None:
    random = np.random.default_rng(3)
    changes = random.normal(size=(6, 2)).tolist()
    values = random.normal(size=20).tolist()
    whole, first = Worker(values, every=2), Worker(values, every=2)
    for one in (whole, first):
        enter([one])
    for change in changes:
        whole.train(change)
    for change in changes[:3]:
        first.train(change)
    second = Worker([0.0] * 20, every=2)
    enter([second], first.commit())
    for change in changes[3:]:
        second.train(change)
    assert second.model.x.tobytes() == whole.model.x.tobytes()
    assert second.outer.state_dict()["momentum"]["x"].tobytes() == whole.outer.state_dict()["momentum"]["x"].tobytes()


def test_parameters_of_16_bits_have_an_outer_copy_of_32() -> None:
    """Outer updates below the resolution of 16 bits add up, and rounding is not taken for training."""
    worker = Worker([1000.0], every=1, rule=OuterRule(0.1, 0.0), half=True)
    enter([worker])
    for _ in range(10):
        worker.train([0.5])  # 0.05 each, where float16 has steps of 0.5
    assert worker.outer.state_dict()["masters"]["x"].item() == pytest.approx(1000.5, abs=1e-3)
    kept = worker.commit()
    new = Worker([0.0], every=1, rule=OuterRule(0.1, 0.0), half=True)
    enter([new], kept)
    new.train([0.0])
    assert new.outer.state_dict()["masters"]["x"].tobytes() == kept[1]["masters"]["x"].tobytes()


@pytest.mark.parametrize("every", [0, -1, 1.5, True, lambda inner_steps: 0])
def test_an_impossible_length_is_refused(every: Any) -> None:
    with pytest.raises(StateError, match="a whole number of inner steps, at least 1"):
        Worker(every=every)


@pytest.mark.parametrize("samples", [-1, float("nan"), float("inf"), "3"])
def test_an_impossible_number_of_samples_is_refused(samples: Any) -> None:
    worker = Worker()
    enter([worker])
    with pytest.raises(StateError, match=r"step\(samples="):
        worker.outer.step(samples)


def test_outside_of_run_or_of_the_state_it_is_refused() -> None:
    worker = Worker()
    worker.training = False
    with pytest.raises(StateError, match="in the function that run calls"):
        worker.outer.step()
    worker.training = True
    worker._objects = {}
    with pytest.raises(StateError, match="must be in its State"):
        worker.outer.sync()
