"""Jobs with parameter servers under real launchers: trainers run undisturbed while pservers come and go."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from edl.exit_codes import START_OVER, ExitCode
from edl.types import JobId
from edl.wire.keys import JobKeys
from tests.process.etcd_fixture import patient_store
from tests.process.free_ports import free_endpoints
from tests.process.harness import WORKERS, Job, Node, OutsideEtcd, alive, until

LEASE_S = 2
LONE = str(WORKERS / "lone_trainer.py")
IDLE = {"EDL_PS_KERNELS": "numpy"}
"""For pservers to which nobody pushes: they start in half the time without numba."""


def job_of(folder: Path, etcd: OutsideEtcd, *options: str, **more: Any) -> Job:
    """Trainers only, unless a node asks for more."""
    options = ("--run-mode=ps", "--servers-per-node=0", f"--lease-ttl={LEASE_S}", "--shutdown-timeout=10", *options)
    return Job(folder, [etcd.endpoint], options=options, script=(LONE,), environment=IDLE, **more)


def steps_of(job: Job, pid: int) -> list[int]:
    return [step.step for step in job.steps() if step.pid == pid]


def undisturbed(job: Job, pid: int) -> None:
    """Check that the trainer lives, has counted every step, and makes progress."""
    assert alive(pid)
    before = len(steps_of(job, pid))
    until(lambda: len(steps_of(job, pid)) > before + 2, f"more steps of {pid}")
    made = steps_of(job, pid)
    assert made == list(range(1, len(made) + 1))


def end(job: Job) -> None:
    (job.steps_folder / "last-step").write_text("0")


def test_who_is_killed_is_restarted_and_nobody_else(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with job_of(tmp_path, etcd) as job:
        job.start("a", "b")
        first = job.wait_world(2)
        (mine,), (theirs,) = first.pids_of("a"), first.pids_of("b")
        os.kill(mine, signal.SIGKILL)
        after = job.wait_world(2, after=first.round)
        assert after.pids_of("b") == [theirs]
        assert after.pids_of("a") != [mine]
        undisturbed(job, theirs)
        assert "EDL_PS=1 PADDLE_ROLE=TRAINER" in job.nodes["a"].text

        os.kill(after.pids_of("a")[0], signal.SIGUSR1)  # it says that it has to start over
        again = until(lambda: (now := job.seen()) and now.pids_of("a") != after.pids_of("a") and now, "a new process")
        assert again and again.round == after.round
        undisturbed(job, theirs)
        assert f"ended with exit status {START_OVER}" not in job.nodes["a"].text
        end(job)
        assert job.exit_codes() == {"a": ExitCode.OK, "b": ExitCode.OK}


@pytest.mark.slow
def test_nodes_come_and_go_around_those_that_train(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with job_of(tmp_path, etcd, nnodes="1:3") as job:
        job.start("a", nproc=2)
        one = job.wait_world(2)
        job.start("b")
        two = job.wait_world(3, after=one.round)
        assert two.pids_of("a") == one.pids_of("a")
        job.start("c")
        three = job.wait_world(4, after=two.round)
        assert three.pids_of("b") == two.pids_of("b")

        job.nodes["b"].send(signal.SIGTERM)
        without_b = job.wait_world(3, after=three.round)
        assert job.nodes["b"].exit_code() == ExitCode.OK
        job.kill("c")
        alone = job.wait_world(2, after=without_b.round)
        assert alone.pids_of("a") == one.pids_of("a")
        for pid in one.pids_of("a"):
            undisturbed(job, pid)
        assert not any(alive(pid) for pid in (*three.pids_of("b"), *three.pids_of("c")))
        end(job)
        assert job.nodes["a"].exit_code() == ExitCode.OK


@pytest.mark.slow
def test_a_trainer_outlives_masters_and_those_that_end_before_it(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with job_of(tmp_path, etcd) as job:
        job.start("a")
        job.wait_world(1)
        job.start("b")  # a rules
        both = job.wait_world(2)
        (theirs,) = both.pids_of("b")
        job.kill("a")
        alone = job.wait_world(1, after=both.round)
        assert alone.pids_of("b") == [theirs]
        undisturbed(job, theirs)
        end(job)
        assert job.nodes["b"].exit_code() == ExitCode.OK


@pytest.mark.slow
def test_the_job_ends_when_all_have_ended_in_whichever_world(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with job_of(tmp_path, etcd, arguments=("--early",)) as job:
        job.start("a", nproc=2)
        until(lambda: any(step.rank == 1 for step in job.steps()), "a step of rank 1")
        job.start("b")
        until(lambda: any(step.node == "b" for step in job.steps()), "a step of b")
        assert len({step.pid for step in job.steps() if step.node == "a"}) == 2, "who has ended is not started again"
        end(job)
        assert job.exit_codes() == {"a": ExitCode.OK, "b": ExitCode.OK}


# --- pservers --------------------------------------------------------------------------------------------------------


class Keys:
    """The pservers of a job, as the store has them."""

    def __init__(self, endpoint: str, job: str) -> None:
        self.endpoint = endpoint
        self.prefix = JobKeys(JobId(job)).helper("ps", "servers/")

    async def _entries(self, revoke: str = "") -> dict[str, dict[str, Any]]:
        store = patient_store(self.endpoint)
        try:
            entries = (await store.read(self.prefix)).entries
            for entry in entries:
                if revoke and entry.key == self.prefix + revoke:
                    await store.revoke_lease(entry.lease)
            return {entry.key[len(self.prefix) :]: json.loads(entry.value) for entry in entries}
        finally:
            await store.close()

    def now(self) -> dict[str, dict[str, Any]]:
        return asyncio.run(self._entries())

    def revoke(self, name: str) -> None:
        """End the lease that this key is on."""
        asyncio.run(self._entries(revoke=name))

    def wait(self, *names: str) -> dict[str, dict[str, Any]]:
        found: list[dict[str, dict[str, Any]]] = []

        def look() -> bool:
            found[:] = [self.now()]
            return sorted(found[0]) == sorted(names)

        until(look, f"pservers {names}")
        return found[0]


def pids_of_pservers(launcher: Node) -> list[int]:
    """A pserver's command line is its own, that of the process that ties it to its launcher has it as well."""
    children = psutil.Process(launcher.process.pid).children(recursive=True)
    return sorted(child.pid for child in children if child.cmdline()[1:4] == ["-m", "ps", "server"])


