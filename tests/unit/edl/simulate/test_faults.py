"""Faults from a seed, and from a file."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest

from edl.errors import SettingError
from edl.simulate.faults import TRAITS, FaultProcess, FaultType, TimedFault, affected, draw
from edl.simulate.recorded import FaultFileError, read
from edl.simulate.scenario import DAY_S
from edl.simulate.shape import ClusterShape

CLUSTER = ClusterShape(10, 8, 4, 8)


@pytest.mark.parametrize("shape", [0.7, 1.0, 3.0])
def test_means_and_spreads_are_those_of_the_distribution(shape: float) -> None:
    faults = draw([FaultProcess(FaultType.WORKER, 100.0, shape)], ClusterShape(1), 400_000.0, 5)
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(faults)]
    spread = math.sqrt(math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1)
    assert statistics.fmean(gaps) == pytest.approx(100, abs=4 * 100 * spread / math.sqrt(len(gaps)))
    assert statistics.stdev(gaps) / 100 == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("shape", [0.5, 0.7, 1.0, 1.5, 3.0])
def test_units_are_not_new_when_the_job_begins(shape: float) -> None:
    """A stationary renewal process has time / mean renewals on average, whatever the distribution of its gaps. The
    standard error comes from the counts themselves."""
    nodes, mean_s, horizon_s = 5_000, 84 * DAY_S, 30 * DAY_S
    faults = draw([FaultProcess(FaultType.NODE, mean_s, shape)], ClusterShape(nodes), horizon_s, 7)
    hits = Counter(one.unit for one in faults)
    counts = [hits[unit] for unit in range(nodes)]
    error = statistics.stdev(counts) / math.sqrt(nodes)
    assert abs(statistics.fmean(counts) - horizon_s / mean_s) < 4 * error


def test_exponential_faults_of_a_seed_stay_what_they_are() -> None:
    chance = random.Random("3/worker/0/0")
    first = draw([FaultProcess(FaultType.WORKER, 100.0)], ClusterShape(1), 10_000.0, 3)[0]
    assert first.at_s == chance.weibullvariate(100.0, 1.0)


def test_more_nodes_and_more_kinds_leave_the_faults_of_others() -> None:
    node, rack = FaultProcess(FaultType.NODE, 500.0, lasts_s=50.0), FaultProcess(FaultType.RACK, 900.0)
    small = draw([node], CLUSTER, 5000.0, 1)
    large = draw([node, rack], ClusterShape(12, 8, 4), 5000.0, 1)
    assert [one for one in large if one.kind is FaultType.NODE and one.unit < 10] == small
    assert draw([node], CLUSTER, 5000.0, 2) != small


def test_a_unit_under_repair_does_not_fail() -> None:
    faults = draw([FaultProcess(FaultType.NODE, 10.0, lasts_s=100.0)], ClusterShape(1), 10_000.0, 0)
    assert all(after.at_s > before.at_s + 100 for before, after in itertools.pairwise(faults))


def test_racks_and_switches_fail_together() -> None:
    assert affected(TimedFault(0, 2, FaultType.RACK), CLUSTER) == range(8, 10)
    assert affected(TimedFault(0, 0, FaultType.SWITCH), CLUSTER) == range(8)
    assert affected(TimedFault(0, 3, FaultType.NODE), CLUSTER) == range(3, 4)
    with pytest.raises(SettingError, match="needs --switch-nodes"):
        draw([FaultProcess(FaultType.SWITCH, 10.0)], ClusterShape(4), 10.0, 0)


@pytest.mark.parametrize("wrong", [{"every_s": 0.0}, {"shape": 0.0}, {"lasts_s": -1.0}, {"factor": math.nan}])
def test_bad_processes(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingError, match="--fault node:"):
        FaultProcess(FaultType.NODE, **{"every_s": 1.0, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (FaultType.STORE, {}, "store:lasts=0: a store fault that does not last changes nothing. Add lasts="),
        (FaultType.STRAGGLER, {"factor": 3.0}, "straggler:lasts=0: a straggler fault that does not last"),
        (FaultType.SLOW_STORAGE, {}, "slow-storage:lasts=0: a slow-storage fault that does not last"),
        (FaultType.WORKER, {"lasts_s": 7200.0}, "worker:lasts=7200: a worker fault has no duration"),
        (FaultType.MASTER, {"lasts_s": 60.0}, "master:lasts=60: a master fault has no duration"),
        (FaultType.NODE, {"factor": 3.0}, "node:factor=3: a node fault has no factor.* Leave out factor="),
    ],
)
def test_values_that_do_nothing_are_refused(kind: FaultType, values: dict[str, float], message: str) -> None:
    with pytest.raises(SettingError, match=f"--fault {message}"):
        FaultProcess(kind, 86_400.0, **values)  # type: ignore[arg-type]


def test_every_kind_has_its_traits() -> None:
    assert set(TRAITS) == set(FaultType)


def test_a_straggler_is_twice_as_slow_unless_a_factor_is_given(tmp_path: Path) -> None:
    drawn = [FaultProcess(FaultType.STRAGGLER, 10.0, lasts_s=5.0, factor=factor) for factor in (None, 4.0)]
    assert {one.factor for one in draw(drawn[:1], ClusterShape(1), 1000.0, 0)} == {2.0}
    assert {one.factor for one in draw(drawn[1:], ClusterShape(1), 1000.0, 0)} == {4.0}
    (tmp_path / "a.csv").write_text("at_s,kind,lasts_s,factor\n1,straggler,5,\n2,slow-storage,5,4\n3,node,5,\n")
    assert [one.factor for one in read(tmp_path / "a.csv", CLUSTER)] == [2.0, 4.0, 1.0]


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path: Path) -> None:
    for name, text in (("a.csv", "at_s,kind\n1,worker\n"), ("a.jsonl", '{"at_s": 1, "kind": "worker"}\n')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert read(tmp_path / name, CLUSTER) == [TimedFault(1.0, 0, FaultType.WORKER)]


def test_recorded_faults_in_both_forms(tmp_path: Path) -> None:
    table, lines = tmp_path / "faults.csv", tmp_path / "faults.jsonl"
    table.write_text("at_s, kind, unit, lasts_s\n90, rack, 1, 60\n5.5, node, 3,\n")
    lines.write_text(
        '{"at_s": 90, "kind": "rack", "unit": 1, "lasts_s": 60}\n\n{"at_s": 5.5, "kind": "node", "unit": 3}\n'
    )
    expected = [TimedFault(5.5, 3, FaultType.NODE), TimedFault(90.0, 1, FaultType.RACK, 60.0)]
    assert read(table, CLUSTER) == read(lines, CLUSTER) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "at_s,kind\n1,node\nsoon,node\n", r"a\.csv, line 3: at_s='soon' is no number of 0 or more"),
        ("a.csv", "at_s,kind\n1,meteor\n", r"line 2: kind='meteor'. Use one of worker, node"),
        ("a.csv", "at_s,what\n", "line 1: unknown column 'what'. Columns are at_s, kind"),
        ("a.csv", "at_s,unit\n", "line 1: column kind is missing"),
        ("a.csv", "at_s,kind\n1,node,3\n", "line 2: more values than the 2 columns"),
        ("a.csv", "at_s,kind,unit\n1,node,10\n", "line 2: unit of a node fault=10: must be from 0 to 9"),
        ("a.csv", "at_s,kind,unit\n1,node,1.5\n", "line 2: unit=1.5"),
        ("a.csv", "at_s,kind\n", "there is no fault in it"),
        ("a.jsonl", "{\n", r"line 1: not JSON"),
        ("a.jsonl", "[1]\n", r"line 1: '\[1\]' is no object"),
        ("a.jsonl", '{"at_s": true, "kind": "node"}\n', "at_s=True is no number"),
        ("a.jsonl", '{"at_s": -1, "kind": "node"}\n', "at_s=-1 is no number of 0 or more"),
        ("a.jsonl", '{"at_s": 1, "kind": "straggler", "factor": 0.5}\n', "factor=0.5. It must be at least 1"),
        ("a.csv", "at_s,kind\n1,straggler\n", "line 2: lasts_s=0: a straggler fault that does not last changes noth"),
        ("a.csv", "at_s,kind,lasts_s\n1,worker,60\n", "line 2: lasts_s=60: a worker fault has no duration.* Leave it"),
        ("a.csv", "at_s,kind,factor\n1,node,2\n", "line 2: factor=2: a node fault has no factor.* Leave it out"),
    ],
)
def test_bad_files_are_named_with_line_and_value(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(FaultFileError, match=message):
        read(tmp_path / name, CLUSTER)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FaultFileError, match="cannot be read"):
        read(tmp_path / "none.csv", CLUSTER)
