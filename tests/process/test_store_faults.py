"""Jobs whose store goes away: an outside one, and members that the launchers serve themselves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from edl.exit_codes import ExitCode
from tests.process.etcd_fixture import patient_store
from tests.process.free_ports import free_endpoints
from tests.process.harness import Job, OutsideEtcd, alive, until

OUTAGE_S = 6.0
"""Twice the lease, so that every lease would have ended in the meantime."""


def test_training_goes_on_while_the_store_is_away(tmp_path: Path, own_etcd: OutsideEtcd) -> None:
    with Job(tmp_path, [own_etcd.endpoint]) as job:
        job.start("a", "b", "c")
        before = job.wait_world(3)
        own_etcd.kill()
        time.sleep(OUTAGE_S)  # longer than a lease lasts
        late = time.monotonic()
        until(lambda: len([step for step in job.steps() if step.t > late]) > 100, "steps without a store")
        own_etcd.restart()
        assert job.wait_steps(20) == before
        status = job.status()
        assert (status["round"], status["restarts_used"], len(status["nodes"])) == (before.round, 0, 3)
        os.kill(before.pids[2], signal.SIGKILL)
        after = job.wait_world(3, after=before.round)
        assert after.round == before.round + 1
        assert after.nodes == before.nodes


@pytest.mark.slow
def test_a_worker_that_dies_while_the_store_is_away_is_replaced_when_it_is_back(
    tmp_path: Path, own_etcd: OutsideEtcd
) -> None:
    with Job(tmp_path, [own_etcd.endpoint]) as job:
        job.start("a", "b", "c")
        before = job.wait_world(3)
        own_etcd.kill()
        time.sleep(1)
        os.kill(before.pids[1], signal.SIGKILL)
        time.sleep(OUTAGE_S / 2)
        assert job.seen() == before
        own_etcd.restart()
        after = job.wait_world(3, after=before.round)
        assert after.nodes == before.nodes
        assert job.status()["restarts_used"] == 1


@pytest.mark.slow
def test_a_node_that_dies_while_the_store_is_away_is_counted_out_when_it_is_back(
    tmp_path: Path, own_etcd: OutsideEtcd
) -> None:
    with Job(tmp_path, [own_etcd.endpoint]) as job:
        job.start("a", "b", "c")
        before = job.wait_world(3)
        master = job.status()["master"]
        own_etcd.kill()
        job.kill(master)
        time.sleep(OUTAGE_S / 2)
        own_etcd.restart()
        after = job.wait_world(2, after=before.round)
        assert set(after.nodes.values()) == {"a", "b", "c"} - {master}
        assert job.status()["restarts_used"] == 0


@pytest.mark.slow
def test_a_job_ends_well_although_the_store_dies_just_before(tmp_path: Path, own_etcd: OutsideEtcd) -> None:
    with Job(tmp_path, [own_etcd.endpoint], arguments=("--steps=60",)) as job:
        job.start("a", "b")
        job.wait_steps(5, 2)
        own_etcd.kill()
        until(lambda: job.steps()[-1].step == 60, "the last step")
        time.sleep(0.5)
        own_etcd.restart()
        assert job.exit_codes() == {"a": 0, "b": 0}


def test_three_members_survive_the_loss_of_any_launcher_and_take_it_back(tmp_path: Path) -> None:
    with Job(tmp_path, free_endpoints(3), "etcd-embedded") as job:
        job.start("a", "b", "c")
        before = job.wait_world(3)
        victim = job.status()["master"]
        job.kill(victim)
        without = job.wait_world(2, after=before.round)
        job.start(victim)
        job.nodes[victim].says("serving the store at")
        after = job.wait_world(3, after=without.round)
        assert after.nodes == {**without.nodes, 2: victim}
        # Its member is a full one again: another may go.
        other = next(node for node in ("a", "b", "c") if node != victim)
        job.kill(other)
        last = job.wait_world(2, after=after.round)
        assert other not in last.nodes.values()
        assert job.status()["restarts_used"] == 0


@pytest.mark.slow
def test_one_member_is_brought_back_with_its_data_by_a_launcher_started_again(tmp_path: Path) -> None:
    with Job(tmp_path, free_endpoints(1), "etcd-embedded", options=("--lease-ttl=2",)) as job:
        job.start("a")
        job.nodes["a"].says("serving the store at")
        job.start("b")
        before = job.wait_world(2)
        job.kill("a")
        time.sleep(3)
        assert job.nodes["b"].running
        job.start("a")
        # By then b may have formed a world of its own, and a comes as a newcomer.
        after = job.wait_world(2, after=before.round)
        assert set(after.nodes.values()) == {"a", "b"}
        assert after.round > before.round, "the record of the rounds has survived"
        assert job.status()["restarts_used"] == 0


@pytest.mark.slow
def test_every_launcher_ends_with_0_and_no_data_stays(tmp_path: Path) -> None:
    with Job(tmp_path, free_endpoints(3), "etcd-embedded", arguments=("--steps=10",)) as job:
        job.start("a", "b", "c")
        assert job.exit_codes() == {"a": 0, "b": 0, "c": 0}
        assert job.steps()[-1].step == 10
        job.check_nothing_left()
        assert leftovers(job) == []


def test_an_ended_job_leaves_no_keys_in_an_outside_store(tmp_path: Path, etcd: OutsideEtcd) -> None:
    async def keys() -> list[str]:
        store = patient_store(etcd.endpoint)
        try:
            return [entry.key for entry in (await store.read(f"/edl/{job.name}/")).entries]
        finally:
            await store.close()

    with Job(tmp_path, [etcd.endpoint], arguments=("--steps=20",)) as job:
        job.start("a", "b")
        job.wait_world(2)
        assert asyncio.run(keys())
        assert job.exit_codes() == {"a": 0, "b": 0}
        assert asyncio.run(keys()) == []


def test_a_private_store_is_gone_with_its_launcher(tmp_path: Path) -> None:
    for number, code in ((signal.SIGTERM, ExitCode.TERMINATED), (signal.SIGINT, ExitCode.INTERRUPTED)):
        with Job(tmp_path / str(int(number)), [], "etcd-embedded", nnodes="1") as job:
            job.start("a")
            seen = job.wait_world(1)
            job.nodes["a"].send(number)
            assert job.nodes["a"].exit_code() == code
            assert not alive(seen.pids[0])
            job.check_nothing_left()
            assert leftovers(job) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, ExitCode.TERMINATED), (signal.SIGINT, ExitCode.INTERRUPTED)]
)
def test_a_launcher_that_waits_for_the_store_leaves_in_order(tmp_path: Path, number: int, code: int) -> None:
    """Of two members one is missing, so the store does not answer."""
    with Job(tmp_path, free_endpoints(2), "etcd-embedded", nnodes="1") as job:
        node = job.start("a")
        until(lambda: "waiting for the store at" in node.text, "a launcher that waits")
        node.send(number)
        assert node.exit_code() == code
        assert f"{signal.Signals(number).name}: ended before this node took part in the job" in node.text
        job.check_nothing_left()


def leftovers(job: Job) -> list[str]:
    """Files that launchers left in the temporary folder, except the user's shared folder."""
    return [str(path) for path in job.temporary.glob("*/**/*")]


