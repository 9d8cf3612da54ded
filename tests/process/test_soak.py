"""Many faults in a row on one job of four nodes: it ends with the right number of steps, and nothing stays behind.

``pytest tests/process/test_soak.py --soak`` runs it in full length, with both frameworks. At the end of the file: the
short form of ``scripts/soak``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.process.free_ports import free_endpoints
from tests.process.harness import PLAIN, ROOT, WORKERS, Job, Seen, stopped

HOSTS = ("a", "b", "c", "d")
FAULTS = ("kill a worker", "kill a node", "kill the Master", "freeze a worker", "freeze a node")


@dataclass(frozen=True)
class Size:
    """Size of a soak test."""

    faults: int
    freeze_s: float
    lease_s: float


SHORT = Size(faults=5, freeze_s=4.0, lease_s=2.0)
LONG = Size(faults=20, freeze_s=10.0, lease_s=3.0)


def soak(folder: Path, script: Path, seed: int, size: Size) -> None:
    """Each kind of fault comes once before any comes again, so that a short run has seen them all."""
    draw = random.Random(seed)
    kinds: list[str] = []
    while len(kinds) < size.faults:
        kinds += draw.sample(FAULTS, len(FAULTS))
    # Three members: any one launcher may die with its store.
    options = (f"--lease-ttl={size.lease_s:g}", "--max-restarts=1000", "--slot-strikes=0")
    with Job(folder, free_endpoints(3), "etcd-embedded", options=options, script=(str(script),)) as job:
        job.start(*HOSTS)
        seen = job.wait_world(len(HOSTS))
        for number, kind in enumerate(kinds[: size.faults], start=1):
            begun = time.monotonic()
            seen = job.wait_steps(3, len(HOSTS))
            strike(job, seen, kind, draw, size)
            seen = job.wait_world(len(HOSTS), after=seen.round)
            print(f"seed {seed}, fault {number}: {kind}; whole again in {time.monotonic() - begun:.1f} s")
        last = job.end_soon()
        assert job.exit_codes() == dict.fromkeys(HOSTS, 0)
        made = [step.step for step in job.steps() if step.rank == 0]
        assert sorted(set(made)) == list(range(1, last + 1))
        # A node that goes and comes back makes two rounds, and each may do one interrupted step again.
        assert len(made) <= last + 2 * size.faults + 2
        assert {step.world for step in job.steps()} <= {3, 4}
        assert not list(job.temporary.glob("*/**/*"))


def strike(job: Job, seen: Seen, kind: str, draw: random.Random, size: Size) -> None:
    """One fault; what was killed is started again."""
    victim = draw.choice(HOSTS)
    if kind == "kill a worker":
        os.kill(seen.pids[draw.randrange(len(HOSTS))], signal.SIGKILL)
    elif kind == "freeze a worker":
        with stopped(seen.pids[draw.randrange(len(HOSTS))]):
            time.sleep(size.freeze_s)
    elif kind == "freeze a node":
        with stopped(job.nodes[victim].process.pid):
            time.sleep(size.freeze_s)
    else:
        name = job.status()["master"] if kind == "kill the Master" else victim
        job.kill(name)
        job.start(name)


@pytest.mark.slow
def test_a_few_faults_in_a_row(tmp_path: Path) -> None:
    soak(tmp_path, PLAIN, seed=1, size=SHORT)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("script", ["ddp_torch.py", "dp_paddle.py"])
def test_many_faults_in_a_row(tmp_path: Path, script: str) -> None:
    soak(tmp_path, WORKERS / script, seed=random.randrange(1_000_000), size=LONG)


@pytest.mark.torch
@pytest.mark.soak
def test_the_soak_of_all_kinds_in_short(tmp_path: Path) -> None:
    """Two kinds of jobs and three kinds of faults, for a moment: every record and every loss is accounted for."""
    pytest.importorskip("pyarrow")
    out = tmp_path / "out"
    words = ["--minutes=0.4", "--seed=3", "--kinds=torch,data", "--faults=kill-worker,kill-launcher,stop-member"]
    words += ["--every=4", "--job-minutes=0.4", "--lease-ttl=5", "--pause=0.05", f"--out={out}"]
    command = [sys.executable, "-m", "benchmarks.soak", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    told = json.loads((out / "report.json").read_text())
    assert told["good"] and told["violations"] == []
    assert set(told["finished"]) == {"torch", "data"}
    assert len(told["faults"]) >= 2 and all(one["done"] for one in told["faults"])
    assert told["accounts"]["torch"]["losses"] > 20 and told["accounts"]["data"]["records"] >= 2 * 960
    assert "Nothing was violated." in (out / "report.md").read_text()
    assert sorted(path.name for path in (out / "jobs").iterdir()) == []
