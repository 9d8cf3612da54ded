"""All of a step together, in real jobs: the loader, ``accumulate`` and ``scale_lr``, under settings that change in the
middle of an epoch and a world that grows and shrinks. Each sample counts once, with its weight, at the right LR."""

from __future__ import annotations

import collections
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import WORKERS, Job, OutsideEtcd

SAMPLES, LR = 613, 0.01
"""As in the script."""
OPTIONS = ("--global-batch=50", "--local-batch=8", "--lr-rule=linear", "--lr-warmup=5")


@pytest.fixture
def short() -> Iterator[str]:
    """A folder for the sockets of the loading processes: a socket's path may have 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder


def committed(running: Job) -> dict[int, list[dict[str, Any]]]:
    """By step, what its ranks have noted; of a step that was made again, the last time counts."""
    steps: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
    for path in running.steps_folder.glob("*.taken"):
        text = path.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            steps[(one := json.loads(line))["step"]].append(one)
    newest = {step: max(one["round"] for one in found) for step, found in steps.items()}
    return {step: [one for one in found if one["round"] == newest[step]] for step, found in sorted(steps.items())}


def newest_epoch(running: Job) -> int:
    return int(next(reversed(committed(running).values()))[0]["epoch"])


def the_same(lines: list[dict[str, Any]], *names: str) -> tuple[Any, ...]:
    """Values that all ranks have noted alike."""
    (values,) = {tuple(line[name] for name in names) for line in lines}
    return values


@pytest.mark.soak
def test_every_sample_counts_once_with_its_weight(
    etcd: OutsideEtcd, tmp_path: Path, short: str, framework: str
) -> None:
    named: dict[str, Any] = {"arguments": (f"--framework={framework}",), "environment": {"TMPDIR": short}}
    script = (str(WORKERS / "step_worker.py"),)
    with Job(tmp_path, [etcd.endpoint], nnodes="1:3", script=script, options=OPTIONS, **named) as running:
        running.start("a", "b")
        seen = running.wait_world(2)
        running.wait_steps(3)
        changed = running.cli("set", "global-batch=100", "lr-scale=0.75")
        assert changed.returncode == 0, changed.stderr
        running.wait_steps(3)
        running.start("c")
        seen = running.wait_world(3, after=seen.round)
        running.wait_steps(2)
        os.kill(seen.pids_of("b")[0], signal.SIGKILL)
        seen = running.wait_world(3, after=running.wait_world(2, after=seen.round).round)
        last = newest_epoch(running) + 1
        (running.steps_folder / "last-epoch.new").write_text(str(last))
        (running.steps_folder / "last-epoch.new").replace(running.steps_folder / "last-epoch")
        assert set(running.exit_codes().values()) == {0}
        check(committed(running), last)


def check(steps: dict[int, list[dict[str, Any]]], last: int) -> None:
    assert list(steps) == list(range(1, len(steps) + 1))
    epochs: dict[int, list[float]] = collections.defaultdict(list)
    weight = 0.0
    sizes: dict[int, set[int]] = collections.defaultdict(set)
    factors = []
    for step, lines in steps.items():
        epoch, number, total, factor, world = the_same(lines, "epoch", "number", "total", "factor", "world")
        assert {line["rank"] for line in lines} == set(range(world)), step
        samples = [sample for line in lines for sample in line["samples"]]
        assert len(samples) == total and sum(sum(line["weights"]) for line in lines) == pytest.approx(1, abs=1e-12)
        assert len({len(line["weights"]) for line in lines}) == 1
        weight -= LR * factor * sum(samples) / total
        assert the_same(lines, "weight")[0] == pytest.approx(weight, rel=1e-9), step
        factors.append(factor)
        if len(epochs[epoch]) + total < SAMPLES:
            sizes[number].add(total)
        epochs[epoch] += samples
    for epoch in range(last + 1):
        assert sorted(epochs[epoch]) == list(range(SAMPLES)), epoch
    assert sizes.pop(1) == {50} and set().union(*sizes.values()) == {100}
    assert factors[0] == 1 and factors[-1] == 1.5 and len(set(factors)) > 4, "linear, times 0.75, after a ramp"
