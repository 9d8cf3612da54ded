"""The tables of metrics: names, labels, and what repeats names from elsewhere."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from edl.agent.machine.state import AgentPhase
from edl.master.state import NodeStatus, Phase
from edl.metrics import job, node
from edl.metrics.__main__ import TABLES
from edl.metrics.exposition import JOB_LABEL
from edl.metrics.metric import Metric, MetricKind
from edl.wire.health_records import Fitness
from tests.support.metrics_facts import random_job_facts, random_node_facts

ALL: tuple[Metric[Any], ...] = (*job.JOB_METRICS, *node.NODE_METRICS)
PAGE = Path(__file__).parents[4] / "docs" / "metrics.md"


def test_names_are_unique() -> None:
    assert len({metric.name for metric in ALL}) == len(ALL)


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_name_help_and_labels(metric: Metric[Any]) -> None:
    assert re.fullmatch("edl(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
    assert re.fullmatch(r"[A-Z1].*\.", metric.help)
    assert "|" not in metric.help and "`" not in metric.help
    assert all(re.fullmatch("[a-z]+", label) and label not in (JOB_LABEL, "job", "instance") for label in metric.labels)
    drawn = random.Random(metric.name)
    for _ in range(20):
        facts: Any = random_job_facts(drawn) if metric in job.JOB_METRICS else random_node_facts(drawn)
        for labels, value in metric.read(facts):
            assert len(labels) == len(metric.labels)
            assert isinstance(value, float)


def test_names_of_nodes_are_in_one_metric_only() -> None:
    assert [metric.name for metric in ALL if {"node", "host"} & {*metric.labels}] == ["edl_node_info"]


def test_states_are_those_of_the_machines() -> None:
    assert {*job.PHASES} == {phase.value for phase in Phase} | {"suspended"}
    kept_out = {"cordoned", "checking", Fitness.SLOW.value, Fitness.FAULTY.value}
    assert {*job.NODE_STATES} == {status.value for status in NodeStatus} | {"spare"} | kept_out
    assert {*node.PHASES} == {phase.value for phase in AgentPhase}


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert TABLES.replaced(page) == page, "run python -m edl.metrics --write docs/metrics.md"
