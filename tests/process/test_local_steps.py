"""Local SGD and DiLoCo between real workers: exact, and with a worker that is killed and replaced."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.process.harness import WORKERS, Job, OutsideEtcd, until

EVERY = 5
SCRIPTS = {"torch": WORKERS / "local_torch.py", "paddle": WORKERS / "local_paddle.py"}


def job(etcd: OutsideEtcd, tmp_path: Path, framework: str, *arguments: str, **named: Any) -> Job:
    """Bits are compared at each commit, which is at each outer step."""
    checked = ("--verify-state=1",)
    return Job(
        tmp_path, [etcd.endpoint], script=(str(SCRIPTS[framework]),), arguments=arguments, options=checked, **named
    )


def outer_steps(running: Job) -> list[dict[str, Any]]:
    """All that any worker has logged, by outer step."""
    lines = [line for path in running.steps_folder.glob("*.outer") for line in path.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda one: (one["outer"], one["round"], one["rank"]))


def results(running: Job, workers: int) -> list[dict[str, Any]]:
    return [json.loads((running.steps_folder / f"result-{rank}").read_text()) for rank in range(workers)]


def batch(step: int, rank: int) -> Any:
    return np.random.default_rng([step, rank]).normal(size=(2 if rank else 6, 8))


class NumpyAdamW:
    """Written from the formulas, for the linear model of the workers: eight weights, one bias."""

    def __init__(self) -> None:
        self.m, self.v, self.steps = np.zeros(9), np.zeros(9), 0

    def update(self, parameters: Any, x: Any) -> Any:
        self.steps += 1
        difference = x @ parameters[:8] + parameters[8] - x.sum(1)
        g = np.append(2 * x.T @ difference, 2 * difference.sum()) / len(x)
        self.m, self.v = 0.9 * self.m + 0.1 * g, 0.999 * self.v + 0.001 * g * g
        change = (self.m / (1 - 0.9**self.steps)) / (np.sqrt(self.v / (1 - 0.999**self.steps)) + 1e-8)
        return parameters * (1 - 0.05 * 0.01) - 0.05 * change


def diloco(outer: int, every: int = EVERY) -> list[Any]:
    """The parameters after each outer step, by the equations of arXiv 2311.08105, with shares 3/4 and 1/4."""
    theta, buffer, found = np.zeros(9), np.zeros(9), []
    inner = [NumpyAdamW(), NumpyAdamW()]
    for t in range(outer):
        gradient = np.zeros(9)
        for rank, share in enumerate((0.75, 0.25)):
            local = theta
            for step in range(t * every, (t + 1) * every):
                local = inner[rank].update(local, batch(step, rank))
            gradient += share * (theta - local)
        buffer = 0.9 * buffer + gradient
        theta = theta - 0.7 * (gradient + 0.9 * buffer)
        found.append(theta)
    return found


def loss(parameters: Any) -> float:
    """On the data of the workers' ``error``."""
    x = np.random.default_rng(99).normal(size=(64, 8))
    return float(((x @ parameters[:8] + parameters[8] - x.sum(1)) ** 2).mean())


@pytest.mark.slow
def test_outer_steps_are_exact(etcd: OutsideEtcd, tmp_path: Path, framework: str) -> None:
    with job(etcd, tmp_path, framework, "--exact", "--steps=40", nnodes="1") as running:
        running.start("a", nproc=2)
        assert running.exit_codes() == {"a": 0}
        steps, (first, second) = outer_steps(running), results(running, 2)
    assert [(one["outer"], one["rank"]) for one in steps] == [(outer, rank) for outer in range(1, 9) for rank in (0, 1)]
    for one, expected in zip(steps, np.repeat(diloco(8), 2, axis=0), strict=True):
        np.testing.assert_allclose(one["parameters"], expected, rtol=1e-9, atol=1e-12)
    assert first == second, "the same bits on all workers"
    np.testing.assert_allclose(first["averaged"], first["ddp"], rtol=1e-12, atol=1e-14)
    if framework == "torch":
        assert first["small"] != first["averaged"], "it was sent in 16 bits"
        np.testing.assert_allclose(first["small"], first["averaged"], atol=0.02)


@pytest.mark.soak_but("torch")
@pytest.mark.slow
def test_a_killed_worker_costs_nobody_else_an_inner_step(etcd: OutsideEtcd, tmp_path: Path, framework: str) -> None:
    """Under torch the survivor goes on alone, and the other node leaves in good order later; under Paddle, at a fixed
    size, it waits for the replacement."""
    elastic = framework == "torch"
    arguments = ("--every=20", "--pause=0.02")
    with job(etcd, tmp_path, framework, *arguments, nnodes="1:2" if elastic else "2") as running:
        running.start("a", "b")
        before = running.wait_world(2)
        until(lambda: any(one["outer"] == 2 for one in outer_steps(running)), "two outer steps")
        victim = before.pids_of("b")[0]
        until(lambda: 4 < max(one.step for one in running.steps()) % 20 < 12, "the middle of the inner steps")
        os.kill(victim, signal.SIGKILL)
        if elastic:
            alone = running.wait_world(1, after=before.round)
            assert alone.pids_of("a") == before.pids_of("a"), "the survivor keeps its process"
        after = running.wait_world(2, after=before.round)
        assert after.pids_of("a") == before.pids_of("a")
        assert after.pids_of("b") != [victim]
        newest = outer_steps(running)[-1]["outer"]
        until(lambda: outer_steps(running)[-1]["outer"] >= newest + 2, "two more outer steps")
        if elastic:
            running.nodes["b"].send(signal.SIGTERM)
            assert running.nodes.pop("b").exit_code() == 0
            running.wait_world(1, after=after.round)
        last = max(one.step for one in running.steps()) + 60
        running.stop_at(last)
        assert set(running.exit_codes().values()) == {0}
        (survivor,) = before.pids_of("a")
        made = [one.step for one in running.steps() if one.pid == survivor]
        outer = outer_steps(running)
        found = results(running, 1 if elastic else 2)
    assert made == list(range(1, last + 1)), "no inner step of the survivor is lost or made again"
    mine = [one["outer"] for one in outer if one["pid"] == survivor]
    assert mine == list(range(1, mine[-1] + 1)), "no outer step is lost or made again"
    for one in outer:
        same = [other["parameters"] for other in outer if other["outer"] == one["outer"]]
        assert all(other == same[0] for other in same), "one result of each outer step, with any worker"
    assert all(one == found[0] for one in found)
    curve = [one["loss"] for one in outer if one["pid"] == survivor]
    undisturbed = [loss(parameters) for parameters in diloco(len(curve), every=20)]
    start = loss(np.zeros(9))
    np.testing.assert_allclose(curve, undisturbed, atol=0.2 * start)
    assert curve[-1] < start / 4
