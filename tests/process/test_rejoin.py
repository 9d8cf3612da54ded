"""Coming back in the same process, and changes that lose nothing: real launchers, real workers, both frameworks."""

from __future__ import annotations

import collections
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import WORKERS, Job, OutsideEtcd, Step, until

SCRIPTS = {"torch": WORKERS / "rejoin_torch.py", "paddle": WORKERS / "rejoin_paddle.py"}


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[OutsideEtcd]:
    with OutsideEtcd(tmp_path / "etcd") as store:
        yield store


def job(etcd: OutsideEtcd, tmp_path: Path, framework: str, *arguments: str, **named: Any) -> Job:
    return Job(tmp_path, [etcd.endpoint], script=(str(SCRIPTS[framework]),), arguments=arguments, **named)


def redone(steps: list[Step]) -> list[int]:
    """Steps that a rank made more than once; in each round rank 0 stands for all."""
    counts = collections.Counter(step.step for step in steps if step.rank == 0)
    return sorted(step for step, times in counts.items() if times > 1)


def finish(running: Job, ahead: int = 40) -> dict[str, Any]:
    """Let it train a little more and end in good order; what rank 0 says of the model."""
    last = max(step.step for step in running.steps()) + ahead
    running.stop_at(last)
    assert set(running.exit_codes().values()) == {0}
    result: dict[str, Any] = json.loads((running.steps_folder / "result.json").read_text())
    assert result["step"] == last
    return result


_undisturbed: dict[str, list[dict[str, Any]]] = {}
"""By framework: the model after each step of a world of one."""


