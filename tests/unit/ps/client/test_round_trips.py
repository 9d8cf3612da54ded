"""Round trips per step: one for all rows, one with all gradients; the same numbers as one by one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edl.worker import session as sessions
from ps.client.frontend import PsContext, part
from ps.optimizers import SGD
from ps.protocol.frames import FrameOp
from ps.protocol.requests import push as pushed
from ps.rows import TablePush as Pushed
from ps.spec import Damaged, Initial, InitMethod, Optimizer, TableSpec, UpdateRule
from tests.support.ps_fixture import Bench
from tests.support.ps_servers import ALL, Boss, Plan, Trainer, place, server, tidy
from tests.unit.ps.client.test_frontend import Vector

ZEROS = Initial(InitMethod.ZEROS)
USERS = TableSpec("users", 4, Optimizer(UpdateRule.SGD, lr=0.5), ZEROS)
WORDS = TableSpec("words", 2, Optimizer(UpdateRule.SGD, lr=0.5), ZEROS)
FRONTENDS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("torch", "paddle")]


@pytest.fixture
def bench() -> Iterator[Bench]:
    dense = TableSpec("dense", 7, Optimizer(UpdateRule.SGD, lr=0.5), Initial(InitMethod.UNIFORM), dense=True, rows=1)
    made = Bench((USERS, WORDS, dense)).start(1)
    yield made
    made.stop()


def requests(bench: Bench) -> list[str]:
    """Those of one pserver since the last call: each is a round trip."""
    heads = bench.pservers[1].heads
    found = [f"{op.name} " + " ".join(str(one[0]) for one in head["parts"]) for op, head in heads]
    heads.clear()
    return found


def joined(bench: Bench, wire: str = "f4") -> tuple[PsContext, Vector]:
    """A script's part, with two embeddings and a dense module."""
    mine, vector = PsContext(lambda plan, specs: bench.client(wire=wire)), Vector()
    mine.declare(USERS)
    mine.declare(WORDS)
    mine.declare_dense(vector, SGD(0.5), Damaged.REFUSE)
    mine.lookup([("users", np.arange(3), True)])
    requests(bench)
    return mine, vector


@pytest.mark.parametrize("wire", ["f4", "f2"])
def test_a_step_is_one_pull_and_one_push(bench: Bench, wire: str) -> None:
    mine, vector = joined(bench, wire)
    before = {name: value.copy() for name, value in vector.values.items()}
    users, words = np.array([[1, 2], [2, 2]]), np.arange(5)
    found = mine.lookup([("users", users, True), ("words", words, True), ("users", words, True)])
    rows = [one.spread() for one in found]
    assert [one.shape for one in rows] == [(2, 2, 4), (5, 2), (5, 4)]
    for table, keys in (("users", users), ("words", words)):
        mine.collect(table, keys, np.ones((keys.size, 4 if table == "users" else 2), np.float32))
    vector.grads = {name: np.ones_like(value) for name, value in vector.values.items()}
    mine.step()
    assert requests(bench) == ["PULL users words", "PUSH users words dense"]
    for name, value in vector.values.items():
        np.testing.assert_allclose(value, before[name] - 0.5, atol=1e-3)
    looked = mine.lookup([("users", np.array([1, 2, 3]), False), ("words", np.array([0, 9]), False)])
    after = [one.spread() for one in looked]
    assert after[0][:, 0].tolist() == [-0.5, -1.5, 0.0] and after[1][:, 0].tolist() == [-0.5, 0.0]
    mine.leave()


def test_dense_values_that_are_not_pushed_or_not_due_are_fetched_as_before(bench: Bench) -> None:
    mine, vector = joined(bench)
    vector.grads = None
    mine.step()
    assert requests(bench) == ["PULL dense"], "nothing to push"
    vector.every = 3
    for due in (False, True):  # the second step and the third
        vector.grads = {name: np.ones_like(value) for name, value in vector.values.items()}
        held = vector.values["a"].copy()
        mine.step()
        assert requests(bench) == ["PUSH dense"]
        assert bool((vector.values["a"] != held).all()) is due
    mine.leave()


