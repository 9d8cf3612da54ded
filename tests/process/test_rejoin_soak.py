"""Kills, joins and departures one after another in one job whose workers come back in process: nothing is lost, nothing
is trained differently, and nothing piles up in those who see it all.

``pytest tests/process/test_rejoin_soak.py --soak`` runs it in full length.
"""

from __future__ import annotations

import collections
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.process.harness import Job, OutsideEtcd, Seen, Step
from tests.process.test_rejoin import finish, job, same, undisturbed

SPARED, STEADY, CHANGING = "a", "b", ("c", "d")
"""Nothing happens to the first node, only workers die on the second, the others go and come back."""
HOSTS = (*CHANGING, SPARED, STEADY)
"""In the order in which they are started: the first one becomes the Master, so that Masters die, too."""
WORKER, WORKERS, NODE, DRAIN, RETURN = "kill a worker", "kill two workers", "kill a node", "drain a node", "return"
UNPLANNED = {WORKER: 1, WORKERS: 2, NODE: 1}
"""How many may lose a step by it."""
ALLOWED = {"descriptors": 8, "threads": 2, "megabytes": 16}
"""By how much the typical figure may differ between the first and the last quarter: a node keeps copies for now one,
now two others, with some buffers each."""


def course(draw: random.Random, count: int) -> Iterator[str]:
    """So many events, and a node's return if one is away at the end. Each kind comes once before any comes again."""
    kinds: list[str] = []
    away, made = False, 0
    while made < count or away:
        kinds = kinds or draw.sample((WORKER, WORKERS, NODE, DRAIN), 4)
        back = away and (made >= count or kinds[-1] in (NODE, DRAIN) or draw.random() < 0.5)
        kind = RETURN if back else kinds.pop()
        if kind in (NODE, DRAIN, RETURN):
            away = kind != RETURN
        made += 1
        yield kind


def redone(steps: list[Step]) -> int:
    """Number of steps that were made in more than one round."""
    rounds: dict[int, set[int]] = collections.defaultdict(set)
    for step in steps:
        rounds[step.step].add(step.round)
    return sum(len(made) - 1 for made in rounds.values())


def figures(pid: int) -> dict[str, float]:
    """Resource usage of a process."""
    process = psutil.Process(pid)
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "megabytes": process.memory_info().rss / 1e6,
    }


@dataclass
class Growth:
    """Samples of processes that live as long as the job, apart for each part that they play in it: rank 0 and the
    Master hold connections to all others."""

    samples: dict[str, list[dict[str, float]]] = field(default_factory=lambda: collections.defaultdict(list))

    def look(self, running: Job, seen: Seen) -> None:
        for name in (SPARED, STEADY):
            node = running.nodes[name]
            master = " of the Master" if "this node is the Master" in node.text else ""
            self.samples[f"launcher {name}{master}"].append(figures(node.process.pid))
            (worker,) = seen.pids_of(name)
            self.samples[f"fork server of {name}"].append(figures(psutil.Process(worker).ppid()))
            if name == SPARED:
                first = " with rank 0" if seen.pids[0] == worker else ""
                self.samples[f"worker of {name}{first}"].append(figures(worker))

    def check(self) -> None:
        """Medians, so that a thread that is just about to end does not count."""
        grown = {}
        for name, samples in self.samples.items():
            quarter = max(1, len(samples) // 4)
            for what, allowed in ALLOWED.items():
                first, last = (
                    statistics.median(sample[what] for sample in part)
                    for part in (samples[:quarter], samples[-quarter:])
                )
                print(f"{name}: {what} {first:g} -> {last:g} in {len(samples)} samples")
                if last - first > allowed:
                    grown[name, what] = [sample[what] for sample in samples]
        assert not grown


class Soak:
    """One job that goes through the events."""

    def __init__(self, running: Job, draw: random.Random) -> None:
        self.job = running
        self.draw = draw
        self.away = ""
        self.may_be_redone = 0

    @property
    def size(self) -> int:
        return len(HOSTS) - bool(self.away)

    def whole(self) -> Seen:
        """All nodes that are there train together."""
        return self.job.wait_steps(3, self.size)

    def strike(self, kind: str, seen: Seen) -> None:
        self.may_be_redone += UNPLANNED.get(kind, 0)
        if kind in (WORKER, WORKERS):
            exposed = [pid for rank, pid in seen.pids.items() if seen.nodes[rank] != SPARED]
            for pid in self.draw.sample(exposed, 1 if kind == WORKER else 2):
                os.kill(pid, signal.SIGKILL)
        elif kind == RETURN:
            self.job.start(self.away)
            self.away = ""
        else:
            self.away = self.draw.choice(CHANGING)
            if kind == NODE:
                self.job.kill(self.away)
            else:
                self.job.nodes[self.away].send(signal.SIGTERM)
                assert self.job.nodes[self.away].exit_code() == 0

    def go_through(self, kind: str) -> None:
        seen = self.whole()
        time.sleep(self.draw.uniform(0, 0.1))  # not always at the same place in a step
        before = redone(self.job.steps())
        self.strike(kind, seen)
        self.job.wait_world(self.size, after=seen.round)
        if kind not in UNPLANNED:
            assert redone(self.job.steps()) == before, f"{kind} cost steps"


def soak(etcd: OutsideEtcd, folder: Path, framework: str, events: int, seed: int) -> None:
    draw = random.Random(seed)
    with job(etcd, folder, framework, "--pause=0.03", options=("--max-restarts=10000", "--slot-strikes=0")) as running:
        running.start(HOSTS[0])
        running.nodes[HOSTS[0]].says("this node is the Master")
        running.start(*HOSTS[1:])
        through = Soak(running, draw)
        (survivor,) = running.wait_world(len(HOSTS)).pids_of(SPARED)
        growth = Growth()
        for number, kind in enumerate(course(draw, events), start=1):
            begun = time.monotonic()
            through.go_through(kind)
            seen = running.seen()
            assert seen is not None and seen.pids_of(SPARED) == [survivor], f"{kind} has replaced it"
            if through.size == len(HOSTS):
                growth.look(running, through.whole())
            print(f"seed {seed}, event {number}: {kind}, in {time.monotonic() - begun:.1f} s")
        result = finish(running)
        steps = running.steps()
        assert {step.step for step in steps} == set(range(1, result["step"] + 1))
        again = redone(steps)
        print(f"seed {seed}: {result['step']} steps, {again} made again, {through.may_be_redone} might have been")
        assert again <= through.may_be_redone
    same(result, undisturbed(etcd, folder, framework, result["step"]))
    growth.check()


@pytest.mark.soak
def test_some_changes_in_a_row(own_etcd: OutsideEtcd, tmp_path: Path, framework: str) -> None:
    soak(own_etcd, tmp_path, framework, events=8, seed=1)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_changes_in_a_row(own_etcd: OutsideEtcd, tmp_path: Path, framework: str) -> None:
    soak(own_etcd, tmp_path, framework, events=200, seed=random.randrange(1_000_000))
