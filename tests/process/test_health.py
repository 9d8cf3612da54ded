"""Health checks in real jobs: a node with wrong numbers is kept out, and the others train."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import WORKERS, Job, OutsideEtcd

CHECKED = ("--health-check-size=256", "--join-grace=20")


def probing(function: str) -> tuple[str, ...]:
    """Options of a launcher whose node has this probe."""
    return (f"--health-probe=health_probes:{function}",)


def job(etcd: OutsideEtcd, tmp_path: Path, *options: str, **named: Any) -> Job:
    path = {"PYTHONPATH": f"{Path(__file__).resolve().parents[2]}{os.pathsep}{WORKERS}"}
    return Job(tmp_path, [etcd.endpoint], options=(*CHECKED, *options), environment=path, **named)


def by_node(status: Any) -> dict[str, Any]:
    return {one["node"]: one for one in status["health"]}


def passed(text: str) -> tuple[int, list[str]]:
    """Number of a check and the nodes that have passed it. On a busy machine, one that was slow is checked again."""
    found = re.fullmatch(r"health check (\d+) \((?:1 round|2 rounds)\): (.*) passed", text)
    assert found is not None, text
    return int(found[1]), sorted(found[2].split(", "))


@pytest.mark.slow
def test_a_node_with_wrong_numbers_is_kept_out_and_the_others_train(etcd: OutsideEtcd, tmp_path: Path) -> None:
    with job(etcd, tmp_path, "--health-check=join", nnodes="1:3") as running:
        running.start("a")
        running.start("b", options=probing("wrong_product"))
        running.start("c")
        two = running.wait_world(2)
        assert set(two.nodes.values()) == {"a", "c"}
        status = running.wait_status(lambda seen: len(seen["health"]) == 3, "three verdicts")
        health = by_node(status)
        assert {node: one["state"] for node, one in health.items()} == {"a": "good", "b": "faulty", "c": "good"}
        assert health["b"]["excluded"] and "wrong numbers in a matrix product: row 3" in health["b"]["why"]
        assert {node["node"]: node["state"] for node in status["nodes"]}["b"] == "faulty"
        shown = running.cli("status").stdout
        assert "Health of b: kept out, faulty: health_probes:wrong_product: wrong numbers" in shown
        kinds = [event for event in running.events() if event["kind"] == "health"]
        assert any("node b is kept out" in event["text"] for event in kinds)
        running.end_soon()
        assert running.exit_codes() == {"a": 0, "b": 0, "c": 0}


@pytest.mark.soak_but("crash")
@pytest.mark.slow
@pytest.mark.parametrize(("function", "text"), [("crash", "Segmentation fault"), ("hang", "did not end within 3 s")])
def test_a_probe_that_crashes_or_hangs_names_its_node(
    etcd: OutsideEtcd, tmp_path: Path, function: str, text: str
) -> None:
    with job(etcd, tmp_path, "--health-check=join", "--health-check-timeout=3", nnodes="1:2") as running:
        running.start("a")
        running.start("b", options=probing(function))
        one = running.wait_world(1)
        assert set(one.nodes.values()) == {"a"}
        health = by_node(running.wait_status(lambda seen: "b" in by_node(seen), "a verdict about b"))
        assert health["b"]["state"] == "faulty" and text in health["b"]["why"]


def test_a_worker_killed_by_a_segfault_has_its_node_checked_before_it_goes_on(
    etcd: OutsideEtcd, tmp_path: Path
) -> None:
    with job(etcd, tmp_path, "--health-check=failure", nnodes="2", arguments=("--fail=1:5:SIGSEGV",)) as running:
        running.start("a", "b")
        first = running.wait_world(2)
        second = running.wait_world(2, after=first.round)
        (checked,) = [event for event in running.events() if event["kind"] == "health"]
        assert passed(checked["text"]) == (1, [first.nodes[1]])
        assert second.round == first.round + 1


@pytest.mark.slow
def test_a_python_exception_is_no_reason_for_a_check(etcd: OutsideEtcd, tmp_path: Path) -> None:
    with job(etcd, tmp_path, "--health-check=failure", nnodes="2", arguments=("--fail=1:5:raise",)) as running:
        running.start("a", "b")
        first = running.wait_world(2)
        running.wait_world(2, after=first.round)
        assert not [event for event in running.events() if event["kind"] == "health"]
        assert running.status()["health"] == []


@pytest.mark.soak_but("spawn")
@pytest.mark.slow
@pytest.mark.parametrize("standby", ["spawn", "none"])
def test_a_node_is_checked_however_its_workers_are_started(etcd: OutsideEtcd, tmp_path: Path, standby: str) -> None:
    with job(etcd, tmp_path, "--health-check=join", f"--standby={standby}", nnodes="2") as running:
        running.start("a", "b")
        running.wait_world(2)
        health = by_node(running.status())
        assert {node: (one["state"], one["why"]) for node, one in health.items()} == {
            "a": ("good", ""),
            "b": ("good", ""),
        }
        (checked,) = [event for event in running.events() if event["kind"] == "health"]
        assert passed(checked["text"]) == (1, ["a", "b"])


@pytest.mark.slow
def test_a_new_node_of_a_job_that_rejoins_is_checked_before_its_workers_wait(etcd: OutsideEtcd, tmp_path: Path) -> None:
    script = (str(WORKERS / "rejoin_plain.py"),)
    with job(etcd, tmp_path, "--health-check=both", nnodes="1:2", script=script) as running:
        running.start("a")
        one = running.wait_world(1)
        running.start("b")
        running.wait_world(2, after=one.round)
        events = [(event["kind"], event["node"]) for event in running.events()]
        assert events.count(("node-joined", "b")) == 1
        texts = [event["text"] for event in running.events() if event["kind"] == "health"]
        assert list(map(passed, texts)) == [(1, ["a"]), (2, ["b"])]
