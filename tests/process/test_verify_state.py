"""Ranks that hold different numbers are found, by real launchers and both frameworks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.harness import Job, OutsideEtcd, until
from tests.process.test_rejoin import finish, job, same, undisturbed


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[OutsideEtcd]:
    with OutsideEtcd(tmp_path / "etcd") as store:
        yield store


def harmed(running: Job) -> bool:
    return (running.steps_folder / "harmed").exists()


@pytest.mark.soak_but("torch")
def test_stop_ends_the_job_and_names_rank_and_tensor(etcd: OutsideEtcd, tmp_path: Path, framework: str) -> None:
    options = ["--verify-state=5"]
    with job(etcd, tmp_path, framework, "--harm=12:1", nnodes="1", options=options) as running:
        node = running.start("a", nproc=3)
        assert node.exit_code() == 11
        assert "at commit 15 ranks hold different values of state.model.0.weight (rank 1 of 3)" in node.text
        assert "starting again would not help" in node.text


@pytest.mark.slow
def test_rollback_undoes_the_harm(etcd: OutsideEtcd, tmp_path: Path, framework: str) -> None:
    options = ["--verify-state=3", "--on-state-mismatch=rollback"]
    with job(etcd, tmp_path, framework, "--harm=13:1", nnodes="1", options=options) as running:
        running.start("a", nproc=3)
        before = running.wait_world(3)
        until(lambda: harmed(running), "the harm")
        after = running.wait_world(3, after=before.round)
        assert {rank for rank in range(3) if after.pids[rank] == before.pids[rank]} == {0, 2}
        result = finish(running)
    same(result, undisturbed(etcd, tmp_path, framework, result["step"]))


@pytest.mark.slow
@pytest.mark.soak_but("torch")
def test_sync_goes_on_with_the_numbers_of_the_majority(etcd: OutsideEtcd, tmp_path: Path, framework: str) -> None:
    options = ["--verify-state=1", "--on-state-mismatch=sync"]
    with job(etcd, tmp_path, framework, "--harm=13:1", nnodes="1", options=options) as running:
        node = running.start("a", nproc=3)
        node.says("at commit 13 ranks hold different values of state.model.0.weight (rank 1 of 3)")
        result = finish(running)
        assert (running.seen() or running.wait_world(3)).round == 1
    same(result, undisturbed(etcd, tmp_path, framework, result["step"]))


@pytest.mark.slow
@pytest.mark.soak_but("torch")
def test_nodes_that_restore_different_numbers_are_found(etcd: OutsideEtcd, tmp_path: Path, framework: str) -> None:
    """Nobody has asked for it: it is compared after each restore."""
    with job(etcd, tmp_path, framework, "--harm=5:1") as running:
        running.start("a", "b", "c")
        before = running.wait_world(3)
        until(lambda: harmed(running), "the harm")
        running.wait_steps(3)
        wrong = before.nodes[1]
        victim = next(name for name in before.nodes.values() if name != wrong)
        running.nodes[victim].send(signal.SIGTERM)  # all make the same commit, and each restores its own
        codes = {name: node.exit_code() for name, node in running.nodes.items() if name != victim}
        assert set(codes.values()) == {11}
        said = running.nodes[wrong].text
        assert "after the restore of commit" in said and "state.model.0.weight" in said


@pytest.mark.slow
@pytest.mark.soak_but("paddle")
def test_after_a_restore_all_ranks_hold_the_same_values(etcd: OutsideEtcd, tmp_path: Path, framework: str) -> None:
    """Those that rank 0 has restored: of its own node's commit, or of another's if only that one has the newest."""
    with job(etcd, tmp_path, framework, "--local-value") as running:
        running.start("a", "b", "c")
        before = running.wait_world(3)
        running.wait_steps(3)
        running.kill(before.nodes[2])
        after = running.wait_world(2, after=before.round)
        finish_on = (running.steps_folder / "values").read_text().splitlines()
        restored = {line.split()[2] for line in finish_on if int(line.split()[0]) == after.round}
        assert len(restored) == 1 and restored <= {*before.nodes.values()}
