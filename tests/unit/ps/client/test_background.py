"""Background work of a client, several threads, and reports of long waits."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edl.errors import PsError
from edl.job_records import Mode, Training
from ps.client.client import PsClient
from ps.net.caller import FrameReply
from ps.protocol.frames import Frame, FrameOp
from ps.wait import BoundedWait
from tests.support.ps_fixture import WAIT_S, Bench

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


class Gate:
    """Requests of one kind wait here."""

    def __init__(self, bench: Bench, op: FrameOp) -> None:
        self.op, self.came, self.open = op, threading.Semaphore(0), threading.Event()
        for one in bench.pservers.values():
            one.faults.append(self)

    def __call__(self, frame: Frame, head: dict[str, Any]) -> FrameReply | None:
        if frame.op is self.op:
            self.came.release()
            assert self.open.wait(WAIT_S)
        return None


def test_a_push_in_the_background(bench: Bench) -> None:
    client = bench.start(1).client()
    gate = Gate(bench, FrameOp.PUSH)
    client.push({"plain": (KEYS, ones(KEYS))}, wait=False)
    assert gate.came.acquire(timeout=WAIT_S)
    assert client.step == 1 and not client.pull("plain", KEYS).any()
    gate.open.set()
    client.push({"plain": (KEYS, ones(KEYS))})
    assert (client.read("plain", KEYS) == -2).all()
    assert [head["seq"] for head in bench.pservers[1].seen(FrameOp.PUSH)] == [1, 2]


def test_an_error_in_the_background_comes_with_a_later_call(bench: Bench) -> None:
    client = bench.start(1).client()
    refusal = FrameReply.no(FrameOp.REFUSED, kind="word", text="table plain: refused")
    bench.pservers[1].faults.append(
        lambda frame, head: refusal if frame.op is FrameOp.PUSH and head["seq"] == 1 else None
    )
    client.push({"plain": (KEYS, ones(KEYS))}, wait=False)
    with pytest.raises(PsError, match="plain"):
        client.flush()
    client.push({"plain": (KEYS, ones(KEYS))})
    once(client)


@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.SYNC])
def test_rows_fetched_ahead(bench: Bench, mode: Mode) -> None:
    client = bench.start(2).client(training=Training(mode))
    client.pull("plain", KEYS)
    client.prefetch("plain", KEYS)
    client.push({"plain": (KEYS, ones(KEYS))})
    before = client.statistics["prefetched"]
    rows = client.pull("plain", KEYS)
    assert client.statistics["prefetched"] == before + len(KEYS)
    # In mode sync all of the step before is in them; else they may be a step old.
    assert (rows == -1).all() if mode is Mode.SYNC else ((rows == -1) | (rows == 0)).all()
    assert len(bench.pservers[1].seen(FrameOp.PULL)) == 2
    assert (client.pull("plain", KEYS) == -1).all()


def test_rows_fetched_ahead_that_are_too_old_or_others(bench: Bench) -> None:
    client = bench.start(1).client()
    client.prefetch("plain", KEYS)
    client.push({"plain": (KEYS, ones(KEYS))})
    client.push({"plain": (KEYS, ones(KEYS))})
    assert (client.pull("plain", KEYS) == -2).all()
    client.prefetch("plain", KEYS)
    assert (client.pull("plain", KEYS[:10]) == -2).all()
    assert client.statistics["prefetched"] == 0


@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.SYNC])
@pytest.mark.parametrize(("op", "expected"), [("assign", 5), ("add", 5), ("first", 0)])
def test_rows_fetched_ahead_before_their_values_were_set(bench: Bench, mode: Mode, op: str, expected: int) -> None:
    client = bench.start(1).client(training=Training(mode))
    fetched = threading.Event()
    bench.pservers[1].after.append(lambda frame, head: fetched.set() if frame.op is FrameOp.PULL else None)
    client.prefetch("plain", KEYS)
    assert fetched.wait(WAIT_S)
    client.push({"plain": (KEYS, 5 * ones(KEYS))}, op=op)
    assert (client.pull("plain", KEYS) == expected).all()


def test_rows_fetched_ahead_in_another_shape(bench: Bench) -> None:
    """Layers that are looked up together pull flat keys, whatever the shape of the batch."""
    client = bench.start(1).client()
    batch = KEYS[:10].reshape(5, 2)
    client.prefetch("plain", batch)
    united, _ = client.pull_distinct({"plain": batch.reshape(-1)})["plain"]
    assert united.inverse is not None and np.array_equal(united.keys[united.inverse], KEYS[:10])
    client.prefetch("plain", KEYS[:10])
    assert client.pull("plain", batch).shape == (5, 2, 4)
    assert client.statistics["prefetched"] == 20 and len(bench.pservers[1].seen(FrameOp.PULL)) == 2


def test_several_threads_may_use_it(bench: Bench) -> None:
    client = bench.start(2).client()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                assert client.pull("wide", KEYS).shape == (2000, 9)
                client.push({"plain": (KEYS, ones(KEYS))})
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(WAIT_S)
    assert not errors and (client.read("plain", KEYS) == -80).all() and client.step == 80


def test_leaving_sends_a_farewell_and_closing_does_not(bench: Bench) -> None:
    bench.start(1)
    with bench.client(number=3) as client:
        client.pull("plain", KEYS)
    with pytest.raises(ValueError), bench.client(number=4) as other:
        other.pull("plain", KEYS)
        raise ValueError
    pserver = bench.pservers[1]
    for _ in range(2):
        assert pserver.ended.acquire(timeout=WAIT_S)
    assert pserver.farewells == [3]
    with pytest.raises(PsError, match="client is closed"):
        client.pull("plain", KEYS)


def test_long_waits_and_their_ends_are_reported() -> None:
    now, alive = [0.0], [0]
    said: list[str] = []
    wait = BoundedWait(
        "rows",
        deadline_s=100,
        now_s=lambda: now[0],
        notify=said.append,
        alive=lambda: alive.__setitem__(0, alive[0] + 1),
    )
    for now[0] in range(1, 80):
        wait.look(lambda: "ps-1 is busy")
    assert said == [f"waiting for rows for {one} s: ps-1 is busy" for one in (10, 40, 70)] and alive == [15]
    wait.moved()
    wait.over()
    wait.over()
    assert said[3:] == ["continuing after 79 s (rows)"]
    now[0] = 178.0
    assert wait.left_s == 1
    now[0] = 179.0
    with pytest.raises(PsError, match="waited 179 s for rows, 100 s of it without progress: ps-1 is gone"):
        wait.look(lambda: "ps-1 is gone")


# --- what a push says about the age of the rows that its gradients belong to ---


def bases(bench: Bench, trainer: int = 1) -> list[int]:
    """The bases of this trainer's pushes, at the first pserver."""
    return [head["base"] for head in bench.pservers[1].seen(FrameOp.PUSH) if head["trainer"] == trainer]


