"""A job on a real Slurm: one Slurm job for each node, a steady one that holds the store, and elastic ones that come and
go with ``edl scale``, with jobs that are more important, and with ``scancel``.

The controller, the node daemon, ``sbatch``, ``srun`` and preemption are real (tests/process/slurm_fixture.py).
"""

from __future__ import annotations

import collections
import contextlib
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.free_ports import free_endpoints
from tests.process.harness import ROOT, WORKERS, Job, until
from tests.process.slurm_fixture import MEMORY_MB, Slurm, missing

DEPLOY = ROOT / "deploy" / "slurm"

pytestmark = [pytest.mark.torch, pytest.mark.skipif(bool(missing()), reason=f"no Slurm: {missing()}")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def slurm(cluster: Slurm) -> Iterator[Slurm]:
    try:
        yield cluster
    finally:
        cluster.clear()


@contextlib.contextmanager
def slurm_job(slurm: Slurm, tmp_path: Path, *settings: str) -> Iterator[tuple[Job, int]]:
    """A job from the scripts of deploy/slurm with another ``job.env``, begun with its steady part; and its number.
    Its launcher serves the store and, at first, is the Master."""
    pytest.importorskip("torch")
    job = Job(tmp_path, free_endpoints(1), "etcd-embedded")
    with job:
        shutil.copytree(DEPLOY, tmp_path / "job")
        # Of EDL_SECRET_FILE=shared in job.env; the first launcher creates it, before any command needs it.
        job.environment = {"EDL_SECRET_FILE": str(tmp_path / "job" / ".edl" / f"{job.name}.secret")}
        host, _, port = job.endpoints[0].rpartition(":")
        train = shlex.join([str(WORKERS / "rejoin_torch.py"), f"--folder={job.steps_folder}"])
        ours = [f"export EDL_RDZV_ID={job.name}", f"store_port={port}", f"store_host={host}", f"train=({train})"]
        conf = f"options=--partition=low --mem={MEMORY_MB},poll=0.3"
        with (tmp_path / "job" / "job.env").open("a") as file:
            file.write("\n".join([*ours, f"export EDL_SCHEDULER_CONF='{conf}'", *settings, ""]))
        try:
            yield job, submit(slurm, job, "steady")
        except BaseException:
            show(slurm, tmp_path)
            raise
        finally:
            slurm.clear()  # before the harness looks for what is left


def submit(slurm: Slurm, job: Job, script: str) -> int:
    """Submit a job as a user would, apart from the size of its allocation."""
    folder = job.folder / "job"
    inherited = {**job.base_environment(), "PATH": f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"}
    small = ("--cpus-per-task=1", f"--job-name=edl-{job.name}", f"--chdir={folder}")
    return slurm.submit(*small, str(folder / f"{script}.sbatch"), environment=inherited)


def show(slurm: Slurm, tmp_path: Path) -> None:
    """Print all logs; pytest shows them when a test fails."""
    for log in sorted((*slurm.folder.glob("job-*.log"), *(tmp_path / "job" / "logs").glob("slurm-*.log"))):
        print(f"----- {log.name}\n{log.read_text(errors='replace')[-10_000:]}")
    for one in slurm.tasks():
        print(one.number, one.state, one.exit_code, one.fields.get("Reason"), one.fields.get("Partition"))
    slurm.dump()


def worlds(job: Job) -> list[int]:
    """Sizes of the worlds that trained, in their order."""
    rounds = {step.round: step.world for step in job.steps()}
    return [world for _, world in sorted(rounds.items())]


def check_steps(job: Job) -> None:
    """Every step once, and none left out."""
    steps = [step.step for step in job.steps() if step.rank == 0]
    again = sorted(step for step, times in collections.Counter(steps).items() if times > 1)
    print(f"worlds: {worlds(job)}; {len(set(steps))} steps, made again: {again}")
    assert steps == list(range(1, len(steps) + 1))


def elastic(slurm: Slurm, steady: int, *states: str) -> list[int]:
    """Numbers of the job's other Slurm jobs that are in one of these states."""
    name = slurm.task(steady).fields["JobName"]
    others = [one for one in slurm.tasks() if one.fields["JobName"] == name and one.number != steady]
    return [one.number for one in others if one.state in states]


def scale(job: Job, nodes: int) -> None:
    done = job.cli("scale", str(nodes), "--no-wait")
    assert done.returncode == 0, done.stderr


def check_end(slurm: Slurm, job: Job, steady: int) -> None:
    """The job comes to its end, and with it all of its Slurm jobs."""
    job.end_soon()
    assert slurm.wait(steady, "COMPLETED", "FAILED", "CANCELLED").exit_code == "0:0"
    until(lambda: not elastic(slurm, steady, "PENDING", "RUNNING", "COMPLETING"), "the end of its jobs")
    assert (job.steps_folder / "result.json").exists()


@pytest.mark.soak
def test_preempted_to_one_and_back_to_three(slurm: Slurm, tmp_path: Path) -> None:
    """A 3-node job gives way to a job of higher priority, goes on with 1 node and is 3 again after it."""
    with slurm_job(slurm, tmp_path) as (job, steady):
        seen = job.wait_world(1)
        assert seen.nodes == {0: f"slurm-{steady}"}
        scale(job, 3)
        seen = job.wait_world(3, after=seen.round)
        first = elastic(slurm, steady, "RUNNING")
        assert set(seen.nodes.values()) == {f"slurm-{number}" for number in (steady, *first)}
        job.wait_steps(10)

        high = slurm.submit("--partition=high", "--ntasks=2", command=["sleep", "600"])
        at_s = time.monotonic()
        seen = job.wait_world(1, after=seen.round)
        alone_s = time.monotonic() - at_s
        assert seen.nodes == {0: f"slurm-{steady}"}
        slurm.wait(high, "RUNNING")
        print(f"world of 1 after {alone_s:.2f} s, the high job runs after {time.monotonic() - at_s:.2f} s")
        ended = [(slurm.task(number).state, slurm.task(number).exit_code) for number in first]
        print(f"preempted nodes ended: {ended}")
        assert ended == [("COMPLETED", "0:0")] * 2, "they left in good order, within the grace"
        until(lambda: len(elastic(slurm, steady, "PENDING")) == 2, "two jobs in their place, which wait")
        job.wait_status(lambda status: "wait in the queue" in status["scale"]["waiting"], "the reason")
        job.wait_steps(10, world=1)

        slurm.call("scancel", str(high))
        seen = job.wait_world(3, after=seen.round)
        second = elastic(slurm, steady, "RUNNING")
        assert len(second) == 2 and not set(first) & set(second)
        job.wait_steps(10)
        assert worlds(job)[-1] == 3 and 1 in worlds(job)[-3:], "on the way up nodes may come one by one"
        check_steps(job)
        check_end(slurm, job, steady)
        for number in first:
            written = (tmp_path / "job" / "logs" / f"slurm-{number}.log").read_text()
            print("\n".join(line for line in written.splitlines() if f" slurm-{number}]" in line))
            assert "SIGTERM: leaving the job at the next step boundary" in written


@pytest.mark.soak
def test_one_that_a_person_cancels_is_replaced(slurm: Slurm, tmp_path: Path) -> None:
    """The Master submits a script of the user's; ``scancel`` takes a node, which leaves in good order, and another one
    comes. Slurm's warning before the time limit (``--signal``) does the same."""
    conf = f"script=node.sbatch,options=--cpus-per-task=1 --mem={MEMORY_MB} --output=node-%j.log,poll=0.3"
    with slurm_job(slurm, tmp_path, f"export EDL_SCHEDULER_CONF='{conf}'") as (job, steady):
        seen = job.wait_world(1)
        scale(job, 2)
        seen = job.wait_world(2, after=seen.round)
        job.wait_steps(5)
        for options, state in (((), "CANCELLED"), (("--signal=USR2",), "COMPLETED")):
            (number,) = elastic(slurm, steady, "RUNNING")
            slurm.call("scancel", *options, str(number))
            slurm.wait(number, state)
            until(lambda: elastic(slurm, steady, "RUNNING") not in ([], [number]), "another one")  # noqa: B023
            seen = job.wait_world(2, after=seen.round)
            assert f"slurm-{number}" not in seen.nodes.values()
            job.wait_steps(5)
            name = "SIGUSR2" if options else "SIGTERM"
            assert f"{name}: leaving the job" in (tmp_path / "job" / f"node-{number}.log").read_text()
        check_steps(job)
        check_end(slurm, job, steady)


@pytest.mark.soak
def test_the_queue_decides_and_nodes_requeue_themselves(slurm: Slurm, tmp_path: Path) -> None:
    """``requeue.sbatch``: a node that was preempted goes back into the queue under its own number and name."""
    with slurm_job(slurm, tmp_path, "export EDL_SCALE_OWNER=external") as (job, steady):
        seen = job.wait_world(1)
        node = submit(slurm, job, "requeue")
        seen = job.wait_world(2, after=seen.round)
        assert set(seen.nodes.values()) == {f"slurm-{steady}", f"slurm-{node}"}
        job.wait_steps(5)
        high = slurm.submit("--partition=high", "--ntasks=2", command=["sleep", "600"])
        seen = job.wait_world(1, after=seen.round)
        slurm.wait(high, "RUNNING")
        assert slurm.wait(node, "PENDING").fields["Restarts"] == "1"
        job.wait_steps(5)
        slurm.call("scancel", str(high))
        slurm.call("scontrol", "update", f"JobId={node}", "StartTime=now")  # else it waits for two minutes
        seen = job.wait_world(2, after=seen.round)
        assert set(seen.nodes.values()) == {f"slurm-{steady}", f"slurm-{node}"}
        job.wait_steps(5)
        check_steps(job)
        check_end(slurm, job, steady)
        assert slurm.task(node).exit_code == "0:0", "the end of the job is no reason to come back"
