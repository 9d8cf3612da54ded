"""Mode geo: rows of a trainer's own, differences that are averaged over those that train."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edl.adapters.system_threads import SystemThreads
from edl.errors import PsError
from edl.job_records import Mode, Training
from ps.net.caller import FrameReply
from ps.protocol import messages
from ps.protocol.frames import FrameOp
from ps.spec import Optimizer, TableSpec, UpdateRule
from tests.support.ps_fixture import PLAIN, WIDE, Bench, Master
from tests.support.ps_stores import ZEROS

KEYS = np.arange(200)
GEO = Training(Mode.GEO, geo_steps=3)
FTRL = TableSpec("ftrl", 4, Optimizer(UpdateRule.FTRL, lr=0.1, initial_accumulator=0.1), ZEROS)
TWO = (messages.TrainerMember(1, "a/0"), messages.TrainerMember(2, "a/1"))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench((PLAIN, WIDE, TableSpec("ada", 4, Optimizer(UpdateRule.ADAGRAD, lr=0.5)), FTRL))
    yield made
    made.stop()


def batches(count: int, dim: int) -> list[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(3)
    return [(draw.integers(0, 60, 40), draw.standard_normal((40, dim)).astype(np.float32)) for _ in range(count)]


@pytest.mark.parametrize("table", ["wide", "ada"])
def test_one_trainer_that_exchanges_each_step_trains_as_without(bench: Bench, table: str) -> None:
    plain = bench.start(2).client()
    geo_bench = Bench(bench.tables).start(2)
    try:
        geo = geo_bench.client(training=replace(GEO, geo_steps=1))
        for keys, grads in batches(8, bench.pservers[1].tables[table].dim):
            assert np.allclose(geo.pull(table, keys), plain.pull(table, keys), atol=1e-5)
            plain.push({table: (keys, grads)})
            geo.push({table: (keys, grads)})
        assert np.allclose(geo.read(table, KEYS), plain.read(table, KEYS), atol=1e-5)
        assert geo.step == plain.step == 8
    finally:
        geo_bench.stop()


def test_pservers_hear_of_every_third_step(bench: Bench) -> None:
    client = bench.start(2).client(training=GEO)
    ones = np.ones((200, 4))
    for step in range(7):
        assert (client.pull("plain", KEYS) == -step).all()
        client.push({"plain": (KEYS, ones)})
        assert (client.read("plain", KEYS) == -((step + 1) // 3) * 3).all()
    pushes = bench.pservers[1].seen(FrameOp.PUSH)
    assert [(head["seq"], head["parts"][0][2]) for head in pushes] == [(1, "add"), (2, "add")]
    client.leave()
    assert (bench.client(number=2).read("plain", KEYS) == -7).all()


@pytest.mark.parametrize(("op", "expected"), [("assign", 5.0), ("first", -1.0), ("add", 4.0)])
def test_what_has_not_been_exchanged_survives_values_that_are_set(bench: Bench, op: str, expected: float) -> None:
    client = bench.start(2).client(training=GEO)
    client.pull("plain", KEYS)
    client.push({"plain": (KEYS, np.ones((200, 4)))})
    client.push({"wide": (KEYS[:5], np.zeros((5, bench.tables[1].dim)))}, op="add")  # nothing to the other table
    assert (client.read("plain", KEYS) == 0).all()
    client.push({"plain": (KEYS[:10], np.full((10, 4), 5.0))}, op=op)
    assert (client.pull("plain", KEYS[:10]) == expected).all() and (client.pull("plain", KEYS[10:]) == -1).all()


def test_differences_are_averaged(bench: Bench) -> None:
    one = bench.start(2).client(training=GEO, members=TWO)
    other = bench.client(number=2, training=GEO, members=TWO)
    for _ in range(3):
        for client, size in ((one, 1.0), (other, 3.0)):
            client.pull("plain", KEYS)
            client.push({"plain": (KEYS, np.full((200, 4), size))})
    assert (bench.client(number=3).read("plain", KEYS) == -6).all()
    # Whoever was first takes the other's with the next exchange, or when it asks for a row that it has not used since.
    assert (other.pull("plain", KEYS) == -6).all() and (one.pull("plain", KEYS) == -1.5).all()


def test_a_trainer_that_is_new_to_a_row_of_ftrl_goes_on_from_its_weights(bench: Bench) -> None:
    bench.start(1)
    assert bench.pservers[1].tables["ftrl"].optimizer.rule is UpdateRule.FTRL
    one = bench.client(training=GEO)
    for _ in range(9):
        one.push({"ftrl": (KEYS, np.full((200, 4), -1.0))})
    before = one.read("ftrl", KEYS)
    assert before.min() > 0.3
    other = bench.client(number=2, training=GEO)
    for _ in range(3):
        other.push({"ftrl": (KEYS, np.full((200, 4), -0.01))})
    after = other.read("ftrl", KEYS)
    assert (after > before).all() and (after < before + 0.1).all()


def test_members_may_change_in_between(bench: Bench) -> None:
    bench.start(1)
    master = Master(bench, GEO)
    client = bench.joined(master)
    client.begin()
    ones = np.ones((200, 4))
    for _ in range(2):
        client.pull("plain", KEYS)
        client.push({"plain": (KEYS, ones)})
    master.members = (*master.members, *TWO, messages.TrainerMember(9, "b/0"))
    master.tell(master.placement_update())
    client.push({"plain": (KEYS, ones)})
    assert (client.read("plain", KEYS) == -0.75).all()
    assert (client.pull("plain", KEYS) == -0.75).all()


def test_rows_that_were_not_used_since_the_last_exchange_are_fetched_again(bench: Bench) -> None:
    client = bench.start(1).client(training=GEO)
    other = bench.client(number=2)
    assert not client.pull("plain", [1, 2]).any()
    for _ in range(3):
        client.push({"plain": ([1], np.ones((1, 4)))})
    other.push({"plain": ([1, 2], np.ones((2, 4)))})
    assert (client.pull("plain", [1, 2])[:, 0] == [-3, -1]).all()
    for _ in range(3):
        client.push({"plain": ([1], np.ones((1, 4)))})
    assert (client.pull("plain", [1, 2])[:, 0] == [-7, -1]).all()


def test_a_gradient_for_a_row_that_was_never_pulled(bench: Bench) -> None:
    client = bench.start(1).client(training=GEO)
    first = client.read("wide", KEYS)
    for _ in range(3):
        client.push({"wide": (KEYS, np.ones((200, 9)))})
    assert np.allclose(client.read("wide", KEYS), first - 3, atol=1e-5)


@pytest.mark.parametrize("table", ["plain", "wide"])
def test_rows_that_come_with_a_push_are_the_trainer_s_own(bench: Bench, table: str) -> None:
    client = bench.start(1).client(training=GEO)
    rows = client.pull(table, KEYS)
    for step in range(4):
        before = client.pull(table, KEYS)
        rows = client.push_and_pull({table: (KEYS, np.ones_like(before))}, [table])[table]
        assert np.allclose(rows, before - 1, atol=1e-5), step
    client.rest()
    assert np.allclose(client.read(table, KEYS), rows, atol=1e-5)


def test_values_given_outside_of_steps_and_rest(bench: Bench) -> None:
    client = bench.start(1).client(training=GEO)
    client.pull("plain", KEYS)
    client.assign("plain", KEYS, np.full((200, 4), 5.0))
    assert (client.pull("plain", KEYS) == 5).all()
    client.push({"plain": (KEYS, np.ones((200, 4)))})
    client.rest()
    assert (client.read("plain", KEYS) == 4).all() and (client.pull("plain", KEYS, insert=False) == 4).all()


def test_the_learning_rate_of_a_trainer_s_own_optimizer(bench: Bench) -> None:
    client = bench.start(1).client(training=replace(GEO, geo_steps=1))
    client.set_lr(0.5)
    client.push({"plain": (KEYS, np.ones((200, 4)))})
    client.set_lr(0.25, "plain")
    client.push({"plain": (KEYS, np.ones((200, 4)))})
    assert (client.read("plain", KEYS) == -0.75).all()


def test_a_change_is_added_once_though_the_fetch_after_it_fails(bench: Bench) -> None:
    client = bench.start(1).client(training=replace(GEO, geo_steps=1))
    client.pull("plain", KEYS)
    bench.pservers[1].faults.append(
        lambda frame, head: (
            FrameReply.no(FrameOp.REFUSED, kind="memory", text="full") if frame.op is FrameOp.PULL else None
        )
    )
    with pytest.raises(PsError, match="full"):
        client.push({"plain": (KEYS, np.ones((200, 4)))})
    bench.pservers[1].faults.clear()
    client.push({"plain": (KEYS, np.ones((200, 4)))})
    assert (client.read("plain", KEYS) == -2).all()


def test_begin_fetches_rows_that_others_have_set_since(bench: Bench) -> None:
    client = bench.start(2).client(training=GEO)
    assert (client.pull("plain", KEYS) == 0).all()
    bench.client(number=2).assign("plain", KEYS, np.full((200, 4), 5.0))
    client.begin()
    assert (client.pull("plain", KEYS) == 5).all()


def test_the_last_exchange_needs_no_new_thread(bench: Bench) -> None:
    """Python 3.12.0 to 3.12.2 starts none while the interpreter exits."""

    class Exiting(SystemThreads):
        def start(self, target: Callable[..., object], *arguments: Any, name: str) -> threading.Thread:
            raise RuntimeError("can't create new thread at interpreter shutdown")

    client = bench.start(2).client(training=GEO)
    client.pull("plain", KEYS)
    client.push({"plain": (KEYS, np.ones((200, 4)))})
    client._core.pool.threads = Exiting()
    client.leave()
    assert (bench.client(number=2).read("plain", KEYS) == -1).all()
