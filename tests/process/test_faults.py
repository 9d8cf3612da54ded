"""A running job loses workers, nodes and its Master, and goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from edl.exit_codes import ExitCode
from tests.process.harness import ROOT, Job, OutsideEtcd, alive, stopped, until

BUSY = ROOT / "tests" / "process" / "busy"


@pytest.fixture
def job(tmp_path: Path, etcd: OutsideEtcd) -> Iterator[Job]:
    """A job of up to four nodes on a healthy store."""
    with Job(tmp_path, [etcd.endpoint]) as job:
        yield job


def kinds(job: Job) -> list[str]:
    return [event["kind"] for event in job.events()]


def test_a_killed_worker_is_replaced_on_the_same_nodes_and_charged_once(job: Job) -> None:
    job.start("a", "b", nproc=2)
    before = job.wait_world(4)
    os.kill(before.pids[1], signal.SIGKILL)
    after = job.wait_world(4, after=before.round)
    assert after.round == before.round + 1
    assert after.nodes == before.nodes
    assert not set(after.pids.values()) & set(before.pids.values())
    status = job.status()
    assert (status["restarts_used"], status["round"], status["phase"]) == (1, after.round, "running")
    failures = sorted(status["failures"], key=lambda failure: failure["peer_loss"])
    assert failures[0]["rank"] == 1
    assert failures[0]["what"] == "was killed by SIGKILL"
    assert kinds(job).count("world-formed") == 2


def test_no_step_is_lost_and_at_most_one_is_done_again(job: Job) -> None:
    job.arguments, job.options = ("--steps=60", "--pause=0.02"), ("--slot-strikes=0",)
    job.start("a", "b", "c")
    for _ in range(2):
        seen = job.wait_steps(5, 3)
        os.kill(seen.pids[2], signal.SIGKILL)
        job.wait_world(3, after=seen.round)
    assert job.exit_codes() == {"a": 0, "b": 0, "c": 0}
    made = [step.step for step in job.steps() if step.rank == 0]
    assert sorted(set(made)) == list(range(1, 61))
    assert len(made) <= 60 + 2


def test_a_killed_node_takes_its_workers_with_it_and_the_others_go_on(job: Job) -> None:
    job.start("a", "b", "c")
    before = job.wait_world(3)
    victim = next(node for node in ("a", "b", "c") if node != job.status()["master"])
    job.kill(victim)
    after = job.wait_world(2, after=before.round)
    assert after.round == before.round + 1
    assert all(not alive(pid) for pid in before.pids_of(victim))
    survivors = [node for node in (before.nodes[rank] for rank in range(3)) if node != victim]
    assert [after.nodes[rank] for rank in range(2)] == survivors
    assert job.status()["restarts_used"] == 0


def test_the_masters_node_is_killed(job: Job) -> None:
    job.start("a", "b", "c")
    before = job.wait_world(3)
    master = job.status()["master"]
    job.kill(master)
    after = job.wait_world(2, after=before.round)
    assert after.round == before.round + 1
    status = job.status()
    assert status["master"] in set(after.nodes.values())
    assert status["restarts_used"] == 0
    assert [event["number"] for event in job.events()] == list(range(1, len(job.events()) + 1))


@pytest.mark.slow
def test_workers_do_not_notice_that_a_master_on_a_spare_is_killed(job: Job) -> None:
    job.nnodes = "1"
    start_master_on_a_spare(job, "m", "a")
    before = job.wait_steps(3)
    job.start("b")
    job.wait_status(lambda status: states(status) == {"m": "spare", "a": "running", "b": "spare"}, "two spares")
    job.kill("m")
    status = job.wait_status(lambda status: status["master"] != "m" and "m" not in states(status), "a new Master")
    assert status["master"] in ("a", "b")
    assert states(status) == {"a": "running", "b": "spare"}
    after = job.wait_steps(3)
    assert after == before
    assert status["round"] == before.round
    steps = [step.step for step in job.steps()]
    assert steps == list(range(1, len(steps) + 1))


def start_master_on_a_spare(job: Job, master: str, trainer: str) -> None:
    """The first to register rules; it is not warm before the other one, which asks for the first place."""
    go_on = job.folder / "go-on"
    waiting = f"import os, time\nwhile not os.path.exists({str(go_on)!r}):\n    time.sleep(0.05)\n"
    (job.folder / "slow_to_import.py").write_text(waiting)
    job.environment = {**job.environment, "PYTHONPATH": f"{ROOT}{os.pathsep}{job.folder}"}
    job.start(master, options=["--preload=slow_to_import"]).says("this node is the Master")
    job.start(trainer, options=["--node-rank=0"])
    try:
        job.nodes[master].says(f"node {trainer} is ready")
    finally:
        go_on.touch()
    seen = job.wait_world(1)
    assert seen.nodes == {0: trainer}


def states(status: Any) -> dict[str, str]:
    return {node["node"]: node["state"] for node in status["nodes"]}


def test_a_newcomer_makes_the_world_larger_and_ranks_stay(job: Job) -> None:
    job.start("a", "b")
    before = job.wait_world(2)
    job.start("c")
    after = job.wait_world(3, after=before.round)
    assert after.round == before.round + 1
    assert after.nodes == {**before.nodes, 2: "c"}
    assert job.status()["restarts_used"] == 0


def test_a_replacement_takes_the_vacated_place(job: Job) -> None:
    job.nnodes = "3"
    job.start("a", "b", "c")
    before = job.wait_world(3)
    victim = before.nodes[1]
    job.kill(victim)
    job.start("d")
    after = job.wait_world(3, after=before.round)
    assert after.nodes == {**before.nodes, 1: "d"}
    assert job.status()["restarts_used"] == 0


def test_node_ranks_are_respected(job: Job) -> None:
    job.options = ("--join-grace=30",)
    job.nnodes = "3"
    for rank, node in ((2, "a"), (0, "b"), (1, "c")):
        job.start(node, options=[f"--node-rank={rank}"])
    assert job.wait_world(3).nodes == {0: "b", 1: "c", 2: "a"}


def test_nodes_may_have_different_numbers_of_workers(job: Job) -> None:
    job.start("a", nproc=1)
    job.start("b", nproc=2)
    before = job.wait_world(3)
    assert sorted(len(before.ranks(node)) for node in ("a", "b")) == [1, 2]
    job.kill("b")
    job.wait_world(1, after=before.round)
    job.start("c", nproc=3)
    after = job.wait_world(4, after=before.round)
    assert after.nodes == {0: "a", 1: "c", 2: "c", 3: "c"}


@pytest.mark.slow
def test_a_world_is_a_multiple_of_the_node_unit(job: Job) -> None:
    job.options = ("--node-unit=2",)
    job.nnodes = "2:4"
    job.start("a", "b", "c")
    before = job.wait_world(2)
    status = job.wait_status(
        lambda status: sorted(states(status).values()) == ["running", "running", "spare"], "a spare"
    )
    spare = next(node for node, state in states(status).items() if state == "spare")
    job.start("d")
    after = job.wait_world(4, after=before.round)
    assert set(after.nodes.values()) == {"a", "b", "c", "d"}
    assert {rank: after.nodes[rank] for rank in (0, 1)} == before.nodes
    assert after.nodes[2] == spare
    victim = after.nodes[1]
    job.kill(victim)
    last = job.wait_world(2, after=after.round)
    assert last.nodes[0] == after.nodes[0]
    assert victim not in last.nodes.values()


def test_recover_waits_for_a_replacement(job: Job) -> None:
    job.options = ("--fault-tolerance=recover",)
    job.nnodes = "1:3"
    job.start("a", "b")
    before = job.wait_world(2)
    victim = before.nodes[0]
    job.kill(victim)
    job.wait_status(lambda status: "waiting for 1 replacement" in status["reason"], "the reason")
    assert job.seen() == before
    job.start("c")
    after = job.wait_world(2, after=before.round)
    assert after.nodes == {**before.nodes, 0: "c"}


def test_recover_gives_up_when_no_replacement_comes(job: Job) -> None:
    job.options = ("--fault-tolerance=recover", "--recover-timeout=2")
    job.start("a", "b")
    before = job.wait_world(2)
    job.kill("b")
    survivor = job.nodes["a"]
    assert survivor.exit_code() == ExitCode.NOT_ENOUGH_NODES
    for text in ("waiting for 1 replacement for 2 s", "--recover-timeout=2", "node b lost"):
        assert text in survivor.text
    assert job.seen() == before


@pytest.mark.slow
def test_shrink_goes_on_with_fewer_and_never_grows(job: Job) -> None:
    job.options = ("--fault-tolerance=shrink", "--join-grace=60")
    job.nnodes = "1:3"  # so that the first world has all three, however slow the machine is
    job.start("a", "b", "c")
    before = job.wait_world(3)
    job.kill(before.nodes[2])
    after = job.wait_world(2, after=before.round)
    job.start("d")
    job.wait_status(lambda status: states(status).get("d") == "spare", "a spare")
    job.wait_steps(10)
    assert job.seen() == after
    # A spare may fill a place that is left by another one later.
    master = job.status()["master"]  # another one would begin before the spare has found it
    left = next(rank for rank in (1, 0) if after.nodes[rank] != master)
    job.kill(after.nodes[left])
    assert job.wait_world(2, after=after.round).nodes == {**after.nodes, left: "d"}


def test_a_spent_budget_ends_the_job_with_the_root_cause_on_every_node(job: Job) -> None:
    job.arguments = ("--fail=1:3:raise", "--fail-rounds=9")
    job.options = ("--max-restarts=1",)
    job.start("a", "b")
    assert job.exit_codes() == {"a": ExitCode.WORKER_FAILED, "b": ExitCode.WORKER_FAILED}
    for node in job.nodes.values():
        report = node.report()
        root = report["failures"][0]
        assert (root["rank"], root["round"], root["peer_loss"]) == (1, 2, False)
        # The order to stop, which its peer's report brings about, may meet it between its traceback and its end.
        assert root["exit_code"] in (1, -signal.SIGTERM)
        assert root["exception"] == "ValueError: the loss is not a number"
        assert "in misbehave" in root["traceback"]
        assert "the only restart is used (--max-restarts=1)" in report["reason"]
        block = node.text.split("Root Cause")[1]
        assert block.index("rank      : 1") < block.index("the loss is not a number") < block.index("in misbehave")
        assert "Traceback" in block


def test_no_restarts_at_all(job: Job) -> None:
    job.arguments = ("--fail=0:3:SIGSEGV",)
    job.options = ("--max-restarts=0",)
    job.start("a", "b")
    assert job.exit_codes() == {"a": 1, "b": 1}
    for node in job.nodes.values():
        root = node.report()["failures"][0]
        assert (root["rank"], root["exit_code"], root["what"]) == (0, -11, "was killed by SIGSEGV")
        assert "was killed by SIGSEGV" in node.text
        assert "--max-restarts=0" in node.text
    assert job.seen().round == 1  # type: ignore[union-attr]


def test_a_frozen_worker_is_killed_after_the_lease_and_replaced(job: Job) -> None:
    job.options = ("--lease-ttl=2",)
    job.start("a", "b")
    before = job.wait_world(2)
    os.kill(before.pids[1], signal.SIGSTOP)
    after = job.wait_world(2, after=before.round)
    assert after.nodes == before.nodes
    status = job.status()
    assert status["restarts_used"] == 1
    root = min(status["failures"], key=lambda failure: failure["peer_loss"])
    assert (root["rank"], root["what"]) == (1, "was frozen (stopped by a signal) for 2 s and killed")


def test_a_worker_frozen_for_a_moment_goes_on(job: Job) -> None:
    job.options = ("--lease-ttl=10",)
    job.start("a", "b")
    before = job.wait_world(2)
    with stopped(before.pids[1]):
        time.sleep(1)
    assert job.wait_steps(3) == before


@pytest.mark.slow
@pytest.mark.parametrize("which", ["the Master's node", "another node"])
def test_a_frozen_launcher_is_counted_out_and_comes_back_as_a_joiner(job: Job, which: str) -> None:
    job.options = ("--lease-ttl=2",)
    job.start("a", "b", "c")
    before = job.wait_world(3)
    master = job.status()["master"]
    frozen = master if which == "the Master's node" else next(node for node in job.nodes if node != master)
    with stopped(job.nodes[frozen].process.pid):
        without = job.wait_world(2, after=before.round)
        assert frozen not in without.nodes.values()
    after = job.wait_world(3, after=without.round)
    assert set(after.nodes.values()) == {"a", "b", "c"}
    assert {rank: after.nodes[rank] for rank in (0, 1)} == without.nodes
    assert all(not alive(pid) for pid in before.pids.values())
    assert job.status()["restarts_used"] == 0


def test_a_frozen_launchers_workers_end_before_there_is_a_world_without_it(job: Job) -> None:
    """Its workers are not frozen, and need nobody to step on."""
    job.options, job.arguments = ("--lease-ttl=2",), ("--free",)
    job.start("a", "b")
    before = job.wait_world(2)
    frozen = next(node for node in job.nodes if node != job.status()["master"])
    with stopped(job.nodes[frozen].process.pid) as at:
        without = job.wait_world(1, after=before.round)
        time.sleep(0.5)  # for what the worker of the frozen launcher may still do
    (orphan,) = before.pids_of(frozen)
    last = max(step.t for step in job.steps() if step.pid == orphan)
    first = min(step.t for step in job.steps() if step.round == without.round)
    print(f"last step {last - at:.2f} s after the freeze, first step without it {first - at:.2f} s")
    assert last < first
    job.nodes[frozen].says("the launcher was silent for ")
    after = job.wait_world(2, after=without.round)
    assert after.nodes[1] == frozen
    assert job.status()["restarts_used"] == 0


@pytest.mark.soak_but("the Master's node")
@pytest.mark.slow
@pytest.mark.parametrize("which", ["the Master's node", "another node"])
def test_a_launcher_that_computes_for_longer_than_its_lease_loses_nothing(job: Job, which: str) -> None:
    """Its event loop stands still for a lease and a half; renewals come from a thread meanwhile."""
    job.options = ("--lease-ttl=10",)  # on a busy machine, no thread of a process may run for seconds
    job.environment = {"EDL_TEST_BUSY_S": "15", "PYTHONPATH": f"{BUSY}:{ROOT}"}
    job.start("a", "b")
    before = job.wait_world(2)
    master = job.status()["master"]
    busy = master if which == "the Master's node" else next(node for node in job.nodes if node != master)
    job.nodes[busy].process.send_signal(signal.SIGRTMIN)
    job.nodes[busy].says("renewed its lease from a thread")
    # On a machine so busy that the launcher had a core for less than a second of it, it says so instead.
    job.nodes[busy].says_one_of("this launcher's event loop was blocked for", "this launcher was not running for")
    assert job.wait_steps(3) == before
    assert job.status()["master"] == master
    assert kinds(job).count("world-formed") == 1


def fork_server_of(job: Job, node: str) -> int:
    launcher = psutil.Process(job.nodes[node].process.pid)
    return next(child.pid for child in launcher.children() if "edl.worker.fork_server" in child.cmdline())


@pytest.mark.slow
def test_a_frozen_fork_server_is_replaced_and_no_restart_is_charged(job: Job) -> None:
    job.options = ("--spawn-timeout=3",)
    job.start("a", "b")
    before = job.wait_world(2)
    os.kill(fork_server_of(job, "b"), signal.SIGSTOP)
    after = job.wait_world(2, after=before.round)
    assert set(after.nodes.values()) == {"a", "b"}
    job.nodes["b"].says("the fork server has not answered for 3 s: killing it and its workers")
    assert job.status()["restarts_used"] == 0


def test_a_third_signal_ends_a_launcher_whatever_it_waits_for(job: Job) -> None:
    """A fork server that is frozen neither ends workers nor ends itself, and a launcher gives it time to come to
    itself."""
    job.options, job.arguments = ("--spawn-timeout=600",), ("--grandchild",)
    job.start("a")
    job.wait_world(1)
    os.kill(fork_server_of(job, "a"), signal.SIGSTOP)
    # One by one: the kernel merges signals of which the first has not been handled yet.
    job.nodes["a"].send(signal.SIGTERM)
    job.nodes["a"].says("SIGTERM: leaving the job")
    job.nodes["a"].send(signal.SIGTERM)
    job.nodes["a"].says("SIGTERM again: killing the workers")
    assert job.nodes["a"].running
    at = job.nodes["a"].send(signal.SIGTERM)
    assert job.nodes["a"].exit_code() == ExitCode.TERMINATED
    print(f"ended {time.monotonic() - at:.2f} s after the third signal")
    job.nodes["a"].says("SIGTERM, the third signal: killing all processes and exiting at once")


def test_sigterm_drains_one_node(job: Job) -> None:
    job.start("a", "b", "c")
    before = job.wait_world(3)
    job.nodes["b"].send(signal.SIGTERM)
    assert job.nodes["b"].exit_code() == ExitCode.OK
    after = job.wait_world(2, after=before.round)
    assert set(after.nodes.values()) == {"a", "c"}
    status = job.status()
    assert status["restarts_used"] == 0
    assert sorted(states(status)) == ["a", "c"]
    assert "node b leaves: SIGTERM" in [event["text"] for event in job.events()]


def test_sigint_leaves_in_good_order(job: Job) -> None:
    job.start("a")
    job.wait_world(1)
    job.nodes["a"].send(signal.SIGINT)
    assert job.nodes["a"].exit_code() == ExitCode.INTERRUPTED


def test_the_second_sigint_is_immediate(job: Job) -> None:
    job.arguments = ("--on-sigterm=ignore", "--ignore-sigint")
    job.start("a", "b")
    seen = job.wait_world(2)
    node = job.nodes["a"]
    node.send(signal.SIGINT)
    node.says("leaving the job; the workers have 30 s")
    node.send(signal.SIGINT)
    assert node.exit_code(25) == ExitCode.INTERRUPTED
    until(lambda: not any(alive(pid) for pid in seen.pids_of("a")), "the end of a's workers")


@pytest.mark.slow
def test_a_worker_that_is_deaf_to_sigterm_is_killed_after_the_grace(job: Job) -> None:
    job.arguments = ("--on-sigterm=ignore",)
    job.options = ("--shutdown-timeout=1",)
    job.start("a", "b")
    before = job.wait_world(2)
    job.start("c")
    after = job.wait_world(3, after=before.round)
    assert not set(before.pids.values()) & set(after.pids.values())
    assert job.status()["restarts_used"] == 0
    job.nodes["a"].send(signal.SIGTERM)
    assert job.nodes["a"].exit_code() == ExitCode.OK
    assert "workers still run 1 s after the signal: killing them" in job.nodes["a"].text


def test_a_workers_sigterm_handler_gets_to_run(job: Job) -> None:
    job.arguments = ("--on-sigterm=save",)
    job.start("a", "b")
    before = job.wait_world(2)
    job.nodes["b"].send(signal.SIGTERM)
    assert job.nodes["b"].exit_code() == ExitCode.OK
    job.wait_world(1, after=before.round)
    assert sorted(path.name for path in job.steps_folder.glob("saved.*")) == ["saved.1.0", "saved.1.1"]


def test_what_workers_have_started_ends_with_them(job: Job) -> None:
    job.arguments = ("--grandchild",)
    job.start("a")
    before = job.wait_world(1)
    first = {child.pid for child in psutil.Process(before.pids[0]).children()}
    assert len(first) == 2
    os.kill(before.pids[0], signal.SIGKILL)
    job.wait_world(1, after=before.round)
    # The one that left the worker's group ends at the latest with the launcher.
    assert len([pid for pid in first if alive(pid)]) <= 1
    job.nodes["a"].send(signal.SIGTERM)
    assert job.nodes["a"].exit_code() == ExitCode.TERMINATED
    job.check_nothing_left()


def test_the_process_that_makes_workers_is_killed(job: Job) -> None:
    job.start("a", "b", nproc=2)
    before = job.wait_world(4)
    (fork_server,) = {psutil.Process(pid).ppid() for pid in before.pids_of("b")}
    os.kill(fork_server, signal.SIGKILL)
    after = job.wait_world(4, after=before.round)
    assert after.nodes == before.nodes
    assert job.status()["restarts_used"] == 1
    assert all(not alive(pid) for pid in before.pids.values())


def test_nohup_is_respected(job: Job) -> None:
    """A terminal that goes away ends a launcher, unless it was started to outlive it."""
    job.start("a", command=["nohup", *job.command("a")])
    before = job.wait_world(1)
    job.nodes["a"].send(signal.SIGHUP)
    job.wait_steps(3, 1)
    assert job.wait_world(1).round == before.round
    assert job.nodes["a"].process.poll() is None


def test_all_nodes_leave_at_once(job: Job) -> None:
    job.arguments = ("--free",)  # or a worker may tell of its peer's end
    job.start("a", "b", "c")
    job.wait_world(3)
    for node in job.nodes.values():
        node.send(signal.SIGTERM)
    codes = list(job.exit_codes().values())
    assert ExitCode.TERMINATED in codes, "the job is not done"
    assert set(codes) <= {ExitCode.OK, ExitCode.TERMINATED}, "the first ones may have left others behind"
    assert not any("Traceback" in node.text for node in job.nodes.values())
