"""Metrics of real launchers: what a scraper reads from the Master and from another node, before and after a failure."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.process.harness import WORKERS, Job, Node, OutsideEtcd, until

READ = "a-token-that-may-only-look"
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def job(etcd: OutsideEtcd, tmp_path: Path) -> Iterator[Job]:
    (tmp_path / "read").write_text(READ)
    options = ("--http-port=0", "--http-read-token-file=read", f"--checkpoint-dir={tmp_path / 'checkpoints'}")
    with Job(
        tmp_path, [etcd.endpoint], nnodes="1:2", script=(str(WORKERS / "rejoin_plain.py"),), options=options
    ) as running:
        yield running


def scraped(node: Node, job: str) -> Series:
    """The values by name and labels, without the job's label, which is checked."""
    found = re.search(r"HTTP: http://127\.0\.0\.1:(\d+)", node.text)
    assert found is not None
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)) as connection:
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {READ}"})
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, text
    series: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("edl_job") == job
            series[sample.name, frozenset(labels.items())] = sample.value
    return series


def at(series: Series, name: str, **labels: str) -> float | None:
    return series.get((name, frozenset(labels.items())))


@pytest.mark.slow
def test_the_master_and_another_node_are_scraped(job: Job) -> None:
    job.start("a", "b")
    for name in ("a", "b"):
        job.nodes[name].says("HTTP: http://")
    seen = job.wait_world(2)
    master = str(job.status()["master"])
    other = "b" if master == "a" else "a"

    def of(name: str) -> Series:
        return scraped(job.nodes[name], job.name)

    def paced(series: Series) -> bool:
        return bool(at(series, "edl_step") and at(series, "edl_step_duration_seconds", which="slowest"))

    until(lambda: paced(of(master)), "the pace of the nodes")
    check_job(of(master))
    check_node(of(other), other)

    os.kill(seen.pids_of(other)[0], signal.SIGKILL)
    until(lambda: at(of(master), "edl_rounds_total", cause="worker-failed") == 1, "the restart in the metrics")
    until(lambda: at(of(other), "edl_node_worker_exits_total", result="signal") == 1, "the end of the worker")
    series = of(master)
    allowed = at(series, "edl_restarts_allowed") or 0
    assert (at(series, "edl_restarts_used"), at(series, "edl_restarts_left")) == (1, allowed - 1)
    assert (at(series, "edl_history_entries_total", kind="worker-failed") or 0) >= 1

    until(lambda: job.cli("checkpoint").returncode == 0, "a checkpoint")
    until(lambda: (at(of(master), "edl_checkpoint_timestamp_seconds") or 0) > 1.7e9, "the time of the checkpoint")

    job.nodes[master].kill()
    until(lambda: at(of(other), "edl_master") == 1, "the next Master")
    until(lambda: at(of(other), "edl_rounds_total", cause="node-lost") == 1, "its first world")
    series = of(other)
    assert at(series, "edl_rounds_total", cause="worker-failed") == 0, "it counts from its election on"
    assert (at(series, "edl_checkpoint_timestamp_seconds") or 0) > 1.7e9, "from the history of the last one"


def check_job(series: Series) -> None:
    """The job of two nodes trains."""
    assert at(series, "edl_master") == at(series, "edl_job_phase", phase="running") == 1
    assert at(series, "edl_world_workers") == at(series, "edl_nodes", state="running") == 2
    assert at(series, "edl_rounds_total", cause="worker-failed") == 0
    formed = sum(value for (name, _), value in series.items() if name == "edl_rounds_total")
    assert formed == at(series, "edl_round"), "this Master has formed all of them"
    assert at(series, "edl_world_changes_total", phase="forming") == formed
    assert (at(series, "edl_world_change_seconds_total", phase="forming") or 0) > 0


def check_node(series: Series, name: str) -> None:
    """A node that is not the Master trains, and has commits in memory."""
    assert at(series, "edl_node_info", node=name, host="127.0.0.1", role="default") == 1
    assert (at(series, "edl_master"), at(series, "edl_job_phase", phase="running")) == (0, None)
    assert at(series, "edl_node_workers", state="training") == at(series, "edl_store_reachable") == 1
    age_s, ttl_s = at(series, "edl_lease_age_seconds"), at(series, "edl_lease_ttl_seconds")
    assert age_s is not None and ttl_s is not None and 0 <= age_s < 6 * ttl_s
    assert (at(series, "edl_node_memory_bytes", use="workers") or 0) > 0
    assert (at(series, "edl_node_commit") or 0) > 0
    for directory in ("checkpoints", "logs"):
        assert (at(series, "edl_directory_free_bytes", directory=directory) or 0) > 0