def test_rows_that_come_back_follow_their_bucket(bench: Bench) -> None:
    client = bench.client()
    bench.add(2)
    bench.move(slice(None), 2)
    keys = np.array([[5, 6], [5, 7]])
    found = client.push_and_pull({"users": (keys, np.ones((2, 2, 4), np.float32))}, ["users", "words"])
    assert list(found) == ["users"] and found["users"].shape == (4, 4)
    assert found["users"][:, 0].tolist() == [-1.0, -0.5, -1.0, -0.5]


def test_a_push_that_is_repeated_is_answered_with_rows_and_applied_once(bench: Bench) -> None:
    client, faults = bench.client(), bench.pservers[1].after
    lost: list[Any] = []

    def lose(frame: Any, head: Any) -> None:
        if frame.op is FrameOp.PUSH and not lost:
            lost.append(head)
            for peer in bench.pservers[1].endpoint.peers:
                peer.hang_up()

    faults.append(lose)
    found = client.push_and_pull({"users": (np.arange(3), np.ones((3, 4), np.float32))}, ["users"])
    assert lost and (found["users"] == -0.5).all()
    assert client.statistics["again"] == 3


def test_a_pserver_answers_a_push_with_rows() -> None:
    try:
        one = server()
        boss, trainer = Boss(place(one)), Trainer(place(one))
        boss.say(Plan({1: place(one)}, {1: ALL}).orders(1))
        keys = np.array([4, 4, 9])
        heads, body = pushed([Pushed("counts", keys, np.ones((3, 2), np.float32)),
                              Pushed("sgd", keys[:1], np.ones((1, 4), np.float32))])  # fmt: skip
        head = {"trainer": 1, "seq": 1, "step": 0, "parts": heads, "back": [["counts", "f2"]]}
        for _ in range(2):  # the second time it is known
            answer = trainer.ask(FrameOp.PUSH, head, body)
            assert answer.op is FrameOp.OK
            assert np.frombuffer(answer.body, np.float16, 6).tolist() == [2, 2, 2, 2, 1, 1]
        bad = trainer.ask(FrameOp.PUSH, {**head, "back": [["counts"]]}, body)
        assert bad.op is FrameOp.REFUSED and "back" in bad.json()["text"]
    finally:
        tidy()


@pytest.mark.parametrize("framework", FRONTENDS)
def test_lookup_gives_what_embeddings_give_one_by_one(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(framework)
    ps: Any = importlib.import_module(f"edl.{framework}.ps")
    made: Any = importlib.import_module(framework)
    monkeypatch.setattr(sessions, "_current", None)
    part.forget()
    ps.init(local=True)
    try:
        users = ps.Embedding("users", 4, optimizer=ps.SGD(0.5), initial=ps.Normal(1.0))
        words = ps.Embedding("words", 2, optimizer=ps.SGD(0.5), initial=ps.Normal(1.0), combiner="sum")
        tensor = made.tensor if framework == "torch" else made.to_tensor
        one, two = tensor([3, 1, 3]), tensor([[1, 2], [7, 1]])
        expected = [users(one), words(two), users(two)]
        local: Any = ps.client()
        trips: list[list[str]] = []
        pull_distinct = local.pull_distinct

        def counted(keys: Any, **how: Any) -> Any:
            trips.append(list(keys))
            return pull_distinct(keys, **how)

        monkeypatch.setattr(local, "pull_distinct", counted)
        found = ps.lookup((users, one), (words, two), (users, two))
        assert trips == [["users", "words"]]
        for mine, other in zip(found, expected, strict=True):
            assert np.array_equal(mine.detach().numpy(), other.detach().numpy())
        total = found[0].sum() + 2 * found[1].sum() + found[2].sum()
        total.backward()
        ps.step()
        users.eval()
        words.eval()
        trips.clear()
        after = ps.lookup((users, tensor([3, 1, 99])), (words, tensor([[7, 7]])))
        assert trips == [["users", "words"]] and local.store.rows("users") == 4
        moved = np.asarray(after[0].numpy())[:2] - np.asarray(expected[0].detach().numpy())[:2]
        np.testing.assert_allclose(moved, [[-1.0] * 4, [-1.5] * 4], atol=1e-5)
    finally:
        part.forget()