def pushes(bench: Bench, count: int) -> None:
    """A new trainer pushes this often."""
    other = bench.client(number=len(bench.clients) + 1)
    for _ in range(count):
        other.push({"plain": (KEYS, ones(KEYS))})


def test_prefetching_does_not_make_the_rows_of_this_step_younger(bench: Bench) -> None:
    client = bench.start(1).client()
    client.pull("plain", KEYS)
    pushes(bench, 5)
    client.prefetch("plain", KEYS[:10])
    job = client._reader._ahead._batches["plain"].job
    assert job is not None and job.wait(WAIT_S)
    client.push({"plain": (KEYS, ones(KEYS))})
    assert bases(bench) == [0]
    pushes(bench, 3)
    client.pull("plain", KEYS[:10])  # the prefetched rows
    assert client.statistics["prefetched"] == 10
    client.push({"plain": (KEYS[:10], ones(KEYS[:10]))})
    assert bases(bench) == [0, 5]


def test_the_oldest_rows_of_a_step_count(bench: Bench) -> None:
    client = bench.start(1).client()
    client.pull("plain", KEYS)
    pushes(bench, 2)
    client.pull("wide", KEYS)
    client.read("plain", KEYS)
    client.push({"plain": (KEYS, ones(KEYS))})
    pushes(bench, 1)
    client.read("plain", KEYS)
    client.pull("plain", KEYS)
    client.push({"plain": (KEYS, ones(KEYS))})
    assert bases(bench) == [0, 4]


def test_a_push_in_the_background_has_the_age_of_its_own_rows(bench: Bench) -> None:
    client = bench.start(1).client()
    gate = Gate(bench, FrameOp.PUSH)
    client.pull("plain", KEYS)
    client.push({"plain": (KEYS, ones(KEYS))}, wait=False)
    assert gate.came.acquire(timeout=WAIT_S)
    gate.open.set()
    pushes(bench, 2)
    client.flush()
    client.pull("plain", KEYS)
    client.push({"plain": (KEYS, ones(KEYS))})
    assert bases(bench) == [0, 3]


def test_rows_that_come_back_with_a_push_are_as_young_as_pulled_ones(bench: Bench) -> None:
    """A script that has only dense parameters pulls once."""
    client = bench.start(1).client()
    client.pull("plain", KEYS, insert=False)
    for _ in range(3):
        pushes(bench, 2)
        client.push_and_pull({"plain": (KEYS, ones(KEYS))}, ["plain"])
    assert bases(bench) == [0, 3, 6]


def test_who_leaves_with_a_push_that_failed_closes(bench: Bench) -> None:
    client = bench.start(1).client()
    bench.pservers[1].faults.append(
        lambda frame, head: FrameReply.no(FrameOp.REFUSED, text="broken") if frame.op is FrameOp.PUSH else None
    )
    client.push({"plain": (KEYS, ones(KEYS))}, wait=False)
    job = client._writer._outstanding
    assert job is not None and job.wait(WAIT_S)
    with pytest.raises(PsError, match="broken"):
        client.leave()
    with pytest.raises(PsError, match="client is closed"):
        client.pull("plain", KEYS)
