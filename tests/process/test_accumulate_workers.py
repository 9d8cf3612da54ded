"""``accumulate`` on several workers: gradients are those of the whole step, however it was split, and logical ranks
give the same bits on any number of workers. Real processes, gloo and edl's ring on the loopback device."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.forking import Forker

SCRIPT = Path(__file__).parent / "workers" / "accumulate_worker.py"
MOST = 4
RANKS = 7


class Process:
    """A worker process."""

    def __init__(self, forker: Forker, framework: str) -> None:
        self._process = forker.start(SCRIPT, framework)
        self.end = self._process.end

    def say(self, *command: Any) -> None:
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def hear(self, within_s: float = 120) -> Any:
        assert select.select([self._process.stdout], [], [], within_s)[0], f"no answer in {within_s} s"
        line = self._process.stdout.readline()
        assert line, "the worker has ended"
        return json.loads(line)


class World:
    """Processes that form worlds of several sizes, one after the other."""

    def __init__(self, framework: str) -> None:
        self.framework = framework
        self._forker = Forker.of(framework)
        self.all = [Process(self._forker, framework) for _ in range(MOST)]
        self._round = 0
        self._held: list[socket.socket] = []
        for one in self.all:
            assert one.hear() == "ready"

    def form(self, size: int) -> list[Process]:
        self._round += 1
        self._release()
        for _ in range(size + 1):
            held = socket.socket()
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            self._held.append(held)
        master, *endpoints = [f"127.0.0.1:{held.getsockname()[1]}" for held in self._held]
        workers = self.all[:size]
        for rank, worker in enumerate(workers):
            worker.say("place", self._round, rank, size, master, endpoints)
        assert [worker.hear() for worker in workers] == ["placed"] * size
        return workers

    def each(self, size: int, *command: Any) -> list[Any]:
        workers = self.form(size)
        for worker in workers:
            worker.say(*command)
        return [worker.hear() for worker in workers]

    def _release(self) -> None:
        for held in self._held:
            held.close()
        self._held.clear()

    def end(self) -> None:
        self._release()
        for one in self.all:
            one.end()


@pytest.fixture(
    scope="module",
    params=[pytest.param("torch", marks=pytest.mark.torch), pytest.param("paddle", marks=pytest.mark.paddle)],
)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    pytest.importorskip(request.param)
    made = World(request.param)
    yield made
    made.end()


@pytest.mark.slow
@pytest.mark.parametrize("size", range(1, MOST + 1))
def test_the_gradient_is_that_of_all_samples(world: World, size: int) -> None:
    """Uneven micro-batches, stand-ins of NaN and infinity, also where the wrapper exchanges."""
    for deviation in world.each(size, "gradients", 25, "float64"):
        assert deviation < 1e-12
    for deviation in world.each(size, "gradients", 10, "float32"):
        assert deviation < 1e-5


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_static_graph_is_recorded_in_the_first_pass(world: World, size: int) -> None:
    """Which DDP cannot leave out of its averages."""
    if world.framework == "paddle":
        pytest.skip("an option of torch's")
    for deviation in world.each(size, "gradients", 10, "float64", True):
        assert deviation < 1e-12
    for said in world.each(size, "static", 4):
        assert said.startswith("--logical-ranks=4: the model was wrapped with static_graph=True")


def test_all_workers_know_the_same_noise(world: World) -> None:
    found = {size: world.each(size, "noise", 5) for size in (1, 2, 3, 4)}
    for size, states in found.items():
        assert all(state == states[0] for state in states)
        assert states[0] == pytest.approx(found[1][0], rel=1e-4), size
    assert found[1][0][2] > 0


@pytest.mark.slow
def test_logical_ranks_give_the_same_bits_on_any_number_of_workers(world: World) -> None:
    """Dropout, batch normalisation, Adam, a step with ranks that have no samples, wrapped or plain."""
    (alone,) = world.each(1, "logical", 6, RANKS, False)
    for size in range(1, MOST + 1):
        for wrapped in (False, True):
            for other in world.each(size, "logical", 6, RANKS, wrapped):
                assert other == alone, (size, wrapped)
    (others,) = world.each(1, "logical", 6, RANKS + 1, False)
    assert others != alone


def test_more_workers_than_logical_ranks_are_refused(world: World) -> None:
    for said in world.each(3, "too_many", 2):
        assert said == "--logical-ranks=2 does not fit 3 workers: each needs one"


def test_a_plain_model_on_several_workers_is_refused(world: World) -> None:
    for said in world.each(2, "plain"):
        assert "on 2 workers: wrap it, edl.parallel(model)" in said
