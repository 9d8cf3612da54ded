"""What a client of /metrics reads, held against the facts, with the library's own parsers."""

from __future__ import annotations

import random
import shutil
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from edl.metrics.exposition import expose
from edl.metrics.facts import JobFacts, NodeFacts
from edl.metrics.job import JOB_METRICS
from edl.metrics.metric import Metric
from edl.metrics.node import NODE_METRICS
from tests.support.metrics_facts import NAME, random_job_facts, random_node_facts

SEEDS = range(60)
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series(node: NodeFacts, job: JobFacts | None, accept: str = "") -> Series:
    """All values by name and labels, without ``edl_job``, which each must have."""
    body, media_type = expose("train", node, job, accept)
    assert media_type.startswith("application/openmetrics-text" if accept else "text/plain; version=")
    parse: Callable[[str], Any] = parse_openmetrics if accept else parse_text
    found: Series = {}
    for family in parse(body.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("edl_job") == "train"
            key = sample.name, frozenset(labels.items())
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def at(found: Series, name: str, **labels: str) -> float | None:
    return found.get((name, frozenset(labels.items())))


@pytest.mark.parametrize("seed", SEEDS)
def test_values_of_the_job(seed: int) -> None:
    drawn = random.Random(seed)
    facts, node = random_job_facts(drawn), random_node_facts(drawn)
    status, totals = facts.status, facts.totals
    found = series(node, facts)
    assert [name for (name, labels), value in found.items() if name == "edl_job_phase" and value == 1] == [
        "edl_job_phase"
    ]
    assert at(found, "edl_job_phase", phase=status.phase) == 1
    for state in {one.state for one in status.nodes} | {"cordoned"}:
        assert at(found, "edl_nodes", state=state) == len([one for one in status.nodes if one.state == state])
    assert at(found, "edl_detached_nodes") == len([one for one in status.nodes if not one.attached])
    assert at(found, "edl_world_workers") == status.world_size
    assert at(found, "edl_restarts_left") == status.restarts_allowed - status.restarts_used
    assert at(found, "edl_resize_pending") == (1 if status.scale.generation == 2 else 0)
    times = sorted(one.step_s for one in status.nodes if one.step_s)
    assert at(found, "edl_step_duration_seconds", which="slowest") == (times[-1] if times else None)
    median = statistics.median(times) if times else None
    assert at(found, "edl_step_duration_seconds", which="median") == median
    own = [one.own_s for node in status.nodes for one in node.ranks if one.own_s >= 0]
    assert at(found, "edl_own_time_seconds", which="slowest") == (max(own) if own else None)
    assert at(found, "edl_own_time_seconds", which="median") == (statistics.median(own) if own else None)
    waits = [one.peers_share for node in status.nodes for one in node.ranks if one.peers_share >= 0]
    assert at(found, "edl_rank_wait_ratio", reason="peers") == (
        pytest.approx(statistics.fmean(waits)) if waits else None
    )
    assert at(found, "edl_stragglers") == 0
    batch = status.settings.global_batch
    expected = batch / median if median and batch else None
    assert at(found, "edl_samples_per_second") == expected
    assert at(found, "edl_step") == (status.commit or None)
    assert at(found, "edl_rounds_total", cause="node-lost") == totals.rounds["node-lost"]
    assert at(found, "edl_history_entries_total", kind="node-lost") == totals.entries.get("node-lost", 0)
    counts = {(view.name, one.name): one.value for view in status.services for one in view.counts}
    assert at(found, "edl_data_shards_by_state", dataset=NAME, state="done") == counts.get((NAME, "done_shards"))
    records = counts.get((NAME, "records"))
    assert at(found, "edl_data_records", dataset=NAME) == (None if records == -1 else records)
    assert at(found, "edl_ps_rows") == counts.get(("pservers", "rows")), "not twice: each pserver's are in it"


@pytest.mark.parametrize("seed", SEEDS)
def test_values_of_a_node(seed: int) -> None:
    node = random_node_facts(random.Random(seed))
    found = series(node, None)
    assert at(found, "edl_node_info", node=NAME, host="10.0.0.1", role="default") == 1
    assert at(found, "edl_master") == node.is_master
    assert at(found, "edl_node_workers", state="training") == node.training
    assert at(found, "edl_node_worker_exits_total", result="signal") == node.exits["signal"]
    assert at(found, "edl_node_worker_exits_total", result="error") == 0
    assert at(found, "edl_node_commit") == (node.held.commit or None)
    checkpoints = node.directories[0]
    assert at(found, "edl_directory_free_bytes", directory="checkpoints") == checkpoints.free_bytes
    free = checkpoints.free_inodes if checkpoints.inodes else None
    assert at(found, "edl_directory_free_inodes", directory="checkpoints") == free
    assert at(found, "edl_directory_reachable", directory="logs") == 0
    assert at(found, "edl_directory_free_bytes", directory="logs") is None, "0 would mean that it is full"
    of_the_job = {metric.name for metric in JOB_METRICS}
    assert not of_the_job & {name for name, _ in found}, "this launcher is not the Master"


@pytest.mark.parametrize("seed", range(10))
def test_openmetrics_says_the_same(seed: int) -> None:
    drawn = random.Random(seed)
    job, node = random_job_facts(drawn), random_node_facts(drawn)
    assert series(node, job, OPENMETRICS) == series(node, job)


def test_every_metric_is_served() -> None:
    drawn = random.Random(1)
    names = {name for _ in range(50) for name, _ in series(random_node_facts(drawn), random_job_facts(drawn))}
    metrics: tuple[Metric[Any], ...] = (*JOB_METRICS, *NODE_METRICS)
    missing = {metric.name for metric in metrics} - names
    assert missing == {
        *("edl_proposed_nodes", "edl_data_left_seconds", "edl_ps_trainers", "edl_ps_moving_buckets"),
        *("edl_ps_bare_buckets", "edl_node_checkpoint_commit"),
    }, "these are not among the random facts"


def test_promtool_has_no_remark() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    drawn = random.Random(3)
    body, _ = expose("train", random_node_facts(drawn), random_job_facts(drawn), "")
    checked = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
