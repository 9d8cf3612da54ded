"""Trainers that others wrote, with edl's integrations: real launchers, real workers, and the trainers themselves.

Those that CI does not install are skipped there, and say so.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import WORKERS, Job, OutsideEtcd, Seen
from tests.process.test_clients import OFFLINE, installed

TRAINERS = {
    "transformers": ("torch", "accelerate", "transformers"),
    "transformers_fsdp2": ("torch", "accelerate", "transformers"), "lightning": ("torch", "lightning"),
    "accelerate": ("torch", "accelerate"), "accelerate_fsdp2": ("torch", "accelerate"),
    "paddle_model": ("paddle",), "fleet": ("paddle",), "torchtitan": ("torch", "datasets", "torchdata", "torchtitan"),
}  # fmt: skip
"""What is needed by each trainer, whose script is named after it."""
every_trainer = pytest.mark.parametrize(
    "trainer", [pytest.param(name, marks=getattr(pytest.mark, needed[0])) for name, needed in TRAINERS.items()]
)
SAMPLES, BATCH = 96, 8
STEPS = 120
TOLERANCE = 1e-5


def job(trainer: str, etcd: OutsideEtcd, folder: Path, *arguments: str, **named: Any) -> Job:
    installed(*TRAINERS[trainer])
    script = str(WORKERS / f"trainer_{trainer}.py")
    return Job(
        folder, [etcd.endpoint], script=(script,), environment=OFFLINE,
        arguments=(f"--samples={SAMPLES}", f"--global-batch={BATCH}", *arguments), **named,
    )  # fmt: skip


def result(running: Job, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((running.steps_folder / f"rank-{rank}.json").read_text())
    return found


def redone(running: Job) -> list[int]:
    """Steps that were made in more than one round."""
    rounds = Counter(step for step, _ in {(one.step, one.round) for one in running.steps()})
    return sorted(step for step, times in rounds.items() if times > 1)


def samples_of_steps(running: Job) -> dict[int, list[int]]:
    """The samples that each step was made of when it was made last, over all ranks."""
    newest: dict[int, int] = {}
    for one in running.steps():
        newest[one.step] = max(one.round, newest.get(one.step, 0))
    found: dict[int, list[int]] = {}
    for path in running.steps_folder.glob("*.samples"):
        number = int(path.name.split(".")[1])
        for line in path.read_text().splitlines():
            step, samples = json.loads(line)
            if newest[step] == number:
                found.setdefault(step, []).extend(samples)
    return found


def each_sample_once_per_epoch(running: Job) -> None:
    steps = samples_of_steps(running)
    per_epoch = SAMPLES // BATCH
    for first in range(1, max(steps) - per_epoch + 2, per_epoch):
        epoch = [sample for step in range(first, first + per_epoch) for sample in steps[step]]
        assert sorted(epoch) == list(range(SAMPLES)), f"the epoch that begins with step {first}"


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in {"step", "sum", "norm", "rate", "best"} & expected.keys():
        assert found[name] == pytest.approx(expected[name], rel=TOLERANCE, abs=TOLERANCE), name


@pytest.fixture
def undisturbed(trainer: str, own_etcd: OutsideEtcd, tmp_path: Path) -> dict[str, Any]:
    """The same training in a world of one that nobody disturbs."""
    with job(trainer, own_etcd, tmp_path / "undisturbed", f"--steps={STEPS}", "--pause=0", nnodes="1") as alone:
        alone.start("alone")
        assert alone.exit_codes() == {"alone": 0}
        return result(alone)


def victim(seen: Seen) -> int:
    return seen.pids[1]


@pytest.mark.slow
@every_trainer
def test_a_trainer_goes_on_from_memory_when_a_worker_dies_and_when_a_node_joins(
    trainer: str, own_etcd: OutsideEtcd, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    with job(trainer, own_etcd, tmp_path, f"--steps={STEPS}", "--pause=0.5", nnodes="1:2") as running:
        running.start("a", "b")
        before = running.wait_world(2)
        running.wait_steps(3)
        killed = victim(before)
        (running.steps_folder / "held").touch()
        os.kill(killed, signal.SIGKILL)
        alone = running.wait_world(1, after=before.round)
        (running.steps_folder / "held").unlink()
        assert set(alone.pids.values()) == set(before.pids.values()) - {killed}, "the survivor keeps its process"
        assert len(redone(running)) <= 1
        again = running.wait_world(2, after=alone.round)
        assert set(alone.pids.values()) < set(again.pids.values())
        lost = redone(running)
        assert len(lost) <= 1, "a worker that joins repeats nothing"
        (running.steps_folder / "hurry").touch()
        assert running.exit_codes() == {"a": 0, "b": 0}
        assert redone(running) == lost
        each_sample_once_per_epoch(running)
        same(result(running), undisturbed)
        same(result(running, 1), undisturbed)


@pytest.mark.soak
@every_trainer
def test_at_a_fixed_size_a_killed_worker_changes_no_bit(trainer: str, own_etcd: OutsideEtcd, tmp_path: Path) -> None:
    """With dropout and accumulation: the replacement draws the numbers that the killed worker would have drawn."""
    arguments = ("--steps=60", "--dropout=0.1", "--batch=2", "--accumulate=2")
    results = []
    for name, kills in (("calm", False), ("killed", True)):
        with job(trainer, own_etcd, tmp_path / name, *arguments, "--pause=0.3", nnodes="2") as running:
            running.start("a", "b")
            before = running.wait_world(2)
            if kills:
                running.wait_steps(3)
                os.kill(victim(before), signal.SIGKILL)
                after = running.wait_world(2, after=before.round)
                assert after.pids[0] == before.pids[0], "the survivor keeps its process"
            (running.steps_folder / "hurry").touch()
            assert running.exit_codes() == {"a": 0, "b": 0}
            assert len(redone(running)) <= 1
            each_sample_once_per_epoch(running)
            results.append({**result(running), "loss": None, "logs": None})
    assert results[0] == results[1]


@pytest.mark.soak
@every_trainer
def test_a_trainer_survives_the_loss_of_a_node_and_leaves_another_in_good_order(
    trainer: str, own_etcd: OutsideEtcd, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    with job(trainer, own_etcd, tmp_path, f"--steps={STEPS}", "--pause=0.5", nnodes="1:3") as running:
        running.start("a", "b")
        before = running.wait_world(2)
        running.start("c")
        three = running.wait_world(3, after=before.round)
        running.wait_steps(3)
        assert redone(running) == []
        running.kill("b")
        del running.nodes["b"]
        two = running.wait_world(2, after=three.round)
        lost = redone(running)
        assert len(lost) <= 1
        running.nodes["a"].send(signal.SIGTERM)
        assert running.nodes.pop("a").exit_code() == 0
        running.wait_world(1, after=two.round)
        (running.steps_folder / "hurry").touch()
        assert running.exit_codes() == {"c": 0}
        assert redone(running) == lost, "a node that leaves repeats nothing"
        each_sample_once_per_epoch(running)
        same(result(running), undisturbed)


@pytest.mark.soak
@every_trainer
def test_when_all_workers_die_the_launchers_still_have_the_state(
    trainer: str, own_etcd: OutsideEtcd, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    with job(trainer, own_etcd, tmp_path, f"--steps={STEPS}", "--pause=0.5", nnodes="2") as running:
        running.start("a", "b")
        before = running.wait_world(2)
        running.wait_steps(3)
        for pid in before.pids.values():
            os.kill(pid, signal.SIGKILL)
        after = running.wait_world(2, after=before.round)
        assert not set(after.pids.values()) & set(before.pids.values())
        (running.steps_folder / "hurry").touch()
        assert running.exit_codes() == {"a": 0, "b": 0}
        assert len(redone(running)) <= 1
        each_sample_once_per_epoch(running)
        same(result(running), undisturbed)


@pytest.mark.soak
@pytest.mark.torch
@pytest.mark.parametrize("trainer", ["torchtitan"])
def test_replicas_of_torchtitans_sharded_model_go_and_come(
    trainer: str, own_etcd: OutsideEtcd, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    arguments = (f"--steps={STEPS}", "--pause=0.5", "--replicas")
    with job(trainer, own_etcd, tmp_path, *arguments, nnodes="1:2", options=("--replica-size=2",)) as running:
        running.start("a", "b", nproc=2)
        before = running.wait_world(4)
        running.wait_steps(3)
        running.kill("b")
        del running.nodes["b"]
        alone = running.wait_world(2, after=before.round)
        assert set(alone.pids.values()) < set(before.pids.values()), "the other replica keeps its processes"
        running.start("c", nproc=2)
        running.wait_world(4, after=alone.round)
        (running.steps_folder / "hurry").touch()
        assert running.exit_codes() == {"a": 0, "c": 0}
        assert len(redone(running)) <= 1
        each_sample_once_per_epoch(running)
        same(result(running, 3), undisturbed)