@pytest.mark.slow
def test_each_of_three_phases_under_one_name_runs(tmp_path: Path, etcd: OutsideEtcd) -> None:
    """One node is always quicker: its next launcher finds the other one still at the end of the phase before."""
    with Job(tmp_path, [etcd.endpoint], nnodes="2") as job:
        for last in (5, 10, 15):
            job.arguments = (f"--steps={last}", "--pause=0.01")
            job.start("a")
            if last > 5:
                assert job.nodes["b"].exit_code() == ExitCode.OK
            job.start("b")
            assert job.nodes["a"].exit_code() == ExitCode.OK
        assert job.nodes["b"].exit_code() == ExitCode.OK
        made = [step.step for step in job.steps() if step.rank == 0]
        assert sorted(made) == list(range(1, 16)), "each phase has gone on from the one before"


def test_how_a_job_ended_can_be_asked_for_a_while(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with Job(tmp_path, [etcd.endpoint], arguments=("--fail=0:3:3",), options=("--max-restarts=0",)) as job:
        job.start("a")
        assert job.nodes["a"].exit_code() == ExitCode.WORKER_FAILED
        done = job.cli("status")
        assert "has ended with exit code 1" in done.stderr
        assert job.cli("status").returncode != 0
        events = (job.nodes["a"].folder / f"{job.name}_a" / "events.jsonl").read_text().splitlines()
        kinds = [json.loads(line)["kind"] for line in events]
        assert "worker-failed" in kinds and kinds[-1] == "job-ended", "what led to it is still there"


@pytest.mark.slow
def test_two_jobs_share_one_etcd(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with (
        Job(tmp_path, [etcd.endpoint], name="first", arguments=("--steps=200",)) as first,
        Job(tmp_path, [etcd.endpoint], name="first-2", arguments=("--steps=200",)) as second,
    ):
        first.start("a", "b")
        second.start("a", "b")
        for job in (first, second):
            job.wait_world(2)
            assert {node["node"] for node in job.status()["nodes"]} == {"a", "b"}
        first.kill("a")
        first.wait_world(1)
        assert second.exit_codes() == {"a": 0, "b": 0}
        assert first.nodes["b"].exit_code() == 0
        assert {step.round for step in second.steps()} == {1}


def test_a_second_launcher_with_other_settings_is_refused(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with Job(tmp_path, [etcd.endpoint]) as job:
        job.start("a")
        before = job.wait_world(1)
        second = job.start("b", options=["--max-restarts=7"])
        assert second.exit_code() == ExitCode.JOB_CONFLICT
        assert "--max-restarts=7 (the running job has 3)" in second.text
        assert "Traceback" not in second.text
        for options in (["--node-id=a"], []):
            twin = job.start("a" if not options else "x", options=options)
            assert twin.exit_code() == ExitCode.JOB_CONFLICT
            assert "node id a is in use" in twin.text
        assert job.wait_steps(3) == before


def etcd_of(job: Job, node: str) -> psutil.Process:
    children = psutil.Process(job.nodes[node].process.pid).children()
    (process,) = [child for child in children if "--initial-cluster-token" in " ".join(child.cmdline())]
    return process


def test_a_launcher_whose_store_member_dies_starts_it_again(tmp_path: Path) -> None:
    with Job(tmp_path, free_endpoints(1), "etcd-embedded") as job:
        job.start("a")
        job.nodes["a"].says("serving the store at")
        job.start("b")
        before = job.wait_world(2)
        etcd_of(job, "a").kill()
        assert job.wait_steps(20) == before
        status = job.status()
        assert (status["round"], len(status["nodes"])) == (before.round, 2)
        job.end_soon()
        assert job.exit_codes() == {"a": 0, "b": 0}


@pytest.mark.slow
def test_three_members_end_together_on_sigterm(tmp_path: Path) -> None:
    free = ("--free",)  # or a worker may tell of its peer's end
    with Job(tmp_path, free_endpoints(3), "etcd-embedded", arguments=free) as job:
        job.start("a", "b", "c")
        job.wait_world(3)
        for node in job.nodes.values():
            node.send(signal.SIGTERM)
        codes = list(job.exit_codes().values())
        assert ExitCode.TERMINATED in codes and set(codes) <= {ExitCode.OK, ExitCode.TERMINATED}
        assert not any("Traceback" in node.text for node in job.nodes.values())