def undisturbed(etcd: OutsideEtcd, tmp_path: Path, framework: str, steps: int) -> dict[str, Any]:
    """The same training in a world of one, after so many steps. It is trained once, further if that was too short."""
    known = _undisturbed.get(framework, [])
    if len(known) < steps:
        length = max(600, steps + steps // 4)
        with job(etcd, tmp_path, framework, f"--steps={length}", "--pause=0", "--results", nnodes="1") as alone:
            alone.start("alone")
            assert alone.exit_codes() == {"alone": 0}
            known = [json.loads(line) for line in (alone.steps_folder / "results").read_text().splitlines()]
        assert [one["step"] for one in known] == list(range(1, length + 1))
        _undisturbed[framework] = known
    return known[steps - 1]


def same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert result["norm"] == pytest.approx(expected["norm"], rel=1e-7)
    assert result["sum"] == pytest.approx(expected["sum"], rel=1e-7)


@pytest.mark.soak_but("torch")
def test_survivors_of_a_worker_and_of_a_node_keep_their_processes(
    etcd: OutsideEtcd, tmp_path: Path, framework: str
) -> None:
    with job(etcd, tmp_path, framework) as running:
        running.start("a", "b", "c")
        before = running.wait_world(3)
        running.wait_steps(5)
        victim = before.pids_of("b")[0]
        os.kill(victim, signal.SIGKILL)
        grown = running.wait_world(3, after=before.round)  # after one of two, unless the new worker is ready before
        survivors = set(before.pids.values()) - {victim}
        since = [set(seen.pids.values()) for seen in running.rounds() if seen.round > before.round]
        assert all(survivors <= pids for pids in since), "the survivors' processes go on"
        assert victim not in grown.pids.values()
        running.wait_steps(5)
        once = redone(running.steps())
        assert len(once) <= 1, "at most the interrupted step"
        running.kill(grown.nodes[0])
        del running.nodes[grown.nodes[0]]
        shrunk = running.wait_world(2, after=grown.round)
        assert set(shrunk.pids.values()) == set(grown.pids.values()) - {grown.pids[0]}
        running.wait_steps(5)
        assert len(redone(running.steps())) <= len(once) + 1
        result = finish(running)
        same(result, undisturbed(etcd, tmp_path, framework, result["step"]))


@pytest.mark.soak_but("paddle")
def test_growing_and_draining_lose_no_step(etcd: OutsideEtcd, tmp_path: Path, framework: str) -> None:
    with job(etcd, tmp_path, framework) as running:
        running.start("a", "b")
        seen = running.wait_world(2)
        running.start("c", "d")
        seen = running.wait_world(4, after=seen.round)
        running.wait_steps(5)
        running.nodes["a"].send(signal.SIGTERM)
        assert running.nodes["a"].exit_code() == 0
        seen = running.wait_world(3, after=seen.round)
        assert "a" not in seen.nodes.values()
        for name in ("b", "c"):
            running.nodes[name].send(signal.SIGTERM)
            assert running.nodes[name].exit_code() == 0
        seen = running.wait_world(1, after=seen.round)
        running.start("e")
        seen = running.wait_world(2, after=seen.round)
        running.wait_steps(5)
        assert redone(running.steps()) == [], "no step lost or redone"
        for name in "abc":
            del running.nodes[name]
        result = finish(running)
        same(result, undisturbed(etcd, tmp_path, framework, result["step"]))


@pytest.mark.slow
@pytest.mark.soak_but("paddle")
def test_one_fixed_size_waits_for_the_replaced_worker(etcd: OutsideEtcd, tmp_path: Path, framework: str) -> None:
    with job(etcd, tmp_path, framework, nnodes="2") as running:
        running.start("a", "b")
        before = running.wait_world(2)
        running.wait_steps(5)
        os.kill(before.pids[1], signal.SIGKILL)
        after = running.wait_world(2, after=before.round)
        assert after.pids[0] == before.pids[0] and after.pids[1] != before.pids[1]
        running.wait_steps(5)
        assert len(redone(running.steps())) <= 1
        finish(running)


@pytest.mark.slow
@pytest.mark.soak_but("paddle")
def test_the_spare_goes_on_from_its_copy(etcd: OutsideEtcd, tmp_path: Path, framework: str) -> None:
    """A node dies with its memory; nobody else has the state but the node that keeps its copy."""
    with job(etcd, tmp_path, framework, "--digests", nnodes="1") as running:
        running.start("a")
        seen = running.wait_world(1)
        running.start("b")
        running.nodes["a"].says("node b is ready with 1 slot, its workers wait")
        running.wait_status(lambda status: status["holders"] >= 2, "a commit is on both nodes")
        running.wait_steps(20)
        running.kill("a")
        del running.nodes["a"]
        after = running.wait_world(1, after=seen.round)
        running.wait_steps(5)
        steps = running.steps()
        assert after.nodes[0] == "b"
        first = min(step.step for step in steps if step.round == after.round)
        last = max(step.step for step in steps if step.round == seen.round)
        assert 0 < first - 1 <= last, "copies are sent while training goes on, so the newest may be some commits old"
        committed, restored = (
            dict(line.split() for line in (running.steps_folder / f"digests-{what}").read_text().splitlines())
            for what in ("committed", "restored")
        )
        assert restored[str(first - 1)] == committed[str(first - 1)], "every tensor, bit for bit"
        result = finish(running)
        same(result, undisturbed(etcd, tmp_path, framework, result["step"]))


@pytest.mark.slow
@pytest.mark.soak_but("paddle")
def test_the_whole_job_goes_on_from_the_checkpoint_directory(etcd: OutsideEtcd, tmp_path: Path, framework: str) -> None:
    folder = tmp_path / "checkpoints"
    options = (f"--checkpoint-dir={folder}",)
    with job(etcd, tmp_path, framework, "--save-every=10", options=options, name="lasting") as running:
        running.start("a", "b")
        running.wait_world(2)
        until(lambda: len(list(folder.glob("*/DONE"))) >= 2, "two checkpoints")
        for name in "ab":
            running.kill(name)
        newest = max(int(done.parent.name.split(".")[0].partition("-")[2]) for done in folder.glob("*/DONE"))
    with job(etcd, tmp_path / "again", framework, "--save-every=10", options=options, name="lasting") as running:
        running.start("c")
        running.wait_world(1)
        running.wait_steps(5)
        assert min(step.step for step in running.steps()) == newest + 1
        result = finish(running)
    same(result, undisturbed(etcd, tmp_path, framework, result["step"]))
