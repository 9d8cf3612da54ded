"""Rows of a layer and its optimizer are kept by each rank, and restored in a world of any size."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("paddle") is None:
    pytest.skip("paddle is not installed", allow_module_level=True)

import paddle

from edl.checkpoint.reading.saved_parts import ByteRange, SavedParts
from edl.errors import CheckpointError, StateError
from edl.paddle.sharding import group_sharded_parallel
from edl.paddle.shards import LEVELS, of
from edl.paddle.state import State
from edl.wire import snapshot
from edl.wire.snapshot import Meta, SnapshotHeader
from tests.support.paddle_ranks import PaddleWorld, world
from tests.unit.edl.paddle.test_sharding import OPTIMIZERS, Scaled, assert_equal, batch, loss, trained

pytestmark = [pytest.mark.paddle, pytest.mark.filterwarnings("ignore")]
nn: Any = paddle.nn
optim: Any = paddle.optimizer


class Written(SavedParts):
    """The parts of a commit, as the ranks wrote them."""

    def __init__(self, parts: Sequence[bytearray]) -> None:
        super().__init__("the commit", len(parts))
        self._data = [memoryview(part) for part in parts]

    def _header(self, shard: int) -> SnapshotHeader:
        return snapshot.parse(self._data[shard])

    def _read(self, reads: Mapping[int, Sequence[ByteRange]]) -> None:
        for shard, ranges in reads.items():
            for one in ranges:
                one.take(self._data[shard][one.start : one.start + one.size])


class Trainer:
    """One rank's objects."""

    def __init__(self, level: str, name: str = "Adam", value: float = 0.0) -> None:
        self.layer = Scaled()
        random = np.random.default_rng(7)
        for parameter in self.layer.parameters():
            parameter.set_value(np.asarray(random.standard_normal(parameter.shape) + value, "float32"))
        self.model, self.optimizer, _ = group_sharded_parallel(self.layer, OPTIMIZERS[name](self.layer), level)
        self.state = State(model=self.layer, optimizer=self.optimizer, sharded=True, step=0)

    def train(self, rank: int, size: int, until: int) -> None:
        while self.state.step < until:
            loss(self.model, batch(self.state.step)[rank::size]).backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
            if isinstance(self.optimizer._learning_rate, optim.lr.LRScheduler):
                self.optimizer._learning_rate.step()
            self.state.step += 1

    def written(self, rank: int, size: int) -> bytearray:
        memory = bytearray()

        def room(length: int) -> memoryview:
            memory.extend(bytes(length))
            return memoryview(memory)

        self.state._write("state", Meta("job", 1, 1, 1, rank, size, "paddle", size), room)
        return memory

    def restore(self, parts: Sequence[bytearray]) -> None:
        self.state._load_parts(Written(parts))
        self.gather()

    def restore_own(self, data: bytearray) -> None:
        view = memoryview(data)
        self.state._load(snapshot.parse(view), view, frozenset(self.state._objects))
        self.gather()

    def gather(self) -> None:
        shards = of(self.layer)
        if shards is not None and shards.level != "p_g_os":
            shards.gather()

    def weights(self) -> dict[str, Any]:
        self.model.get_all_parameters()
        return {name: value.numpy() for name, value in self.layer.state_dict().items()}


def begun(there: PaddleWorld, level: str, name: str = "Adam", steps: int = 2) -> list[bytearray]:
    """What the ranks of a world commit after some steps."""
    size = len(there.rings)

    def each(rank: int) -> bytearray:
        trainer = Trainer(level, name)
        trainer.train(rank, size, steps)
        return trainer.written(rank, size)

    return there.each(each)


def gone_on(there: PaddleWorld, parts: Sequence[bytearray], level: str, name: str = "Adam") -> list[dict[str, Any]]:
    """The weights after two more steps in another world, by objects that began with other values."""
    size = len(there.rings)

    def each(rank: int) -> dict[str, Any]:
        trainer = Trainer(level, name, value=rank + 1.0)
        trainer.restore(parts)
        assert trainer.state.step == 2
        trainer.train(rank, size, 4)
        return trainer.weights()

    return there.each(each)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (1, 2), (3, 1)])
