"""A pserver over real sockets: answers, refusals and their texts, and waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edl.job_records import Mode, Training
from ps.errors import Denied
from ps.hashing import bucket_of, buckets_of
from ps.protocol import messages
from ps.protocol.frames import FrameOp
from ps.protocol.half_precision import decode_half
from ps.protocol.requests import Wanted, pull
from ps.rows import decode
from ps.server.server import ParameterServer
from ps.spec import BUCKETS, Damaged, Eviction, Initial, InitMethod, Optimizer, TableSpec, UpdateRule
from tests.support.ps_servers import ALL, COUNTS, SGD, At, Boss, Plan, Trainer, place, server, tidy, until

Made = Callable[..., tuple[ParameterServer, Boss, Plan]]


@pytest.fixture(autouse=True)
def tidied() -> Iterator[None]:
    """Close what the test left open."""
    yield
    tidy()


@pytest.fixture
def made() -> Made:
    """One pserver that owns all buckets."""

    def make(plan: dict[str, Any] | None = None, **setup: Any) -> tuple[ParameterServer, Boss, Plan]:
        one = server(**setup)
        first = Plan({1: place(one)}, {1: ALL}, **(plan or {}))
        boss = Boss(place(one))
        boss.say(first.orders(1))
        return one, boss, first

    return make


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls in parallel and return their results."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def test_pushes_are_added_up_and_pulled(made: Made) -> None:
    one, _, _ = made()
    trainer = Trainer(place(one))
    keys = [3, -7, 3, 1 << 62]
    assert not trainer.pull(COUNTS, keys).any()
    answer = trainer.push(1, COUNTS, keys, 1.0)
    assert (answer.op, answer.head["fresh"], answer.head["again"]) == (FrameOp.OK, 4, 0)
    assert trainer.pull(COUNTS, keys).tolist() == [[2, 2], [1, 1], [2, 2], [1, 1]]
    assert answer.head["applied"] == 1 and answer.head["step"] == 1
    load = one.load()
    assert (load.rows, load.pulls, load.pushes, load.top_step) == (3, 2, 1, 1)
    assert dict(load.hot)[bucket_of(3)] == 6


def test_over_tcp_too(made: Made) -> None:
    one, _, _ = made()
    trainer = Trainer(replace(place(one), path=""))
    assert trainer.push(1, COUNTS, range(10_000)).op is FrameOp.OK
    assert trainer.pull(COUNTS, range(10_000)).min() == 1


def test_what_was_applied_is_not_applied_again(made: Made) -> None:
    one, _, _ = made()
    trainer = Trainer(place(one))
    assert trainer.push(5, COUNTS, [1, 2]).head["fresh"] == 2
    again = trainer.push(5, COUNTS, [1, 2, 99])
    assert again.head["again"] == 2 and again.head["fresh"] == 1
    assert trainer.push(4, COUNTS, [1]).head["again"] == 1
    assert trainer.pull(COUNTS, [1, 2, 99])[:, 0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.SYNC])
def test_a_push_that_comes_over_two_connections_at_once(made: Made, mode: Mode) -> None:
    one, _, _ = made({"training": Training(mode), "members": (1,)})
    first, second = Trainer(place(one)), Trainer(place(one))
    keys = list(range(2000))
    for seq in range(1, 11):
        answers = in_threads(lambda: first.push(seq, COUNTS, keys), lambda: second.push(seq, COUNTS, keys))  # noqa: B023
        assert {answer.op for answer in answers} == {FrameOp.OK}
    rows = first.pull(COUNTS, keys)
    assert rows.min() == rows.max() == 10


def test_a_push_that_waits_twice_for_others_counts_once(made: Made) -> None:
    one, _, _ = made({"training": Training(Mode.SYNC), "members": (1, 2)})
    twice = [Trainer(place(one), 1), Trainer(place(one), 1)]
    results: list[Any] = []
    waiting = threading.Thread(
        target=lambda: results.extend(
            in_threads(
                lambda: twice[0].push(1, COUNTS, [1, 2], step=0), lambda: twice[1].push(1, COUNTS, [1, 2, 3], step=0)
            )
        )
    )
    waiting.start()
    barrier = one.handlers.barrier
    until(barrier._changed, lambda: len(barrier._waiters) == 2)
    assert Trainer(place(one), 2).push(1, COUNTS, [1], step=0).op is FrameOp.OK
    waiting.join(30)
    assert [answer.op for answer in results] == [FrameOp.OK, FrameOp.OK]
    first = twice[0].pull(COUNTS, [1, 2, 3], step=1)[:, 0].tolist()
    assert first[:2] == [2.0, 1.0], "its own bucket once, whichever of the two was first"


def test_narrow_rows(made: Made) -> None:
    one, _, _ = made()
    trainer = Trainer(place(one))
    assert trainer.push(1, SGD, [1, 2, 3], -1.5, dtype="f2").op is FrameOp.OK
    assert trainer.push(2, SGD, [1, 2], -0.25, dtype="bf16").op is FrameOp.OK
    assert trainer.pull(SGD, [1, 3], "f2").tolist() == [[1.75] * 4, [1.5] * 4]
    upper = trainer.pull(SGD, [1, 3, 5], "bf16")
    out = np.empty(upper.shape, np.float32)
    decode_half(upper, "bf16", out)
    assert out[:, 0].tolist() == [1.75, 1.5, 0.0]


def test_several_tables_in_one_request(made: Made) -> None:
    one, _, _ = made()
    trainer = Trainer(place(one))
    trainer.push(1, SGD, [7], -2.0)
    counted = np.array([5, 1, 1], np.uint32)
    wanted = [
        Wanted("counts", np.array([1, 2, 3], np.int64), "f2", 2, counted),
        Wanted("sgd", np.array([7], np.int64), "f4", 4),
    ]
    heads, body = pull(wanted)
    frame = trainer.ask(FrameOp.PULL, {"step": 3, "insert": True, "parts": heads}, body)
    assert np.frombuffer(frame.body, np.float32, 4, 16).tolist() == [2.0] * 4
    rows = one.store.image(bucket_of(1)).rows["counts"]
    assert rows.frequency.tolist() == [5] and rows.seen.tolist() == [3]


REFUSED = [
    ({"parts": [["nothing", 1, "f4", 0, 2]]}, "table", "no table 'nothing'; the defined tables are: counts, sgd"),
    ({"parts": [["counts", 1, "f4", 0, 3]]}, "dim", "table counts: rows have 2 numbers, the request has 3"),
    (
        {"parts": [["counts", 1, "f8", 0, 2]]},
        "dtype",
        "table counts: the number format of rows is one of f4, f2, bf16, not 'f8'",
    ),
    ({"parts": [["counts", 2, "f4", 0, 2]]}, "word", "announces more data than the body"),
    ({"parts": [["counts", -1, "f4", 0, 2]]}, "word", "not the head of a part"),
    ({"parts": [["counts", 0, "f4", 0, 2]]}, "word", "the body has 8 bytes, the head announces 0"),
    ({"parts": 5}, "word", "a list of at most"),
    ({"parts": [["counts", 1, "f4", 0, 2]], "step": -1}, "word", "step -1"),
]


@pytest.mark.parametrize(("head", "kind", "text"), REFUSED)
def test_pulls_that_make_no_sense(made: Made, head: dict[str, Any], kind: str, text: str) -> None:
    one, _, _ = made()
    frame = Trainer(place(one)).ask(FrameOp.PULL, {"step": 0, **head}, [bytes(8)])
    assert (frame.op, frame.json()["kind"]) == (FrameOp.REFUSED, kind)
    assert text in frame.json()["text"] and "pserver a" in frame.json()["text"]


def test_pushes_that_make_no_sense(made: Made) -> None:
    one, _, _ = made()
    trainer = Trainer(place(one))
    wide = TableSpec("sgd", 5)
    answer = trainer.push(1, wide, [1])
    assert (answer.op, answer.head["kind"]) == (
        FrameOp.REFUSED,
        "dim",
    ) and "4 numbers, the request has 5" in answer.head["text"]
    answer = trainer.push(1, SGD, [1], op="multiply")
    assert answer.head["kind"] == "word" and "'multiply'" in answer.head["text"]
    answer = trainer.push(1, SGD, [1], trainer=2)
    assert answer.op is FrameOp.REFUSED and "must not push as 2" in answer.head["text"]
    answer = trainer.push(1, SGD, [1], scale=float("inf"))
    assert answer.op is FrameOp.REFUSED
    assert trainer.ask(FrameOp.STREAM, {}).json()["kind"] == "word"
    assert trainer.push(1, SGD, [1]).op is FrameOp.OK


def test_a_wrong_secret(made: Made) -> None:
    one, _, _ = made()
    with pytest.raises(Denied, match="does not know the secret") as caught:
        Trainer(place(one), secret="guessed")
    assert caught.value.kind == "token"


@pytest.mark.parametrize("damaged", list(Damaged))
def test_gradients_that_are_no_numbers(made: Made, damaged: Damaged) -> None:
    table = replace(SGD, name="d", damaged=damaged)
    one, _, _ = made({"tables": (table,)})
    trainer = Trainer(place(one))
    answer = trainer.push(1, table, [41, 42], float("nan"))
    if damaged is Damaged.REFUSE:
        assert (answer.op, answer.head["kind"]) == (FrameOp.REFUSED, "damaged")
        assert "table d, key 41" in answer.head["text"]
        assert trainer.push(1, table, [41, 42], -1.0).head["fresh"] == 2
    else:
        assert answer.op is FrameOp.OK and answer.head["damaged"] > 0
        assert one.load().damaged == answer.head["damaged"]
        assert np.isfinite(trainer.pull(table, [41, 42])).all()


def test_memory_is_full(made: Made) -> None:
    one, _, _ = made(most_bytes=1 << 20)
    trainer = Trainer(place(one))
    answer, seq = trainer.push(1, SGD, range(1000)), 1
    while answer.op is FrameOp.OK:
        seq += 1
        answer = trainer.push(seq, SGD, range(1000 * seq, 1000 * seq + 1000))
    assert (answer.op, answer.head["kind"]) == (FrameOp.REFUSED, "memory")
    for part in ("pserver a", "1,048,576 bytes", "more pservers", "evict", "--pserver-memory"):
        assert part in answer.head["text"]
    assert trainer.push(seq + 1, SGD, range(1000)).op is FrameOp.OK  # these have rows
    assert not trainer.pull(SGD, range(10**6, 10**6 + 10)).any()


def test_memory_is_full_while_rows_are_evicted(made: Made) -> None:
    table = replace(SGD, name="e", eviction=Eviction(unseen_steps=2))
    one, _, _ = made({"tables": (table,)}, most_bytes=1 << 20)
    trainer = Trainer(place(one))
    answer, seq = trainer.push(1, table, range(1000)), 1
    while answer.op is FrameOp.OK:
        seq += 1
        answer = trainer.push(seq, table, range(1000 * seq, 1000 * seq + 1000))
    assert answer.op is FrameOp.BUSY and answer.head["after_s"] > 0 and "evicted" in answer.head["text"]


def test_rows_that_other_tables_can_lose_are_no_room(made: Made) -> None:
    table = replace(SGD, name="e", eviction=Eviction(unseen_steps=2))
    one, _, _ = made({"tables": (SGD, table)}, most_bytes=1 << 20)
    trainer = Trainer(place(one))
    answer, seq = trainer.push(1, SGD, range(1000)), 1
    while answer.op is FrameOp.OK:
        seq += 1
        answer = trainer.push(seq, SGD, range(1000 * seq, 1000 * seq + 1000))
    assert (answer.op, answer.head["kind"]) == (FrameOp.REFUSED, "memory")


def test_who_is_gone_is_counted_no_more(made: Made) -> None:
    one, boss, plan = made()
    trainer = Trainer(place(one))
    assert trainer.push(1, SGD, range(3)).op is FrameOp.OK
    assert set(one.handlers.counts.own) == {trainer.number}
    boss.say(plan.next(revoked=(trainer.number,)).orders(1))
    assert not one.handlers.counts.own


def test_the_row_cap_holds(made: Made) -> None:
    table = replace(SGD, name="e", eviction=Eviction(most_rows=500))
    one, _, _ = made({"tables": (table,)})
    trainer = Trainer(place(one))
    for seq in range(1, 6):
        assert trainer.push(seq, table, range(300 * seq, 300 * seq + 300)).op is FrameOp.OK
    one.eviction_task.sweep("e")
    assert one.store.rows("e") <= 500


def test_sync_steps_are_averages(made: Made) -> None:
    one, boss, plan = made({"training": Training(Mode.SYNC), "members": (1, 2, 3)})
    trainers = [Trainer(place(one), number) for number in (1, 2, 3)]
    for step in range(5):
        answers = in_threads(
            *(lambda t=trainer, s=step: t.push(s + 1, SGD, [7, 7 + t.number], -3.0, step=s) for trainer in trainers)
        )
        assert [(answer.op, answer.head["step"]) for answer in answers] == [(FrameOp.OK, step)] * 3
    assert trainers[0].pull(SGD, [7, 8, 9, 10], step=5)[:, 0].tolist() == [15, 5, 5, 5]
    held = trainers[0].push(6, SGD, [7], -3.0, step=5, wait_s=2.0)
    assert (held.op, held.head["for"]) == (FrameOp.WAIT, "trainers")
    assert "node-2/0, node-3/0" in held.head["text"]
    # A trainer that has gone is not waited for; what was said in the meantime is not lost.
    results: list[Any] = []
    waiting = threading.Thread(
        target=lambda: results.extend(
            in_threads(
                lambda: trainers[0].push(6, SGD, [7], -3.0, step=5), lambda: trainers[1].push(6, SGD, [7], -3.0, step=5)
            )
        )
    )
    waiting.start()
    boss.say(plan.next(members=(1, 2), revoked=(3,)).orders(1))
    waiting.join(30)
    assert [answer.op for answer in results] == [FrameOp.OK, FrameOp.OK]
    assert trainers[0].pull(SGD, [7], step=6)[0, 0] == 18
    assert trainers[2].push(6, SGD, [7], step=5).op is FrameOp.STALE
    with pytest.raises(Denied, match="considered lost"):
        Trainer(place(one), 3)


def test_one_bad_push_of_a_step_does_not_spoil_the_others(made: Made) -> None:
    one, _, _ = made({"training": Training(Mode.SYNC), "members": (1, 2)})
    trainers = [Trainer(place(one), number) for number in (1, 2)]
    answers = in_threads(
        lambda: trainers[0].push(1, SGD, [7], float("inf"), step=0), lambda: trainers[1].push(1, SGD, [7], -2.0, step=0)
    )
    assert [answer.op for answer in answers] == [FrameOp.REFUSED, FrameOp.OK]
    assert trainers[0].pull(SGD, [7], step=1)[0, 0] == 1


def test_no_trainer_gets_too_far_ahead(made: Made) -> None:
    one, _, _ = made({"training": Training(Mode.ASYNC, staleness=2), "members": (1, 2)})
    fast, slow = Trainer(place(one), 1), Trainer(place(one), 2)
    for step in range(3):
        fast.pull(SGD, [1], step=step)
        fast.push(step + 1, SGD, [1], step=step)
    frame = fast.ask(FrameOp.PULL, {"step": 3, "parts": []}, wait_s=2.0)
    assert (frame.op, frame.json()["for"]) == (FrameOp.WAIT, "trainers")
    answers = in_threads(lambda: fast.ask(FrameOp.PULL, {"step": 3, "parts": []}).op, lambda: slow.push(1, step=1).op)
    assert answers == [FrameOp.OK, FrameOp.OK]
    assert fast.ask(FrameOp.PULL, {"step": 99, "insert": False, "parts": []}).op is FrameOp.OK  # reading is free


def test_learning_rates(made: Made) -> None:
    lr = (messages.LrHold(0, 0.5), messages.LrHold(10, 2.0, "sgd"), messages.LrHold(20, 0.1, "counts"))
    one, _, _ = made({"lr": lr})
    trainer = Trainer(place(one))
    trainer.push(1, SGD, [1], -1.0, step=9)
    trainer.push(2, SGD, [2], -1.0, step=10)
    trainer.push(3, SGD, [3], -1.0, step=20)
    assert trainer.pull(SGD, [1, 2, 3])[:, 0].tolist() == [0.5, 2.0, 2.0]
    other = Trainer(place(one), 2)
    other.push(1, SGD, [4], -1.0, step=9, scale=4.0)
    assert other.pull(SGD, [4])[0, 0] == 2.0


def test_stale_pushes_count_less(made: Made) -> None:
    one, _, _ = made({"training": Training(Mode.ASYNC, staleness_lr=True), "members": (1, 2)})
    first, second = Trainer(place(one), 1), Trainer(place(one), 2)
    base = first.pulled(SGD, [1]).json()["applied"]
    for seq in range(1, 5):
        second.push(seq, COUNTS, [5])
    assert first.push(1, SGD, [1], -3.0, base=base).op is FrameOp.OK  # 4 pushes of others, 2 trainers
    assert first.pull(SGD, [1])[0, 0] == 1.0
    assert first.push(2, SGD, [2], -3.0, base=base + 4).op is FrameOp.OK
    assert first.pull(SGD, [2])[0, 0] == 3.0


def test_first_assign_and_add(made: Made) -> None:
    one, _, _ = made({"training": Training(Mode.SYNC), "members": (1, 2)})
    trainer = Trainer(place(one))
    trainer.push(1, SGD, [1], 5.0, op="first")  # nobody is waited for
    trainer.push(2, SGD, [1], 7.0, op="first")
    trainer.push(3, SGD, [2], 3.0, op="assign")
    trainer.push(4, SGD, [2], 1.0, op="add")
    assert trainer.pull(SGD, [1, 2])[:, 0].tolist() == [5.0, 4.0]


def test_buckets_of_others(made: Made) -> None:
    one, boss, plan = made()
    mine = Trainer(place(one))
    keys = np.arange(100)
    lower = keys[buckets_of(keys) < 2048].tolist()
    upper = keys[buckets_of(keys) >= 2048].tolist()
    next_ = plan.next(owner={1: range(2048), 2: range(2048, BUCKETS)}, changed=range(2048, BUCKETS))
    next_.places = {**plan.places, 2: At("b", "127.0.0.1", 1)}
    boss.say(next_.orders(1))
    assert mine.push(1, COUNTS, lower, version=2).op is FrameOp.OK
    answer = mine.push(2, COUNTS, upper, version=1)
    assert answer.op is FrameOp.MOVED and answer.head["placement_version"] == 2
    placement_update = messages.decode(answer.head["placement"])
    assert isinstance(placement_update, messages.PlacementUpdate) and placement_update.placement.version == 2
    frame = mine.pulled(COUNTS, upper, version=2)
    assert frame.op is FrameOp.MOVED and "placement" not in frame.json()
    old = mine.pulled(COUNTS, lower, version=1)
    assert old.op is FrameOp.OK and "placement" in old.json()
    assert not one.store.image(bucket_of(upper[0])).rows


def test_a_bucket_that_is_on_its_way(made: Made) -> None:
    one = server()
    plan = Plan({1: place(one), 2: At("b", "127.0.0.1", 1)}, {1: ALL}, giver={2: ALL})
    boss = Boss(place(one))
    boss.say(plan.orders(1))
    trainer = Trainer(place(one))
    answer = trainer.push(1, COUNTS, [1], wait_s=2.0)
    assert (answer.op, answer.head["for"]) == (FrameOp.WAIT, "release")
    pushed = threading.Thread(target=lambda: results.append(trainer.push(1, COUNTS, [1])))
    results: list[Any] = []
    pushed.start()
    gone = plan.next(changed=ALL)
    gone.places = {1: place(one)}  # pserver 2 is dead: it will release nothing
    boss.say(gone.orders(1))
    pushed.join(30)
    assert results[0].op is FrameOp.OK


def test_a_trainer_of_an_earlier_history(made: Made) -> None:
    one, boss, plan = made()
    trainer = Trainer(place(one))
    trainer.push(1, COUNTS, [1], history=1)
    boss.say(plan.next(history=2, changed=ALL).orders(1))
    answer = trainer.push(2, COUNTS, [1], history=1)
    assert (answer.op, answer.head["history"]) == (FrameOp.ROLLED_BACK, 2)
    assert trainer.push(2, COUNTS, [1], history=3, wait_s=2.0).op is FrameOp.WAIT
    assert trainer.pull(COUNTS, [1], history=2)[0, 0] == 0


def test_steps_and_seconds_of_an_earlier_history_do_not_count(made: Made) -> None:
    """Rows of a checkpoint would count as unseen since then, and go."""
    steps, seconds = (
        TableSpec(name, 2, Optimizer(UpdateRule.ADD), Initial(InitMethod.ZEROS), eviction=eviction)
        for name, eviction in (("steps", Eviction(unseen_steps=100)), ("seconds", Eviction(unseen_s=100)))
    )
    one, boss, plan = made({"tables": (steps, seconds)})
    trainer = Trainer(place(one))
    for table, seq in ((steps, 5000), (seconds, 5001)):
        assert trainer.push(seq, table, [1], history=1, clock=9000).op is FrameOp.OK
    trainer.pull(steps, [2], step=6000, history=1)
    assert (one.load().top_step, one.load().history) == (5001, 1)
    boss.say(plan.next(history=2, changed=ALL).orders(1))
    assert trainer.push(7000, steps, [1], history=1, clock=9000).op is FrameOp.ROLLED_BACK
    assert (one.load().top_step, one.load().history, one.store.clock.now() < 9000) == (0, 2, True)
    for table, seq in ((steps, 8), (seconds, 9)):
        assert trainer.push(seq, table, [1], history=2, clock=30).op is FrameOp.OK
        assert one.eviction_task.sweep(table.name) == 0
        assert trainer.pull(table, [1], history=2)[0, 0] == 1
    assert one.load().top_step == 9


def test_a_push_that_waited_through_the_end_of_its_history_is_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    one = server()
    plan = Plan({1: place(one), 2: At("b", "127.0.0.1", 1)}, {1: ALL}, giver={2: ALL})
    boss, trainer = Boss(place(one)), Trainer(place(one))
    waiting, waits = one.bucket_shell.waiting, threading.Event()

    def seen(buckets: Iterable[int]) -> bool:
        waits.set()
        return waiting(buckets)

    monkeypatch.setattr(one.bucket_shell, "waiting", seen)
    boss.say(plan.orders(1))
    results: list[Any] = []
    pushed = threading.Thread(target=lambda: results.append(trainer.push(1, COUNTS, [1], history=1)))
    pushed.start()
    assert waits.wait(30)
    rolled_back = plan.next(history=2, changed=ALL)
    rolled_back.places = {1: place(one)}
    boss.say(rolled_back.orders(1))
    pushed.join(30)
    assert results[0].op is FrameOp.ROLLED_BACK
    assert results[0].head["history"] == 2
    assert one.load().top_step == one.store.most_seen_step == 0
    assert trainer.pull(COUNTS, [1], history=2)[0, 0] == 0


def test_a_scan_notices_a_bucket_that_leaves_before_its_rows_are_read(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _, _ = made()
    trainer, bucket = Trainer(place(one)), bucket_of(1)
    trainer.push(1, SGD, [1, 2], 3.0)
    await_served = one.handlers._await_served

    def leaves(buckets: Any, asked: Any) -> None:
        await_served(buckets, asked)
        one.bucket_machine.allowed[bucket] = one.bucket_shell.served[bucket] = 0
        one.store.drop([bucket])

    monkeypatch.setattr(one.handlers, "_await_served", leaves)
    assert trainer.ask(FrameOp.SCAN, {"table": "sgd", "bucket": bucket}).op is FrameOp.MOVED


def test_scan_and_statistics(made: Made) -> None:
    one, _, _ = made()
    trainer = Trainer(place(one))
    trainer.push(1, SGD, [1], -2.0)
    frame = trainer.ask(FrameOp.SCAN, {"table": "sgd", "bucket": bucket_of(1)})
    rows = decode(frame.body)
    assert (rows.keys.tolist(), rows.weights.tolist(), rows.updates.tolist()) == ([1], [[2.0] * 4], [1])
    assert trainer.ask(FrameOp.SCAN, {"table": "none", "bucket": 1}).json()["kind"] == "table"
    assert trainer.ask(FrameOp.SCAN, {"table": "sgd", "bucket": BUCKETS}).json()["kind"] == "word"
    told = trainer.ask(FrameOp.STATS, {}).json()
    assert (told["number"], told["version"], told["served"], told["tables"]["sgd"]["rows"]) == (1, 1, BUCKETS, 1)
    assert told["load"]["pushes"] == 1


def test_a_trainer_that_vanishes_silently(made: Made) -> None:
    one, boss, _ = made({"members": (1, 2)})
    Trainer(place(one), 1).caller.close()
    staying = [Trainer(place(one), 2), Trainer(place(one), 2)]
    staying[0].caller.abort()
    Trainer(place(one), 3).caller.abort()
    assert boss.heard(messages.TrainerLost).trainer == 3
    staying[1].caller.abort()
    boss.heard(messages.TrainerLost, lambda word: word.trainer == 2)
    assert {word.trainer for word in boss.words if isinstance(word, messages.TrainerLost)} == {2, 3}


def test_masters(made: Made) -> None:
    one, boss, plan = made()
    newer = Boss(place(one), token=5)
    assert newer.heard(messages.PserverHello).version == 1
    until(boss.changed, lambda: boss.over, "the old line to end")
    with pytest.raises(Denied, match="newer Master, with token 5"):
        Boss(place(one), token=4)
    newer.tell(replace(plan.next(members=(9,)).orders(1), token=3))  # of a Master that was replaced
    until(newer.changed, lambda: newer.over, "the line to end")
    newest = Boss(place(one), token=5)
    newest.say(plan.next(members=(2,)).orders(1))
    assert one.handlers.view is not None and [member.number for member in one.handlers.view.members] == [2]


def test_before_any_orders() -> None:
    answer = Trainer(place(server())).push(1, COUNTS, [1])
    assert answer.op is FrameOp.BUSY and "no orders" in answer.head["text"]


def test_rows_begin_the_same_on_any_server(made: Made) -> None:
    table = TableSpec("n", 8, Optimizer(), Initial(InitMethod.NORMAL, 0.1, 7))
    first, second = made({"tables": (table,)})[0], made({"tables": (table,)})[0]
    rows = [Trainer(place(one)).pull(table, range(100)) for one in (first, second)]
    assert np.array_equal(rows[0], rows[1]) and rows[0].std() > 0.05


def test_what_is_told_now_and_then(made: Made) -> None:
    one, boss, _ = made()
    Trainer(place(one)).push(3, COUNTS, [1])
    load = boss.heard(messages.PserverLoad, lambda word: word.pushes)
    assert (load.rows, load.top_step) == (1, 3)


def test_a_table_that_newer_orders_will_bring_is_waited_for(made: Made) -> None:
    one, _, _ = made()
    assert one.handlers.view is not None
    newer = {"step": 0, "parts": [["nothing", 1, "f4", 0, 2]], "version": one.handlers.view.version + 1}
    frame = Trainer(place(one)).ask(FrameOp.PULL, newer, [bytes(8)])
    assert frame.op is FrameOp.BUSY and "no table 'nothing'" in frame.json()["text"]


def test_the_first_orders_name_the_dead_oldest_first(made: Made) -> None:
    """The oldest are forgotten first, so the order is not that of a set."""
    dead = tuple(range(770, 1026))
    one, boss, plan = made({"revoked": dead})
    until(one.bucket_shell.changed, lambda: list(one.store._gone) == list(dead))
    boss.say(plan.next(revoked=(*dead[1:], 1030)).orders(1))
    until(one.bucket_shell.changed, lambda: list(one.store._gone) == [*dead[1:], 1030])
