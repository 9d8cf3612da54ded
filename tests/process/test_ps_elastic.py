"""Everything that can come and go in a job with parameter servers does, in one run, while trainers count."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from edl.exit_codes import ExitCode
from tests.process.harness import ASK_S, WORKERS, Job, OutsideEtcd, alive, until

pytest.importorskip("numba")
KEYS = 2000
COUNTER = str(WORKERS / "ps_counter.py")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[OutsideEtcd]:
    with OutsideEtcd(tmp_path / "etcd") as store:
        yield store


class Counting(Job):
    """A job of ``ps_counter`` trainers."""

    def serve(self, *names: str) -> None:
        """Start launchers that have one pserver each and nothing else."""
        for name in names:
            whole = self.command(name, "--role=pserver")
            self.start(name, command=whole[: whole.index(COUNTER)])

    def train(self, *names: str) -> None:
        """Start launchers that have one trainer each and nothing else."""
        self.start(*names, options=("--role=trainer",))

    def trainers(self) -> list[int]:
        """Those that live and have made a step."""
        return [pid for pid in {step.pid for step in self.steps()} if alive(pid)]

    def pservers(self, node: str) -> list[psutil.Process]:
        """The pserver processes of a node."""
        children = psutil.Process(self.nodes[node].process.pid).children(recursive=True)
        return [one for one in children if one.cmdline()[1:4] == ["-m", "ps", "server"]]

    def view(self) -> dict[str, dict[str, float]]:
        """Counts of the service "ps" in the status, by name of the part."""
        views = [view for view in self.status()["services"] if view["service"] == "ps"]
        return {view["name"]: {one["name"]: one["value"] for one in view["counts"]} for view in views}

    def settled(self, pservers: int) -> None:
        """So many pservers hold everything, each bucket twice if there are two of them, and nothing moves."""
        until(lambda: self._is_settled(pservers), f"{pservers} pservers with everything in place", pause_s=ASK_S)

    def _is_settled(self, pservers: int) -> bool:
        counts = self.view().get("pservers", {})
        moving = counts.get("moving_buckets") or counts.get("bare_buckets", 1)
        return counts.get("pservers") == pservers and not moving

    def placed(self, pservers: int) -> None:
        """So many pservers hold everything, without copies, and nothing moves."""

        def holds() -> bool:
            counts = self.view().get("pservers", {})
            return counts.get("pservers") == pservers and "bare_buckets" in counts and not counts["moving_buckets"]

        until(holds, f"{pservers} pservers with everything in place", pause_s=ASK_S)

    def all_go_on(self) -> None:
        """Every living trainer makes some more steps."""
        before = {pid: self.made(pid) for pid in self.trainers()}
        until(lambda: all(self.made(pid) > count + 5 or not alive(pid) for pid, count in before.items()), "more steps")

    def made(self, pid: int) -> int:
        """Number of steps of one trainer."""
        return sum(step.pid == pid for step in self.steps())

    def longest_pauses_s(self) -> list[float]:
        """Longest time in seconds between two steps, for each trainer."""
        times: dict[int, list[float]] = {}
        for step in self.steps():
            times.setdefault(step.pid, []).append(step.t)
        return [max(b - a for a, b in itertools.pairwise(one)) for one in times.values() if len(one) > 1]

    def end(self) -> None:
        """End the training, compare the counts with the steps, and check that all processes exit with 0."""
        (self.steps_folder / "last-step").write_text("0")
        until(lambda: all((self.steps_folder / f"{pid}.rests").exists() for pid in self.trainers()), "all at rest")
        readers = self.trainers()
        (self.steps_folder / "read").touch()
        files = [self.steps_folder / f"{pid}.counted.npy" for pid in readers]
        until(lambda: all(file.exists() for file in files), "what the pservers hold")
        self.compare(files[0])

    def compare(self, counted: Path) -> None:
        books = [np.fromfile(path, np.int64).reshape(2, KEYS) for path in self.steps_folder.glob("*.books")]
        acked, begun = np.sum(books, axis=0)
        held = np.load(counted)
        assert acked.sum() > 5_000
        assert (held == held[:, :1]).all()
        assert (held[:, 0] >= acked).all(), "acknowledged pushes are lost"
        assert (held[:, 0] <= begun).all(), "pushes are applied twice"


def counting(tmp_path: Path, etcd: OutsideEtcd, *options: str) -> Counting:
    fixed = ("--run-mode=ps", "--lease-ttl=2", "--shutdown-timeout=20", "--max-restarts=20", "--pserver-memory=200M")
    options = ("--slot-strikes=0", *options)
    return Counting(tmp_path, [etcd.endpoint], options=(*fixed, *options), script=(COUNTER,))


@pytest.mark.slow
def test_everything_comes_and_goes(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with counting(tmp_path, etcd) as job:
        job.train("t1", "t2")
        job.serve("p1", "p2")
        until(lambda: len(job.trainers()) == 2, "two trainers that train")
        job.settled(2)

        first = job.trainers()[0]
        os.kill(first, signal.SIGKILL)
        until(lambda: len(job.trainers()) == 2 and first not in job.trainers(), "another trainer in its place")
        job.train("t3")
        until(lambda: len(job.trainers()) == 3, "a third trainer")

        job.serve("p3")
        job.settled(3)
        job.all_go_on()

        job.nodes["p1"].send(signal.SIGTERM)
        assert job.nodes["p1"].exit_code() == ExitCode.OK
        job.settled(2)
        job.all_go_on()

        (victim,) = job.pservers("p2")
        victim.kill()
        job.all_go_on()
        job.settled(2)
        print("longest pauses between two steps of a trainer, s:", [f"{one:.2f}" for one in job.longest_pauses_s()])
        job.end()
        codes = job.exit_codes()
        assert set(codes.values()) == {ExitCode.OK}, codes


@pytest.mark.slow
def test_pservers_beside_trainers_hand_over_their_buckets_when_their_node_is_drained(
    tmp_path: Path, etcd: OutsideEtcd
) -> None:
    """Without replicas, and without a checkpoint: what they do not hand over is lost, and with it the job. The drained
    node is the Master's."""
    with counting(tmp_path, etcd, "--replication=none", "--servers-per-node=1") as job:
        job.start("a")
        until(lambda: len(job.trainers()) == 1, "a trainer that trains")
        job.start("b")
        until(lambda: len(job.trainers()) == 2, "two trainers that train")
        job.placed(2)
        drained = job.cli("drain", "a")
        assert drained.returncode == 0, drained.stderr
        assert job.nodes["a"].exit_code() == ExitCode.OK
        assert "ended with status 0" in job.nodes["a"].text, "its pserver has ended by itself"
        job.placed(1)
        job.all_go_on()
        job.end()
        assert job.nodes["b"].exit_code() == ExitCode.OK
