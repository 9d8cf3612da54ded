"""A trainer's client against pservers in this process: real sockets, moved buckets, lost answers, deadlines."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edl.errors import PsError, SettingError
from edl.job_records import Mode, Training
from ps import hashing
from ps.client.client import PsClient
from ps.client.pool import PooledConnection, PserverAnswer, PserverCall
from ps.errors import RolledBack
from ps.net.caller import FrameEndpoint, FrameReply
from ps.protocol import messages
from ps.protocol.frames import Frame, FrameOp
from ps.spec import BUCKETS, Damaged
from tests.support.ps_fixture import PLAIN, WAIT_S, Bench, Master

KEYS = np.arange(2000)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.stop()


def ones(keys: Any, dim: int = 4) -> Any:
    return np.ones((*np.shape(keys), dim), np.float32)


def once(client: PsClient, keys: Any = KEYS) -> None:
    """Each key has been pushed once."""
    rows = client.read("plain", keys)
    assert (rows == -1).all(), Counter(rows[:, 0].tolist())


# --- rows ------------------------------------------------------------------------------------------------------------


def test_rows_come_from_all_pservers_and_gradients_go_to_them(bench: Bench) -> None:
    client = bench.start(3).client()
    keys = np.arange(1000).reshape(10, 100)
    assert not client.pull("plain", keys).any()
    client.push({"plain": (keys, ones(keys))})
    rows = client.pull("plain", keys)
    assert rows.shape == (10, 100, 4) and (rows == -1).all()
    assert client.step == 1
    assert min(one.store.rows("plain") for one in bench.pservers.values()) > 200


def test_several_tables_go_in_one_request_to_each_pserver(bench: Bench) -> None:
    client = bench.start(2).client()
    found = client.pull_many({"plain": KEYS, "wide": KEYS})
    assert found["plain"].shape == (2000, 4) and found["wide"].shape == (2000, 9)
    client.push({"plain": (KEYS, ones(KEYS)), "wide": (KEYS, ones(KEYS, 9))})
    assert [len(one.heads) for one in bench.pservers.values()] == [2, 2]
    assert np.array_equal(client.read("wide", KEYS), found["wide"] - 1)
    assert np.array_equal(bench.client(number=2).read("wide", KEYS[::-1]), found["wide"][::-1] - 1)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["numba", "numpy"])
def test_duplicates_are_fetched_once_counted_each_and_summed(
    bench: Bench, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ps.client import dedup

    if kernels == "numpy":
        monkeypatch.setattr(dedup, "_fast", lambda: None)
    client = bench.start(2).client()
    keys = np.array([[7, 8, 7], [7, -1, 8]])
    client.pull("plain", keys)
    grads = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    client.push({"plain": (keys, grads)})
    rows = {int(key): row for some in client.scan("plain") for key, row in zip(some.keys, some.weights, strict=True)}
    times = {
        int(key): int(one) for some in client.scan("plain") for key, one in zip(some.keys, some.frequency, strict=True)
    }
    assert times == {7: 3, 8: 2, -1: 1}
    for key in (7, 8, -1):
        assert np.allclose(rows[key], -grads[keys == key].sum(axis=0), atol=1e-6)
    assert sum(part[1] for one in bench.pservers.values() for part in one.seen(FrameOp.PUSH)[0]["parts"]) == 3


def test_reading_leaves_no_trace(bench: Bench) -> None:
    client = bench.start(1).client()
    first = client.read("wide", KEYS)
    assert bench.pservers[1].store.rows("wide") == 0
    assert np.array_equal(client.pull("wide", KEYS, insert=False), first)
    assert np.array_equal(client.pull("wide", KEYS), first) and bench.pservers[1].store.rows("wide") == 2000


def test_rows_lie_where_the_caller_wants_them(bench: Bench) -> None:
    client = bench.start(2).client()
    out = np.full((2, 3, 9), 5, np.float32)
    keys = np.array([[1, 2, 3], [4, 5, 6]])
    assert client.pull("wide", keys, out) is out
    assert np.array_equal(out, client.read("wide", keys))


@pytest.mark.parametrize(("wire", "error"), [("f2", 2e-3), ("bf16", 2e-2)])
def test_half_of_the_bytes(bench: Bench, wire: str, error: float) -> None:
    exact, client = bench.start(2).client(number=2), bench.client(wire=wire)
    rows = exact.pull("wide", KEYS)
    assert np.allclose(client.pull("wide", KEYS), rows, atol=error)
    assert not np.array_equal(client.pull("wide", KEYS), rows)
    grads = np.full((2000, 9), 0.1, np.float32)
    client.push({"wide": (KEYS, grads)})
    assert np.allclose(exact.read("wide", KEYS), rows - grads, atol=error)
    assert bench.pservers[1].seen(FrameOp.PUSH)[0]["parts"][0][3] == wire


@pytest.mark.parametrize(("wire", "most"), [("f2", 65504.0), ("bf16", 3.3895313892515355e38)])
def test_a_gradient_that_is_clipped_is_clipped_to_what_its_number_format_holds(wire: str, most: float) -> None:
    """In the format it would be infinite, and be clipped to the largest float32."""
    spec, large = replace(PLAIN, name="clipped", damaged=Damaged.CLIP), np.float32(3.4e38 if wire == "bf16" else 70000)
    bench = Bench((spec,)).start(1)
    try:
        client = bench.client(wire=wire)
        client.push({"clipped": ([1, 2, 3], np.outer([large, -large, 1], [1, 1, 1, 1]).astype(np.float32))})
        rows = bench.client(number=2).read("clipped", [1, 2, 3])
        assert rows[:, 0].tolist() == [-most, most, -1] and client.statistics["damaged"] == 8
    finally:
        bench.stop()


def test_values_outside_of_steps(bench: Bench) -> None:
    client = bench.start(2).client()
    client.first("plain", KEYS, 3 * ones(KEYS))
    client.first("plain", KEYS, 4 * ones(KEYS))
    assert (client.read("plain", KEYS) == 3).all()
    client.push({"plain": (KEYS, ones(KEYS))}, op="add")
    client.assign("plain", KEYS[:5], 9 * ones(KEYS[:5]))
    rows = client.read("plain", KEYS)
    assert (rows[:5] == 9).all() and (rows[5:] == 4).all() and client.step == 0
    with pytest.raises(PsError, match="grad, add, assign, first, not 'multiply'"):
        client.push({}, op="multiply")


def test_nothing_at_all(bench: Bench) -> None:
    client = bench.start(2).client()
    assert client.pull("plain", []).shape == (0, 4)
    assert client.pull("plain", np.zeros((3, 0), np.int32)).shape == (3, 0, 4)
    client.push({})
    client.push({"plain": (np.zeros(0, np.int64), np.zeros((0, 4)))})
    assert client.step == 2
    assert not any(one.heads for one in bench.pservers.values())


def test_all_rows_are_found_by_a_scan(bench: Bench) -> None:
    client = bench.start(2).client()
    client.pull("plain", KEYS)
    bench.move(slice(0, 100), 2)
    keys = np.sort(np.concatenate([some.keys for some in client.scan("plain")]))
    assert np.array_equal(keys, KEYS)


def test_more_than_fits_into_one_request_is_pulled_in_several(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from ps.client import routing

    monkeypatch.setattr(routing.first_split, "__defaults__", ((), 10_000))
    client = bench.start(2).client()
    found = client.pull_many({"wide": KEYS, "plain": KEYS})
    pulls = bench.pservers[1].seen(FrameOp.PULL)
    assert len(pulls) > 5 and max(sum(part[1] for part in head["parts"]) for head in pulls) <= 10_000 // 28
    assert np.array_equal(found["wide"], bench.client(number=2).read("wide", KEYS))


@pytest.mark.parametrize("op", ["grad", "assign"])
def test_a_push_too_large_for_one_request_is_refused_before_any_of_it_is_sent(
    bench: Bench, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ps.client import write
    from ps.protocol import frames

    for module in (frames, write):
        monkeypatch.setattr(module, "MOST_BODY", 10_000)
    client = bench.start(2).client()
    keys = [key for key in range(2000) if hashing.bucket_of(key) >= BUCKETS // 2][:300]
    few = next(key for key in range(2000) if hashing.bucket_of(key) < BUCKETS // 2)
    with pytest.raises(PsError, match=r"a push to plain, wide has 18,000 bytes for .*ps-2.*at most 10,000"):
        values = {"plain": ([*keys[:200], few], np.ones((201, 4))), "wide": (keys, np.ones((300, 9)))}
        client.push(values, op=op)
    assert not any(one.seen(FrameOp.PUSH) for one in bench.pservers.values())
    client.push({"plain": (keys, np.ones((300, 4)))}, op=op)
    assert bench.pservers[2].store.rows("plain") == 300


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "keys", "text"),
    [
        ("none", [1], "no table 'none'.*plain, wide"),
        ("plain", [1.0], "plain: keys must be integers, these are float64"),
        ("plain", [True], "must be integers, these are bool"),
        ("plain", ["a"], "must be integers"),
        ("plain", [1 << 63], "key 9223372036854775808 is not an integer from"),
        ("plain", np.array([1 << 64], object), "is not an integer from"),
        ("plain", np.array([1, 1 << 63], np.uint64), "key 9223372036854775808"),
        ("plain", [[1], [2, 3]], "cannot be converted to an array"),
    ],
)
def test_invalid_keys(bench: Bench, table: str, keys: Any, text: str) -> None:
    with pytest.raises(PsError, match=text):
        bench.start(1).client().pull(table, keys)


@pytest.mark.parametrize(
    ("grads", "text"),
    [
        (np.ones((3, 5)), r"plain: gradients have shape \(3, 5\).*dim 4 need \(3, 4\)"),
        (np.ones((2, 4)), r"need \(3, 4\)"),
        (np.ones((3, 4), np.int64), "floating-point numbers, these are int64"),
        (np.ones((3, 4), np.complex64), "these are complex64"),
    ],
)
def test_gradients_that_do_not_fit(bench: Bench, grads: Any, text: str) -> None:
    client = bench.start(1).client()
    with pytest.raises(PsError, match=text):
        client.push({"plain": ([1, 2, 3], grads)})
    assert client.step == 0 and not bench.pservers[1].heads


def test_other_ways_to_give_keys_and_gradients(bench: Bench) -> None:
    client = bench.start(1).client()
    client.push({"plain": ([1, 2], np.ones((2, 4), np.float64))})
    client.push({"plain": (np.array([3], np.uint64), np.ones((1, 8), np.float16)[:, ::2])})
    client.push({"plain": (np.array([4], np.int8), np.ones((1, 4)))})
    assert (client.read("plain", np.array([1, 2, 3, 4], object)) == -1).all()


def test_places_that_cannot_take_rows(bench: Bench) -> None:
    client = bench.start(1).client()
    for out in (np.zeros((2, 5), np.float32), np.zeros((2, 4)), np.zeros((4, 2), np.float32).T, [[0.0]]):
        with pytest.raises(PsError, match=r"out must be a writable float32 array of shape \(2, 4\)"):
            client.pull("plain", [1, 2], out)  # type: ignore[arg-type]


def test_a_damaged_gradient_is_refused_with_table_and_key(bench: Bench) -> None:
    client = bench.start(1).client()
    grads = ones([1, 2])
    grads[1, 3] = np.nan
    with pytest.raises(PsError, match=r"table plain, key 2: .*NaN.*nothing of this push was applied"):
        client.push({"plain": ([1, 2], grads)})
    client.push({"plain": ([1, 2], ones([1, 2]))})
    assert (client.read("plain", [1, 2]) == -1).all()


def test_options_out_of_range(bench: Bench) -> None:
    for options in ({"wire": "f8"}, {"deadline_s": 0}, {"cache_rows": -1}, {"cache_steps": -1}):
        with pytest.raises(SettingError, match=next(iter(options))):
            bench.start(1).client(**options)


def test_a_wrong_secret_is_not_waited_out(bench: Bench) -> None:
    bench.start(1)
    client = PsClient.direct((), tables=bench.tables, secret="wrong", placement=bench.placement())
    with pytest.raises(PsError, match=r"ps-1.*secret"):
        client.pull("plain", [1])
    client.close()


def test_a_forked_process_is_told_why_it_may_not(bench: Bench) -> None:
    client = bench.start(1).client()
    client.pull("plain", KEYS)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            client.pull("plain", KEYS)
        except BaseException as error:  # noqa: BLE001 - the parent looks at it
            os.write(write, f"{type(error).__name__}: {error}".encode())
        client.leave()  # as at the exit of a process
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as said:
        assert "PsError: this process was forked" in said.read()
    client.push({"plain": (KEYS, ones(KEYS))})
    once(client)


# --- what moves and what breaks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tell", [True, False])
def test_buckets_move_while_training_goes_on(bench: Bench, tell: bool) -> None:
    bench.start(2)
    bench.add(3)
    master = Master(bench)
    client = bench.joined(master)
    for step in range(20):
        client.pull("plain", KEYS)
        if step % 4 == 1:
            bench.move(np.random.default_rng(step).integers(0, BUCKETS, 300), step % 3 + 1, tell=tell)
            if not tell:
                threading.Timer(0.05, master.tell, [master.placement_update()]).start()
        client.push({"plain": (KEYS, ones(KEYS))})
    assert (client.read("plain", KEYS) == -20).all()


def test_only_what_was_refused_is_sent_again(bench: Bench) -> None:
    client = bench.start(2).client()
    client.pull("plain", KEYS)
    client.push({"plain": (KEYS, ones(KEYS))})
    bench.move(slice(0, 512), 2)
    client.pull("plain", KEYS)
    second = [sum(part[1] for part in head["parts"]) for head in bench.pservers[2].seen(FrameOp.PULL)]
    moved = int((hashing.buckets_of(KEYS) < 512).sum())
    assert second[1:] in ([second[0], moved], [moved, second[0]])


def test_an_answer_that_is_lost_applies_a_push_once(bench: Bench) -> None:
    client = bench.start(2).client()
    lost = threading.Event()

    def hang_up(frame: Frame, head: dict[str, Any]) -> None:
        if frame.op is FrameOp.PUSH and not lost.is_set():
            lost.set()
            for peer in bench.pservers[1].endpoint.peers:
                peer.hang_up()

    bench.pservers[1].after.append(hang_up)
    client.push({"plain": (KEYS, ones(KEYS))})
    assert lost.is_set() and client.statistics["again"] > 0
    pushes = bench.pservers[1].seen(FrameOp.PUSH)
    assert [head["seq"] for head in pushes] == [1, 1] and pushes[0]["parts"] == pushes[1]["parts"]
    once(client)


def test_a_dead_pserver_s_buckets_are_had_from_its_copy(bench: Bench) -> None:
    """It dies between applying a push and answering it; its rows, with what was applied, are elsewhere."""
    bench.start(2)
    master = Master(bench)
    client = bench.joined(master)
    client.begin()
    died = threading.Event()

    def die(frame: Frame, head: dict[str, Any]) -> None:
        if frame.op is FrameOp.PUSH and not died.is_set():
            died.set()
            bench.move(np.flatnonzero(bench.owner == 1), 2, tell=False)
            threading.Thread(target=bench.pservers[1].stop).start()
            for peer in bench.pservers[1].endpoint.peers:
                peer.hang_up()

    bench.pservers[1].after.append(die)
    pushing = threading.Thread(target=client.push, args=({"plain": (KEYS, ones(KEYS))},))
    pushing.start()
    suspect = master.expect(messages.Suspect)
    assert suspect.server == 1 and "ps-1" in suspect.why
    master.expect(messages.GetPlacement)
    master.tell(master.placement_update(without=[1]))
    pushing.join(WAIT_S)
    assert not pushing.is_alive() and client.step == 1
    once(client)
    assert bench.pservers[2].seen(FrameOp.PUSH)[-1]["seq"] == 1


def test_a_pserver_is_suspected_once_and_may_come_back(bench: Bench) -> None:
    bench.start(2)
    master = Master(bench)
    client = bench.joined(master)
    client.pull("plain", KEYS)
    calls = []

    def hang_up(frame: Frame, head: dict[str, Any]) -> FrameReply | None:
        calls.append(frame.op)
        if len(calls) < 6:
            for peer in bench.pservers[2].endpoint.peers:
                peer.hang_up()
        return None

    bench.pservers[2].faults.append(hang_up)
    client.push({"plain": (KEYS, ones(KEYS))})
    once(client)
    assert master.expect(messages.Suspect).server == 2
    assert not [word for word in list(master.said.queue) if isinstance(word, messages.Suspect)]


def test_a_busy_pserver_is_asked_again_as_it_says(bench: Bench) -> None:
    client = bench.start(2).client()
    busy = iter(range(3))

    def refuse(frame: Frame, head: dict[str, Any]) -> FrameReply | None:
        return None if next(busy, None) is None else FrameReply.no(FrameOp.BUSY, after_s=0.03, text="streams are full")

    bench.pservers[2].faults.append(refuse)
    client.push({"plain": (KEYS, ones(KEYS))})
    once(client)
    assert len(bench.pservers[2].seen(FrameOp.PUSH)) == 4 and len(bench.pservers[1].seen(FrameOp.PUSH)) == 1


def test_at_the_deadline_servers_buckets_and_reasons_are_named(bench: Bench) -> None:
    client = bench.start(2).client(deadline_s=0.3)
    bench.pservers[2].faults.append(
        lambda frame, head: FrameReply.no(FrameOp.BUSY, after_s=0.05, text="streams are full")
    )
    bench.pservers[1].stop()
    with pytest.raises(PsError) as raised:
        client.push({"plain": ([5, 6, 7, 8], ones([5, 6, 7, 8]))})
    text = str(raised.value)
    assert "ps-2 (127.0.0.1:" in text and "is busy: streams are full" in text and "bucket" in text
    assert "a push to plain (step 0)" in text and "may or may not have been applied" in text and "deadline_s" in text
    assert client.step == 0


def test_a_bucket_without_an_owner_is_waited_for(bench: Bench) -> None:
    bench.start(1)
    bench.owner[:2048] = 0
    master = Master(bench)
    client = bench.joined(master)
    pushing = threading.Thread(target=client.push, args=({"plain": (KEYS, ones(KEYS))},))
    pushing.start()
    master.expect(messages.GetPlacement)
    bench.move(slice(0, 2048), 1)
    master.tell(master.placement_update())
    pushing.join(WAIT_S)
    once(client)


@pytest.mark.parametrize("op", [FrameOp.STALE, FrameOp.ROLLED_BACK])
def test_a_trainer_of_an_older_history_starts_over(bench: Bench, op: FrameOp) -> None:
    client = bench.start(1).client()
    bench.pservers[1].faults.append(lambda frame, head: FrameReply.no(op, text="history 2 has begun", history=2))
    with pytest.raises(RolledBack, match=r"ps-1.*history 2 has begun.*must restart"):
        client.pull("plain", KEYS)


def test_requests_say_what_pservers_have_to_know(bench: Bench) -> None:
    client = bench.start(2).client(training=Training(Mode.ASYNC, staleness=3))
    client.pull("plain", KEYS)
    client.push({"plain": ([1], ones([1]))})
    client.pull("plain", KEYS)
    client.push({"plain": ([1], ones([1]))})
    client.first("plain", [1], ones([1]))
    heads = {number: one.seen(FrameOp.PUSH) for number, one in bench.pservers.items()}
    owner = bench.owner[hashing.bucket_of(1)]
    assert [(head["seq"], head["step"], head["base"], head["ends"]) for head in heads[owner]] == [
        (1, 0, 0, True), (2, 1, 1, True), (3, 2, 1, False),
    ]  # fmt: skip
    # The other has no keys, and hears of the steps all the same.
    assert [(head["seq"], head["parts"]) for head in heads[3 - owner]] == [(1, []), (2, [])]
    pull = bench.pservers[1].seen(FrameOp.PULL)[1]
    assert (pull["step"], pull["insert"], pull["version"], pull["history"]) == (1, True, 1, 1)


def test_a_pserver_that_gets_buckets_within_a_step_hears_of_it(bench: Bench) -> None:
    bench.start(1)
    bench.add(2)
    client = bench.client(training=Training(Mode.SYNC))
    other = (hashing.bucket_of(1) + 1) % BUCKETS
    bench.pservers[1].faults.append(lambda frame, head: bench.move(slice(other, other + 1), 2))
    client.push({"plain": ([1], ones([1]))})
    assert [(head["step"], head["parts"]) for head in bench.pservers[2].seen(FrameOp.PUSH)] == [(0, [])]


def test_a_pserver_that_gets_buckets_hears_of_a_step_while_others_are_waited_for(bench: Bench) -> None:
    bench.start(1)
    bench.add(2)
    master = Master(bench, Training(Mode.SYNC))
    client = bench.joined(master)
    client.begin()
    come, came = threading.Event(), threading.Event()
    other = (hashing.bucket_of(1) + 1) % BUCKETS

    def wait(frame: Frame, head: dict[str, Any]) -> FrameReply | None:
        return None if come.is_set() else FrameReply.no(FrameOp.WAIT, text="trainer 2 is not there")

    bench.pservers[1].faults.append(wait)
    bench.pservers[2].after.append(lambda frame, head: came.set())
    pushing = threading.Thread(target=client.push, args=({"plain": ([1], ones([1]))},))
    pushing.start()
    bench.move(slice(other, other + 1), 2, tell=False)
    master.tell(master.placement_update())
    assert came.wait(WAIT_S)
    assert [(head["step"], head["parts"]) for head in bench.pservers[2].seen(FrameOp.PUSH)] == [(0, [])]
    come.set()
    pushing.join(WAIT_S)
    assert client.step == 1 and len(bench.pservers[2].seen(FrameOp.PUSH)) == 1


def test_a_pserver_that_loses_all_keys_of_a_step_but_not_all_buckets_hears_of_it(bench: Bench) -> None:
    bench.start(2)
    client = bench.client(training=Training(Mode.SYNC))
    mine = hashing.bucket_of(1)
    owner = int(bench.owner[mine])

    def move(frame: Frame, head: dict[str, Any]) -> None:
        if bench.owner[mine] == owner:
            bench.move(slice(mine, mine + 1), 3 - owner)

    bench.pservers[owner].faults.append(move)
    client.push({"plain": ([1], ones([1]))})
    heads = bench.pservers[owner].seen(FrameOp.PUSH)
    assert [(head["step"], len(head["parts"])) for head in heads] == [(0, 1), (0, 0)]
    assert (client.read("plain", [1]) == -1).all()


def test_queued_requests_of_a_caller_that_gave_up_are_not_sent(bench: Bench) -> None:
    bench.start(1)
    pool = bench.client()._core.pool
    held, come, landed = threading.Semaphore(0), threading.Event(), threading.Semaphore(0)

    def hold(frame: Frame, head: dict[str, Any]) -> None:
        held.release()
        assert come.wait(WAIT_S)

    bench.pservers[1].faults.append(hold)
    head = {"step": 0, "insert": False, "version": 1, "history": 1, "epoch": 1, "parts": []}
    calls = [PserverCall(FrameOp.PULL, head), PserverCall(FrameOp.PULL, head)]
    answers: list[PserverAnswer] = []

    def take(answer: PserverAnswer) -> None:
        answers.append(answer)
        landed.release()

    for call in calls:
        pool.ask("pull", bench.pservers[1].server, call, take)
    assert held.acquire(timeout=WAIT_S)
    calls[1].given_up = True
    come.set()
    for _ in calls:
        assert landed.acquire(timeout=WAIT_S)
    assert answers[0].error is None and "given up" in str(answers[1].error)
    assert len(bench.pservers[1].seen(FrameOp.PULL)) == 1


def test_no_request_is_sent_after_a_server_is_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Master says that a pserver is gone at the moment in which something is to be asked of it."""
    bench.start(1)
    pool = bench.client()._core.pool
    landed, ask, gone = threading.Event(), PooledConnection.ask, threading.Event()

    def follow() -> None:
        pool.follow([])
        gone.set()

    follower = threading.Thread(target=follow)

    def late(self: PooledConnection, call: PserverCall, done: Any) -> None:
        follower.start()
        gone.wait(0.2)  # as far as it comes
        ask(self, call, done)

    monkeypatch.setattr(PooledConnection, "ask", late)
    pool.ask("pull", bench.pservers[1].server, PserverCall(FrameOp.PULL, {}), lambda answer: landed.set())
    assert landed.wait(WAIT_S)
    follower.join(WAIT_S)


def test_a_stranger_at_a_dead_pserver_s_port_is_a_dead_pserver(bench: Bench) -> None:
    bench.start(2)
    master = Master(bench)
    dead = bench.pservers[2]
    dead.stop()
    dead.endpoint = FrameEndpoint(dead._handle, secret="another job's")
    dead.endpoint.start("127.0.0.1")
    client = bench.joined(master)
    pushing = threading.Thread(target=client.push, args=({"plain": (KEYS, ones(KEYS))},))
    pushing.start()
    assert "does not know the secret" in master.expect(messages.Suspect).why
    bench.move(np.flatnonzero(bench.owner == 2), 1)
    master.tell(master.placement_update(without=[2]))
    pushing.join(WAIT_S)
    assert client.step == 1
    once(client)
