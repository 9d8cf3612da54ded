"""Paddle workers that lose each other, and go on in another world: real processes, real deaths."""

from __future__ import annotations

import importlib.util
import json
import select
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.process.forking import Forker

pytestmark = [
    pytest.mark.paddle,
    pytest.mark.skipif(importlib.util.find_spec("paddle") is None, reason="paddle is not installed"),
]

SCRIPT = Path(__file__).parent / "workers" / "paddle_rounds.py"
SOON_S = 30.0
"""An abort takes milliseconds; the machine may be busy."""


class Process:
    """A worker process."""

    def __init__(self, forker: Forker) -> None:
        self._process = forker.start(SCRIPT)
        self.signal = self._process.send_signal
        self.end = self._process.end

    def say(self, *command: Any) -> None:
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def hear(self, within_s: float = 60) -> Any:
        if not select.select([self._process.stdout], [], [], within_s)[0]:
            raise AssertionError(f"no answer in {within_s} s")
        line = self._process.stdout.readline()
        assert line, "the worker has ended"
        return json.loads(line)


class World:
    """Workers, and the ports of their rounds as a launcher would hold them."""

    def __init__(self, forker: Forker) -> None:
        self._forker = forker
        self.round = 0
        self._held: list[socket.socket] = []
        self.all: list[Process] = []

    def start(self, count: int) -> list[Process]:
        fresh = [Process(self._forker) for _ in range(count)]
        self.all += fresh
        for each in fresh:
            assert each.hear() == "ready"
        return fresh

    def endpoints(self, count: int) -> list[str]:
        self.release()
        for _ in range(count):
            held = socket.socket()
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("", 0))
            self._held.append(held)
        return [f"127.0.0.1:{held.getsockname()[1]}" for held in self._held]

    def release(self) -> None:
        for held in self._held:
            held.close()
        self._held.clear()

    def form(self, workers: Sequence[Process]) -> list[float]:
        self.round += 1
        endpoints = self.endpoints(len(workers))
        for rank, worker in enumerate(workers):
            worker.say("place", self.round, rank, endpoints)
        took = [worker.hear() for worker in workers]
        assert all(isinstance(each, float) for each in took), took
        return took


@pytest.fixture(scope="module")
def forker() -> Forker:
    return Forker.of("paddle")


@pytest.fixture
def made(forker: Forker) -> Iterator[World]:
    made = World(forker)
    yield made
    made.release()
    for worker in made.all:
        worker.end()


def each(workers: Sequence[Process], *command: Any) -> list[Any]:
    for worker in workers:
        worker.say(*command)
    return [worker.hear() for worker in workers]


def lost(answers: Sequence[Any]) -> bool:
    return all(isinstance(answer, dict) and answer["lost"] and answer["error"] == "PeerLost" for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_peer_dies_in_an_all_reduce(made: World, victim: int) -> None:
    workers = made.start(3)
    made.form(workers)
    for worker in workers:
        worker.say("reduce", 6_000_000, 100_000)
    time.sleep(0.5)
    dead = workers.pop(victim)
    dead.signal(signal.SIGKILL)
    began_s = time.monotonic()
    answers = [worker.hear() for worker in workers]
    assert lost(answers), answers
    assert time.monotonic() - began_s < SOON_S
    made.form(workers)
    assert each(workers, "reduce", 1000, 3) == [1000.0, 1000.0]


def test_a_peer_dies_in_a_training_step_and_a_new_one_comes(made: World) -> None:
    workers = made.start(3)
    made.form(workers)
    for seed, worker in enumerate(workers):
        worker.say("build", seed)  # each other values: the first forward pass takes those of rank 0
        worker.hear()
    digests = each(workers, "train", 3)
    assert len(set(digests)) == 1, digests
    for worker in workers:
        worker.say("train", 1_000_000)
    time.sleep(0.7)
    workers.pop(0).signal(signal.SIGKILL)
    answers = [worker.hear() for worker in workers]
    assert lost(answers), answers
    made.form(workers)
    digests = each(workers, "train", 3)
    assert len(set(digests)) == 1, digests
    workers = [*workers, *made.start(1)]
    made.form(workers)
    workers[-1].say("build", 77)
    workers[-1].hear()
    digests = each(workers, "train", 3)
    assert len(set(digests)) == 1, digests


def test_training_in_parallel_is_training_on_all_data(made: World) -> None:
    """Among the parameters: an embedding with sparse gradients, and layers that one rank or no rank uses."""
    workers = made.start(2)
    made.form(workers)
    each(workers, "build", 5)
    together = each(workers, "train", 5)
    assert together[0] == together[1]
    made.form(workers[:1])
    each(workers[:1], "build", 5)
    assert each(workers[:1], "train_alone", 5, 2)[0] == pytest.approx(together[0], abs=1e-4)
    assert each(workers[:1], "train", 5)[0] != pytest.approx(together[0], abs=1e-3)


def test_gradients_are_added_up_before_they_are_averaged(made: World) -> None:
    workers = made.start(3)
    made.form(workers)
    each(workers, "build", 6)
    each(workers, "train", 1)
    calls = [each(workers, "calls")[0]]
    each(workers, "train", 3)
    calls.append(each(workers, "calls")[0])
    digests = each(workers, "accumulate", 3)
    assert len(set(digests)) == 1, digests
    calls.append(each(workers, "calls")[0])
    assert calls[2] - calls[1] == calls[1] - calls[0], "one averaging for each step"


def test_tensors_are_exchanged(made: World) -> None:
    workers = made.start(3)
    made.form(workers)
    found = each(workers, "tensors")
    assert found[0] == found[1] == found[2]
    for answer, kind in zip(found[0], ("float32", "bfloat16", "int64"), strict=True):
        assert answer == [f"paddle.{kind}", 72.0, 36.0, [0.0, 1.0, 2.0], 1.0]


def test_a_frozen_peer_holds_nobody_that_is_aborted(made: World) -> None:
    workers = made.start(3)
    made.form(workers)
    workers[2].signal(signal.SIGSTOP)
    for worker in workers[:2]:
        worker.say("reduce", 1_000_000, 1000)
    time.sleep(0.5)
    began_s = time.monotonic()
    for worker in workers[:2]:
        worker.say("abort")
    answers = [worker.hear() for worker in workers[:2]]
    assert lost(answers), answers
    assert time.monotonic() - began_s < SOON_S
    made.form(workers[:2])
    workers[2].signal(signal.SIGCONT)
    workers[2].say("reduce", 1_000_000, 1)
    assert lost([workers[2].hear()])
    made.form(workers)


@pytest.mark.soak
def test_two_hundred_rounds_leave_nothing_behind(made: World) -> None:
    workers = made.start(3)
    made.form(workers)
    for worker in workers:
        worker.say("build", 1)
        worker.hear()
    before: list[list[int]] = []
    for number in range(200):
        each(workers, "train", 1)
        # In turn: all of them are aborted, and one alone, whose peers must find out.
        for worker in workers:
            worker.say("reduce", 100_000, 1_000_000)
        for worker in workers if number % 2 else workers[:1]:
            worker.say("abort")
        assert lost([worker.hear() for worker in workers])
        made.form(workers)
        if number == 20:
            before = each(workers, "used")
    for then, now in zip(before, each(workers, "used"), strict=True):
        assert now[:2] == then[:2]
        assert now[2] - then[2] < 30_000
