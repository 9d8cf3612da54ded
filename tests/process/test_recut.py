"""Sharded state under real FSDP2 with no checkpoint directory: worlds of other sizes begin from memory.

The script compares every restored value with the right one, bit for bit; see ``workers/sharded_torch.py``.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import WORKERS, OutsideEtcd
from tests.process.test_sharded import Sharded, ended
from tests.torch_release import since

pytestmark = [pytest.mark.torch, since("2.6", "FSDP2 works on GPUs alone")]


def redone(began: dict[int, dict[str, Any]], job: Sharded) -> dict[int, int]:
    """By round, the number of steps of the round before it that were made again."""
    reached: dict[int, int] = {}
    for step in job.steps():
        reached[step.round] = max(reached.get(step.round, 0), step.step)
    rounds = sorted(began)
    return {later: reached[before] - began[later]["step"] for before, later in itertools.pairwise(rounds)}


@pytest.mark.soak_but("tensor parallel")
@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        pytest.param((), id="processes stay"),
        pytest.param(("--hsdp",), id="HSDP", marks=pytest.mark.soak),
        pytest.param(("--tp",), id="tensor parallel"),
        pytest.param(("--restart",), id="processes restart", marks=pytest.mark.soak),
    ],
)
def test_worlds_of_any_size_begin_from_memory(tmp_path: Path, how: tuple[str, ...]) -> None:
    """2 → 3 → 2 → 1 → 2 nodes with two workers each: a join, a killed launcher, a drain, and a join again."""
    with OutsideEtcd(tmp_path / "etcd") as etcd:
        script = (str(WORKERS / "sharded_torch.py"),)
        folder = tmp_path / "job"
        folder.mkdir()
        arguments = ("--save-every=0", *how)
        named: dict[str, Any] = {"name": "recut", "nnodes": "1:3", "script": script, "arguments": arguments}
        if "--tp" in how:
            named["options"] = ("--replica-size=2",)
        with Sharded(folder, [etcd.endpoint], **named) as job:
            job.start("a", "b", nproc=2)
            job.wait_world(4)
            job.wait_steps(5)
            job.start("c", nproc=2)
            grown = job.wait_world(6)
            job.wait_steps(5)
            job.kill("c")
            del job.nodes["c"]
            shrunk = job.wait_world(4, after=grown.round)
            job.wait_steps(5)
            assert job.cli("drain", "b").returncode == 0
            alone = job.wait_world(2, after=shrunk.round)
            job.wait_steps(5)
            job.start("d", nproc=2)
            again = job.wait_world(4, after=alone.round)
            job.wait_steps(5)
            job.end_soon()
            began = ended(job)
            assert sorted(began) == [1, grown.round, shrunk.round, alone.round, again.round]
            pids = {frozenset(seen.pids_of("a")) for seen in job.rounds()}
            assert len(pids) == (5 if "--restart" in how else 1), pids
            lost = redone(began, job)
            # The step of an agreed boundary is committed and not logged: the commit unwinds the script.
            assert {lost[grown.round], lost[alone.round], lost[again.round]} == {-1}, lost
            assert lost[shrunk.round] <= 2, "the copy of a lost node may be one commit behind"
            said = job.nodes["a"].text
            print(*[line for line in said.splitlines() if "re-cut" in line], sep="\n")


@pytest.mark.slow
def test_replicas_of_a_sharded_model_keep_its_parts_for_one_another(tmp_path: Path) -> None:
    """Two nodes with a replica each, and no copies: a lost node costs one step at most."""
    with OutsideEtcd(tmp_path / "etcd") as etcd:
        folder = tmp_path / "job"
        folder.mkdir()
        script, arguments = (str(WORKERS / "sharded_torch.py"),), ("--save-every=0", "--hsdp")
        named: dict[str, Any] = {"name": "hsdp", "nnodes": "1:2", "script": script, "arguments": arguments}
        with Sharded(folder, [etcd.endpoint], **named, options=("--copies=never",)) as job:
            job.start("a", "b", nproc=2)
            both = job.wait_world(4)
            job.wait_steps(8)
            job.kill("b")
            del job.nodes["b"]
            job.wait_world(2, after=both.round)
            job.wait_steps(5)
            job.end_soon()
            lost = list(redone(ended(job), job).values())
            assert len(lost) == 1 and lost[0] <= 1, lost


@pytest.mark.slow
def test_a_lost_node_costs_the_replica_that_it_belongs_to(tmp_path: Path) -> None:
    """Replicas of two nodes with one worker each: 2 → 4 → 2 (one survivor waits as a spare) → 4 nodes."""
    with OutsideEtcd(tmp_path / "etcd") as etcd:
        folder = tmp_path / "job"
        folder.mkdir()
        script, arguments = (str(WORKERS / "sharded_torch.py"),), ("--save-every=0", "--tp")
        named: dict[str, Any] = {"name": "replicas", "nnodes": "1:4", "script": script, "arguments": arguments}
        with Sharded(folder, [etcd.endpoint], **named, options=("--replica-size=2",)) as job:
            job.start("a", "b")
            job.wait_world(2)
            job.wait_steps(5)
            job.start("c", "d")
            grown = job.wait_world(4)
            job.wait_steps(5)
            job.kill("a")
            del job.nodes["a"]
            shrunk = job.wait_world(2, after=grown.round)
            assert set(shrunk.nodes.values()) == {"c", "d"}, "b has no partner"
            job.wait_steps(5)
            job.start("e")
            again = job.wait_world(4, after=shrunk.round)
            assert {rank: again.nodes[rank] for rank in (0, 1)} == shrunk.nodes, "a whole replica stays as it is"
            assert {again.nodes[2], again.nodes[3]} == {"b", "e"}
            job.wait_steps(5)
            job.end_soon()
            began = ended(job)
            lost = redone(began, job)
            assert (lost[grown.round], lost[again.round]) == (-1, -1), lost
            assert lost[shrunk.round] <= 2, lost
            for node in ("c", "d"):
                pids = {tuple(seen.pids_of(node)) for seen in job.rounds() if node in seen.nodes.values()}
                assert len(pids) == 1, "it keeps its process"


def pauses(job: Sharded) -> dict[int, float]:
    """By round, the seconds between the last step before it and its first step."""
    last: dict[int, float] = {}
    first: dict[int, float] = {}
    for step in job.steps():
        last[step.round] = max(last.get(step.round, 0.0), step.t)
        first[step.round] = min(first.get(step.round, step.t), step.t)
    rounds = sorted(first)
    return {later: first[later] - last[before] for before, later in itertools.pairwise(rounds)}


@pytest.mark.soak
@pytest.mark.parametrize("how", [(), ("--hsdp",), ("--tp",)], ids=["FSDP2", "HSDP", "tensor parallel"])
def test_a_long_way(tmp_path: Path, how: tuple[str, ...]) -> None:
    """2 → 4 → 3 → 1 → 4 nodes with two workers each, by joins, a killed launcher and drains. Prints the pauses."""
    with OutsideEtcd(tmp_path / "etcd") as etcd:
        folder = tmp_path / "job"
        folder.mkdir()
        script, arguments = (str(WORKERS / "sharded_torch.py"),), ("--save-every=0", *how)
        named: dict[str, Any] = {"name": "way", "nnodes": "1:4", "script": script, "arguments": arguments}
        if "--tp" in how:
            named["options"] = ("--replica-size=2",)
        with Sharded(folder, [etcd.endpoint], **named) as job:
            job.start("a", "b", nproc=2)
            seen = job.wait_world(4)
            job.wait_steps(5)
            for name in ("c", "d"):
                job.start(name, nproc=2)
                seen = job.wait_world(seen.world + 2, after=seen.round)
                job.wait_steps(5)
            job.kill("d")
            del job.nodes["d"]
            lost = job.wait_world(6, after=seen.round)
            job.wait_steps(5)
            seen = lost
            for name in ("c", "b"):
                assert job.cli("drain", name).returncode == 0
                seen = job.wait_world(seen.world - 2, after=seen.round)
                job.wait_steps(5)
            for name in ("e", "f", "g"):
                job.start(name, nproc=2)
                seen = job.wait_world(seen.world + 2, after=seen.round)
                job.wait_steps(5)
            job.end_soon()
            again = redone(ended(job), job)
            assert again.pop(lost.round) <= 2
            assert set(again.values()) == {-1}, again
            assert len({frozenset(one.pids_of("a")) for one in job.rounds()}) == 1, "it keeps its processes"
            for number, pause_s in pauses(job).items():
                print(f"round {number}: {pause_s:.2f} s" + (" (a node was killed)" if number == lost.round else ""))