def test_a_world_of_another_size_goes_on(level: str, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    with world(sizes[0], monkeypatch) as before:
        parts = begun(before, level)
    with world(sizes[1], monkeypatch) as after:
        assert_equal(gone_on(after, parts, level), trained(OPTIMIZERS["Adam"]))


@pytest.mark.parametrize("name", ["SGD", "Momentum", "Adamax", "NAdam", "groups", "schedule", "ranks without rows"])
def test_the_state_of_every_kind_of_optimizer_is_cut_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(2, monkeypatch) as before:
        parts = begun(before, "os", name)
    with world(3, monkeypatch) as after:
        assert_equal(gone_on(after, parts, "os_g", name), trained(OPTIMIZERS[name]))


@pytest.mark.parametrize("level", LEVELS)
def test_a_process_that_stays_goes_back_and_into_other_worlds(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same objects: a step is undone by the rank's own part, then a smaller and a larger world begin."""
    trainers: dict[int, Trainer] = {}

    def first(rank: int) -> bytearray:
        trainer = trainers[rank] = Trainer(level)
        trainer.train(rank, 2, 2)
        data = trainer.written(rank, 2)
        trainer.train(rank, 2, 3)
        loss(trainer.model, batch(9)[rank::2]).backward()  # an interrupted step
        trainer.restore_own(data)
        trainer.train(rank, 2, 3)
        return trainer.written(rank, 2)

    def alone(parts: list[bytearray]) -> bytearray:
        trainers[0].restore(parts)
        trainers[0].train(0, 1, 4)
        return trainers[0].written(0, 1)

    def last(rank: int, parts: list[bytearray]) -> dict[str, Any]:
        trainer = trainers.get(rank) or Trainer(level, value=1.0)
        trainer.restore(parts)
        trainer.train(rank, 3, 5)
        return trainer.weights()

    with world(2, monkeypatch) as there:
        parts = there.each(first)
    with world(1, monkeypatch) as there:
        parts = there.each(lambda rank: alone(parts))
    with world(3, monkeypatch) as there:
        assert_equal(there.each(lambda rank: last(rank, parts)), trained(OPTIMIZERS["Adam"], 5))


@pytest.mark.parametrize("level", LEVELS)
def test_before_the_first_step_all_is_whole_and_rank_0_counts(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that ends before its first commit: each rank goes on with what it began with, in another world."""

    def first(rank: int) -> tuple[Trainer, bytearray]:
        trainer = Trainer(level, value=float(rank))
        data = trainer.written(rank, 2)
        trainer.train(rank, 2, 1)
        return trainer, data

    def again(rank: int, kept: tuple[Trainer, bytearray]) -> dict[str, Any]:
        trainer, data = kept
        trainer.restore_own(data)
        assert trainer.state.step == 0
        trainer.train(rank, 1, 4)
        return trainer.weights()

    with world(2, monkeypatch) as there:
        begun_ = there.each(first)
    with world(1, monkeypatch) as there:
        assert_equal(there.each(lambda rank: again(rank, begun_[rank])), trained(OPTIMIZERS["Adam"]))
    with world(2, monkeypatch) as there:
        begun_ = there.each(first)
    with world(3, monkeypatch) as there:
        extra = Trainer(level, value=9.0)
        kept = [*begun_, (extra, extra.written(2, 3))]

        def three(rank: int) -> dict[str, Any]:
            trainer: Trainer = kept[rank][0]
            trainer.restore_own(kept[rank][1])
            trainer.train(rank, 3, 4)
            return trainer.weights()

        assert_equal(there.each(three), trained(OPTIMIZERS["Adam"]))


def test_a_part_holds_the_ranks_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in LEVELS:
        with world(3, monkeypatch) as there:
            sizes = [len(part) for part in begun(there, level)]
        with world(1, monkeypatch) as there:
            (whole,) = (len(part) for part in begun(there, level))
        headers = 6_000
        assert max(sizes) < whole / 3 + headers, (level, sizes, whole)


def test_a_commit_of_another_model_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with world(2, monkeypatch) as before:
        parts = begun(before, "os")

    class Wider(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 8)

    def each(rank: int) -> None:
        layer = Wider()
        _, optimizer, _ = group_sharded_parallel(layer, OPTIMIZERS["Adam"](layer), "os")
        state = State(model=layer, optimizer=optimizer, sharded=True, step=0)
        with pytest.raises(CheckpointError, match=r"state.model does not fit.*saved as \[5, 7\], now \[5, 8\]"):
            state._load_parts(Written(parts))

    with world(1, monkeypatch) as there:
        there.each(each)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_commit_of_another_type_does_not_fit(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With whole parameters, before the first step, and with rows."""

    def first(rank: int) -> bytearray:
        trainer = Trainer("os")
        trainer.train(rank, 2, steps)
        return trainer.written(rank, 2)

    def second(rank: int) -> None:
        layer = Scaled().to(dtype="float64")
        _, optimizer, _ = group_sharded_parallel(layer, OPTIMIZERS["Adam"](layer), "os")
        state = State(model=layer, optimizer=optimizer, sharded=True, step=0)
        with pytest.raises(
            CheckpointError, match=r"state.model does not fit.* saved as float32, now float64: build it"
        ):
            state._load_parts(Written(parts))

    with world(2, monkeypatch) as there:
        parts = there.each(first)
        there.each(second)


def test_what_ranks_compare_leaves_out_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def each(rank: int) -> Any:
        trainer = Trainer("os")
        trainer.train(rank, 3, 1)
        held = trainer.state._held()
        return held.tree, [path for path, _ in held.leaves]

    with world(3, monkeypatch) as there:
        found = there.each(each)
    assert found[0] == found[1] == found[2]
    assert set(found[0][1]) == {"model.unused"} or not found[0][1]


def test_a_state_says_what_it_needs() -> None:
    layer = Scaled()
    with pytest.raises(StateError, match="nothing in this state is sharded"):
        State(model=layer, sharded=True)
    _, optimizer, _ = group_sharded_parallel(layer, OPTIMIZERS["Adam"](layer), "os")
    with pytest.raises(StateError, match=r"state.model is sharded.*pass sharded=True"):
        State(model=layer, step=0)
    with pytest.raises(StateError, match="needs its model in the same State"):
        State(optimizer=optimizer, sharded=True)
