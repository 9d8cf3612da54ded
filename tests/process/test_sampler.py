"""Samples through faults and resizes: real launchers, real workers, both frameworks; each sample once an epoch."""

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
from tests.sampler_histories import History

SCRIPT = WORKERS / "sampler_worker.py"
SAMPLES = 613
"""As in the script."""


def lines(running: Job) -> list[dict[str, Any]]:
    """Steps of all workers in the committed history; of a repeated step, the last attempt counts."""
    found = []
    for path in running.steps_folder.glob("*.samples"):
        found += [json.loads(line) for line in path.read_text().splitlines()]
    newest: dict[int, int] = {}
    for line in found:
        newest[line["step"]] = max(newest.get(line["step"], 0), line["round"])
    return [line for line in found if newest[line["step"]] == line["round"]]


@pytest.fixture
def short() -> Iterator[str]:
    """A folder for the sockets of the loading processes: a socket's path may have 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.soak_but("paddle")
def test_each_sample_once_an_epoch(etcd: OutsideEtcd, tmp_path: Path, short: str, framework: str) -> None:
    """A worker is killed and a node joins in the middle of epochs. Under torch, two processes load for each worker."""
    arguments = (f"--framework={framework}",)
    named: dict[str, Any] = {"environment": {"TMPDIR": short}}
    with Job(tmp_path, [etcd.endpoint], script=(str(SCRIPT),), arguments=arguments, nnodes="1:3", **named) as running:
        running.start("a", "b")
        seen = running.wait_world(2)
        running.wait_steps(5)
        os.kill(seen.pids[1], signal.SIGKILL)
        seen = running.wait_world(2, after=seen.round)
        running.start("c")
        seen = running.wait_world(3, after=seen.round)
        running.wait_steps(5)
        last = max(line["epoch"] for line in lines(running)) + 1
        file = running.steps_folder / "last-epoch"
        file.with_suffix(".new").write_text(str(last))
        file.with_suffix(".new").replace(file)
        assert set(running.exit_codes().values()) == {0}
        check(lines(running), last)


def check(taken: list[dict[str, Any]], last: int) -> None:
    rounds = collections.defaultdict(set)
    for epoch in range(last + 1):
        here = [line for line in taken if line["epoch"] == epoch]
        samples = sorted(sample for line in here for sample in line["samples"])
        assert samples == list(range(SAMPLES)), f"epoch {epoch}: {len(samples)} samples, {len(set(samples))} different"
        rounds[epoch] = {line["round"] for line in here}
    assert max(line["epoch"] for line in taken) == last
    assert len(set().union(*rounds.values())) >= 3 and any(len(found) > 1 for found in rounds.values())


@pytest.mark.soak
def test_ten_thousand_histories() -> None:
    """tests/unit/edl/worker/test_sampler.py runs some of them."""
    pytest.importorskip("numpy")
    for seed in range(10_000):
        History(seed).run()
