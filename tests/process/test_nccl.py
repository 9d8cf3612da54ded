"""NCCL on a real card, whose calls return before their sums exist: nothing wrong is ever committed, and processes stay.

All ranks share one card. These tests need one; ``edl/testing/commits/device.py`` imitates it where there is none.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.process.card import NEEDS_CARD, OVER_SOCKETS
from tests.process.harness import WORKERS, Job, OutsideEtcd, Step, stragglers, until

pytestmark = [pytest.mark.torch, NEEDS_CARD]

SCRIPT = WORKERS / "nccl_torch.py"
OPTIONS = ("--max-restarts=1000", "--slot-strikes=0", "--restart-pause=0")
KILLS = 10


def job(etcd: OutsideEtcd, tmp_path: Path, *arguments: str, **named: Any) -> Job:
    named = {"options": OPTIONS, "environment": OVER_SOCKETS, **named}
    return Job(tmp_path, [etcd.endpoint], script=(str(SCRIPT),), arguments=arguments, **named)


def notes(running: Job, what: str) -> list[dict[str, Any]]:
    file = running.steps_folder / "notes"
    lines = file.read_text().splitlines() if file.exists() else []
    return [note for note in map(json.loads, lines) if note["what"] == what]


def finish(running: Job) -> None:
    running.end_soon(20)
    assert set(running.exit_codes().values()) == {0}
    wrong = [note for note in notes(running, "restored") + notes(running, "ended") if not note["right"]]
    assert not wrong, wrong
    assert notes(running, "ended")


def redone(steps: list[Step]) -> int:
    """The most steps that were made twice after one fault."""
    most = 0
    rounds = sorted({step.round for step in steps})
    for before, after in itertools.pairwise(rounds):
        made = [step.step for step in steps if step.round <= before]
        again = [step.step for step in steps if step.round == after]
        most = max(most, max(made) - min(again) + 1)
    return most


def test_kills_within_sums_commit_nothing_wrong_and_leave_nothing_behind(etcd: OutsideEtcd, tmp_path: Path) -> None:
    chance = random.Random(11)
    with job(etcd, tmp_path, "--weights=1048576") as running:
        running.start("a", "b")
        seen = running.wait_world(2)
        for _ in range(KILLS):
            running.wait_steps(3, world=2)
            time.sleep(chance.random() * 0.2)
            os.kill(seen.pids_of("b")[0], signal.SIGKILL)
            seen = running.wait_world(2, after=seen.round)
        survivor = seen.pids_of("a")[0]
        finish(running)
        held = [note for note in notes(running, "restored") if note["pid"] == survivor]
        assert len(held) > KILLS, "the survivor's process goes on"
        early, late = held[3], held[-1]
        assert late["descriptors"] <= early["descriptors"] + 20, (early, late)
        assert late["system_threads"] <= early["system_threads"] + 10, (early, late)
        assert redone(running.steps()) <= 1


def test_a_node_that_dies_and_one_that_leaves(etcd: OutsideEtcd, tmp_path: Path) -> None:
    with job(etcd, tmp_path, "--weights=1048576") as running:
        running.start("a", "b", "c")
        seen = running.wait_world(3)
        survivors = seen.pids_of("a") + seen.pids_of("b")
        running.kill("c")
        shrunk = running.wait_world(2, after=seen.round)
        assert sorted(shrunk.pids.values()) == sorted(survivors), "the survivors' processes go on"
        running.nodes["b"].send(signal.SIGTERM)
        alone = running.wait_world(1, after=shrunk.round)
        assert alone.pids_of("a") == seen.pids_of("a")
        assert running.nodes["b"].exit_code() is not None
        del running.nodes["b"], running.nodes["c"]
        finish(running)


def test_a_death_while_nccl_is_set_up_keeps_the_survivors_process(etcd: OutsideEtcd, tmp_path: Path) -> None:
    with job(etcd, tmp_path, "--weights=65536", "--die-forming=2", nnodes="1:2") as running:
        running.start("a")
        first = running.wait_world(1)
        running.start("b")
        until(lambda: (running.steps_folder / "died").exists(), "the death of rank 1 in round 2")
        seen = running.wait_world(2, after=2)
        assert seen.pids_of("a") == first.pids_of("a"), "the survivor's process goes on"
        finish(running)


def test_a_restored_state_takes_no_second_copy_of_the_devices_memory(etcd: OutsideEtcd, tmp_path: Path) -> None:
    weights = 4 << 20
    whole = 12 * 8 * weights
    with job(etcd, tmp_path, f"--weights={weights}", "--optimizer", "--pause=0.05") as running:
        running.start("a")
        first = running.wait_world(1)
        running.start("b")
        running.wait_world(2, after=first.round)
        finish(running)
        restored = [note for note in notes(running, "restored") if note["step"] > 0]
        assert restored
        fresh = [note for note in restored if note["pid"] not in first.pids.values()]
        assert fresh
        assert max(note["peak"] for note in fresh) < 1.5 * whole


def test_a_sum_that_hangs_without_a_death_ends_the_worker_that_waits(etcd: OutsideEtcd, tmp_path: Path) -> None:
    with job(etcd, tmp_path, "--weights=65536", "--hang-at=8") as running:
        running.start("a", "b")
        running.wait_world(2)
        until(lambda: (running.steps_folder / "hung").exists(), "the rank that leaves out a sum")
        running.wait_steps(20)
        finish(running)


def test_the_slow_rank_is_named_by_torchs_flight_recorder(etcd: OutsideEtcd, tmp_path: Path) -> None:
    timed = {**OVER_SOCKETS, "TORCH_NCCL_ENABLE_TIMING": "1"}
    options = (*OPTIONS, "--stragglers=report", "--straggler-windows=3")
    arguments = ("--weights=65536", "--pause=0.05", "--slow=1:0.1")
    with job(etcd, tmp_path, *arguments, options=options, environment=timed) as running:
        running.start("a", "b")
        running.wait_world(2)

        status = running.wait_status(lambda status: bool(stragglers(status)), "an alarm about a straggler")
        (alarm,) = stragglers(status)
        assert "wait for rank 1 " in alarm["text"], alarm
        finish(running)


def test_a_health_check_of_nodes_with_a_card_passes_them(etcd: OutsideEtcd, tmp_path: Path) -> None:
    options = (*OPTIONS, "--health-check=join")
    with job(etcd, tmp_path, "--weights=65536", options=options, nnodes="2") as running:
        for name in ("a", "b"):
            running.start(name, command=["env", f"NCCL_HOSTID={name}", *running.command(name)])
        running.wait_world(2)
        status = running.status()
        assert {one["node"]: one["state"] for one in status["health"]} == {"a": "good", "b": "good"}, status["health"]
        finish(running)


def test_workers_that_share_a_card_use_gloo(etcd: OutsideEtcd, tmp_path: Path) -> None:
    """As on any machine with fewer cards than workers: NCCL refuses them."""
    script = (str(WORKERS / "rejoin_torch.py"),)
    with Job(tmp_path, [etcd.endpoint], script=script, options=OPTIONS) as running:
        running.start("a", "b")
        first = running.wait_world(2)
        os.kill(first.pids_of("b")[0], signal.SIGKILL)
        second = running.wait_world(2, after=first.round)
        assert second.pids_of("a") == first.pids_of("a"), "the survivor's process goes on"
        assert "several workers use one GPU" in running.nodes["a"].text
        running.end_soon(5)
        assert running.exit_codes() == {"a": 0, "b": 0}
