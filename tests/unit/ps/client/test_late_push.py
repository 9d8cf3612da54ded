"""Steps that do not wait: the push is on its way while the next batch is pulled. What counts, and what must wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from data_service.loader import trainers
from edl.errors import PsError
from edl.job_records import Mode, Training
from ps.client.frontend import PsContext
from ps.net.caller import FrameReply
from ps.optimizers import SGD
from ps.protocol import messages
from ps.protocol.frames import Frame, FrameOp, pack_head
from ps.spec import Damaged, Initial, InitMethod, Optimizer, TableSpec, UpdateRule
from tests.support.ps_fixture import WAIT_S, Bench
from tests.unit.ps.client.test_frontend import Vector

USERS = TableSpec("users", 2, Optimizer(UpdateRule.SGD, lr=0.5), Initial(InitMethod.ZEROS))
KEYS = np.arange(3)


@pytest.fixture
def bench() -> Iterator[Bench]:
    dense = TableSpec("dense", 7, Optimizer(UpdateRule.SGD, lr=0.5), Initial(InitMethod.UNIFORM), dense=True, rows=1)
    made = Bench((USERS, dense)).start(2)
    yield made
    made.stop()


class Batches:
    """A data set in independent mode that only counts."""

    name, used, held, redoing, handed_out = "clicks", True, True, False, 0

    def __init__(self) -> None:
        self.counted: list[int | None] = []
        self.settled = 0
        self.records: tuple[str, tuple[int, int] | None] = ("these", None)

    def done(self, upto: int | None = None) -> None:
        self.counted.append(upto)

    def settle(self) -> None:
        self.settled += 1


class Script:
    """A trainer's script, one batch after another; its pushes are answered when ``open`` is set."""

    def __init__(self, bench: Bench, training: Training | None = None) -> None:
        self.bench, self.open, self.intents = bench, threading.Event(), 0
        members = (messages.TrainerMember(1, "a/0", 0),)
        self.part = PsContext(lambda plan, specs: bench.client(training=training, members=members))
        self.vector = Vector()
        self.part.declare(USERS)
        self.part.declare_dense(self.vector, SGD(0.5), Damaged.REFUSE)
        self.data = Batches()
        self.open.set()
        self.rows()
        trainers.trainers.add(self.data)  # type: ignore[arg-type]
        for one in bench.pservers.values():
            one.faults.append(self.fault)

    def fault(self, frame: Frame, head: Mapping[str, Any]) -> FrameReply | None:
        if frame.op is FrameOp.INTENT:
            self.intents += 1
            return FrameReply(FrameOp.OK, pack_head({}))
        if frame.op is FrameOp.PUSH:
            assert self.intents, "first the intent"
            self.open.wait(WAIT_S)
        return None

    def rows(self) -> Any:
        return self.part.lookup([("users", KEYS, True)])[0].spread()

    def train(self, wait: bool = False) -> None:
        """A step with gradients of ones."""
        self.data.handed_out += 1
        self.part.collect("users", KEYS, np.ones((3, 2), np.float32))
        self.vector.grads = {name: np.ones_like(value) for name, value in self.vector.values.items()}
        self.part.step(wait)


def test_the_next_pull_overtakes_the_push(bench: Bench) -> None:
    script = Script(bench)
    before = script.vector.values["a"].copy()
    script.open.clear()
    script.train()
    assert (script.rows() == 0).all() and script.data.counted == []
    assert (script.vector.values["a"] == before).all(), "between forward and backward dense values do not change"
    script.open.set()
    script.train()  # waits for the first
    assert script.data.counted[0] == 1
    np.testing.assert_allclose(script.vector.values["a"], before - 0.5)
    script.part.refresh()
    assert script.data.counted == [1, 2]
    assert (script.rows() == -1).all()
    np.testing.assert_allclose(script.vector.values["a"], before - 1)
    assert script.intents == 2 and script.part.client.step == 2


@pytest.mark.parametrize("training", [Training(mode=Mode.SYNC), Training(mode=Mode.GEO), Training(staleness=2)])
def test_other_modes_wait(bench: Bench, training: Training) -> None:
    script = Script(bench, training)
    script.intents = 1  # mode geo has none
    script.train()
    assert script.data.counted == [None]


def test_a_repeated_push_waits(bench: Bench) -> None:
    script = Script(bench)
    script.intents, script.data.records = 1, ("", (9, 4))
    script.train()
    assert script.data.counted == [None]


def test_what_is_on_its_way_counts_before_a_checkpoint_a_pause_and_the_end(bench: Bench) -> None:
    script = Script(bench)
    held = script.vector.values["a"].copy()
    script.train()
    script.data.handed_out += 1  # the next batch, which is not pushed yet
    script.part._settle()
    assert script.data.counted == [1] and script.data.settled == 1
    assert (script.vector.values["a"] == held).all(), "a checkpoint may be taken in the middle of a batch"
    script.train()
    script.part.rest()
    assert script.data.counted == [1, 3]
    script.train()
    script.part.leave()
    assert script.data.counted == [1, 3, 4]


def test_a_data_set_that_is_closed_waits_for_what_is_on_its_way(bench: Bench) -> None:
    script = Script(bench)
    trainers.trainers.land()
    script.train()
    script.data.handed_out += 1  # not pushed, and not this one's any more
    trainers.trainers.land()
    assert script.data.counted == [1] and script.part.client.step == 1
    script.train(wait=True)


def test_the_data_set_does_not_push_again_what_is_on_its_way(bench: Bench) -> None:
    """It asks for a push before it waits for other trainers."""
    script = Script(bench)
    script.train()
    trainers.trainers.push()
    assert script.data.counted == [1] and script.part.client.step == 1
    script.data.handed_out += 1
    script.part.collect("users", KEYS, np.ones((3, 2), np.float32))
    trainers.trainers.push()
    assert script.data.counted == [1, None] and script.part.client.step == 2
    assert (script.rows() == -1).all()


def test_an_error_comes_with_one_of_the_next_calls(bench: Bench) -> None:
    script = Script(bench)
    for one in bench.pservers.values():
        one.faults.insert(
            0, lambda frame, head: FrameReply.no(FrameOp.REFUSED, text="broken") if frame.op is FrameOp.PUSH else None
        )
    script.train()
    with pytest.raises(PsError, match="broken"):
        script.train()
    assert script.data.counted == []
    with pytest.raises(PsError, match="broken"):
        script.part.leave()


def test_distinct_rows_come_from_prefetching_and_in_mode_geo(bench: Bench) -> None:
    keys = np.array([[2, 0], [2, 2]])
    for training in (Training(), Training(mode=Mode.GEO)):
        client = bench.client(training=training, members=(messages.TrainerMember(1, "a/0", 0),))
        client.assign("users", KEYS, np.arange(6, dtype=np.float32).reshape(3, 2))
        client.prefetch("users", keys)
        united, rows = client.pull_distinct({"users": keys})["users"]
        assert sorted(united.keys.tolist()) == [0, 2] and united.inverse is not None
        assert rows[united.inverse].tolist() == [[4, 5], [0, 1], [4, 5], [4, 5]]
        assert client.statistics["prefetched"] == (4 if training.mode is Mode.ASYNC else 0)