def pid_at(launcher: Node, port: int) -> int:
    for pid in pids_of_pservers(launcher):
        if any(one.laddr.port == port for one in psutil.Process(pid).net_connections() if one.status == "LISTEN"):
            return pid
    raise AssertionError(f"no pserver of {launcher.name} listens at {port}")


def start_pservers(job: Job, name: str, count: int, *options: str) -> Node:
    command = [
        *(sys.executable, "-m", "edl.launch", "--role=pserver", f"--servers-per-node={count}", f"--node-id={name}"),
        *(f"--rdzv-endpoint={job.endpoints[0]}", f"--rdzv-id={job.name}", "--rdzv-backend=etcd"),
        *("--shutdown-timeout=90", "--pserver-memory=64M", *options),
    ]
    return job.start(name, command=command)


def shown(job: Job) -> list[str]:
    """Pservers in ``edl status``."""
    return [one["name"] for one in job.status()["services"] if one["service"] == "ps"]


@pytest.mark.slow
def test_pservers_beside_trainers_are_kept_running(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with job_of(tmp_path, etcd) as job:
        keys = Keys(etcd.endpoint, job.name)
        node = job.start("a", options=("--servers-per-node=2", "--pserver-memory=64M"))
        first = keys.wait("a-1", "a-2")
        assert {one["most_bytes"] for one in first.values()} == {64 << 20}
        assert len({one["secret"] for one in first.values()}) == 1
        (trainer,) = job.wait_world(1).pids_of("a")

        os.kill(pid_at(node, first["a-1"]["port"]), signal.SIGKILL)
        keys.wait("a-2", "a-3")
        pids = pids_of_pservers(node)
        keys.revoke("a-2")
        node.says("the lease has ended: 2 pservers continue under a new one, as a Master knows them")
        keys.wait("a-2", "a-3")
        undisturbed(job, trainer)

        assert sorted(pids_of_pservers(node)) == sorted(pids) and shown(job)
        table = job.cli("ps").stdout
        assert "2 pservers" in table and "\na-2 " in table and "\na-3 " in table
        end(job)
        assert node.exit_code() == ExitCode.OK
        assert not any(alive(pid) for pid in pids)
        assert keys.now() == {}


@pytest.mark.slow
def test_launchers_of_pservers_come_and_go(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with job_of(tmp_path, etcd) as job:
        keys = Keys(etcd.endpoint, job.name)
        early = start_pservers(job, "p", 2)
        early.says(f"waiting for job {job.name}")
        trains = job.start("a")
        keys.wait("p-1", "p-2")
        (trainer,) = job.wait_world(1).pids_of("a")
        late = start_pservers(job, "q", 1)
        keys.wait("p-1", "p-2", "q-1")

        early.send(signal.SIGTERM)
        assert early.exit_code() == ExitCode.OK
        assert early.text.count("ended with status 0") == 2, "they have ended by themselves"
        keys.wait("q-1")
        undisturbed(job, trainer)

        third = start_pservers(job, "r", 1)
        keys.wait("q-1", "r-1")
        pids = pids_of_pservers(third)
        third.kill()
        until(lambda: not any(alive(pid) for pid in pids), "the pserver of a dead launcher")
        keys.wait("q-1")
        end(job)
        assert trains.exit_code() == ExitCode.OK
        assert late.exit_code() == ExitCode.OK
        assert f"job {job.name} has ended" in late.text


@pytest.mark.slow
def test_pservers_at_given_addresses(tmp_path: Path, etcd: OutsideEtcd) -> None:
    (here,) = free_endpoints(1)
    lease = f"--lease-ttl={LEASE_S}"
    with Job(tmp_path, [etcd.endpoint], script=(LONE,), options=(lease,), environment=IDLE) as job:
        keys = Keys(etcd.endpoint, job.name)
        trainers = "--trainers=127.0.0.1:6181,127.0.0.1:6182"
        options = ("--nnodes=1:1", f"--servers={here}", trainers, "--pserver-memory=64M", "--log-layout=paddle")
        node = job.start("a", options=options)
        (told,) = keys.wait("a-1").values()
        assert f"{told['host']}:{told['port']}" == here
        assert len(job.wait_world(2).pids) == 2
        os.kill(pid_at(node, told["port"]), signal.SIGKILL)
        (again,) = keys.wait("a-2").values()
        assert again["port"] == told["port"]
        end(job)
        assert node.exit_code() == ExitCode.OK
        assert {"serverlog.0", "workerlog.0", "workerlog.1"} <= {path.name for path in node.folder.iterdir()}


@pytest.mark.slow
def test_pservers_that_cannot_start_are_an_error(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with job_of(tmp_path, etcd) as job:
        job.start("a")
        job.wait_world(1)
        alone = start_pservers(job, "p", 1, "--local-addr=203.0.113.7")
        assert alone.exit_code() == ExitCode.CANNOT_START_WORKER
        assert "203.0.113.7" in alone.text
        end(job)
        assert job.nodes["a"].exit_code() == ExitCode.OK


def test_pservers_of_a_job_that_has_none(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with Job(tmp_path, [etcd.endpoint], options=(f"--lease-ttl={LEASE_S}",)) as job:
        job.start("a")
        job.wait_world(1)
        alone = start_pservers(job, "p", 1)
        assert alone.exit_code() == ExitCode.USAGE
        assert f"job {job.name} has no parameter servers" in alone.text
        job.end_soon()
        assert job.nodes["a"].exit_code() == ExitCode.OK
