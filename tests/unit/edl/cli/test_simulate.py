"""``edl simulate`` on small jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from edl.cli.__main__ import edl
from edl.cli.simulate import PRESETS, _typed, parse_fault
from edl.errors import SettingError
from edl.simulate import published
from edl.simulate.advice import AROUND
from edl.simulate.faults import FaultProcess, FaultType
from edl.simulate.scenario import SimulatedScenario
from edl.simulate.shape import ClusterShape, JobShape

SMALL = ("--nodes=4", "--spares=1", "--for=2d", "--fault=node:every=2d,lasts=1h")


def simulate(*words: str) -> Result:
    return CliRunner().invoke(edl, ["simulate", *words])


def told(*words: str) -> Any:
    return json.loads(simulate(*words, "--json").stdout)


def test_a_table_for_people() -> None:
    shown = simulate(*SMALL, "--price=2").stdout
    assert shown.startswith("Goodput: ")
    assert "5 nodes, 40 slots, 2 days; faults: " in shown
    assert "Cost: 3,840, of which" in shown
    assert any(line.split() == ["use", "slot-hours", "share"] for line in shown.splitlines())


def test_json_adds_up() -> None:
    found = told(*SMALL)
    assert sum(found["uses_s"].values()) == pytest.approx(found["slot_s"]) == pytest.approx(5 * 8 * 2 * 86_400)
    assert 0.5 < found["goodput_of_cluster"] < found["goodput"] < 1


def test_recommendations_and_the_plot(tmp_path: Path) -> None:
    picture = tmp_path / "interval.svg"
    words = ("--no-memory", "--checkpoint-blocks=30s", "--recommend", f"--plot={picture}")
    found = told(*SMALL, *words)
    assert [one["setting"] for one in found["advice"]] == ["--checkpoint-every", "--spares", "--node-unit"]
    assert picture.read_text().startswith("<svg")


def test_recommended_values_can_be_given_as_they_are_shown() -> None:
    words = ("--no-memory", "--checkpoint-blocks=30s", "--fault=worker:every=1d")
    shown = simulate(*SMALL, *words, "--recommend").stdout.splitlines()
    chosen = [line.split()[1:3] for line in shown if line.startswith("Recommended: ")]
    assert [setting for setting, _ in chosen] == ["--checkpoint-every", "--spares", "--node-unit"]
    assert simulate(*SMALL, *words, *(word for pair in chosen for word in pair)).exit_code == 0


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        ("--checkpoint-every", 1800.4, "1800s"),
        ("--checkpoint-every", 28.5, "28.5s"),
        ("--checkpoint-every", 0.4, "0.4s"),
        ("--checkpoint-every", 0.0, "0s"),
        ("--checkpoint-every", 1e-6, "0.000001s"),
        ("--node-unit", 1000.0, "1000"),
        ("--spares", 10.0, "10"),
    ],
)
def test_values_in_the_form_of_their_options(setting: str, value: float, text: str) -> None:
    assert _typed(setting, value) == text


def test_spares_below_zero_are_named() -> None:
    failed = simulate("--nodes=128", "--spares=-1")
    assert failed.exit_code == 2 and "'--spares'" in failed.output
    with pytest.raises(SettingError, match="--spares=-1: must be 0 or more"):
        SimulatedScenario(ClusterShape(127), JobShape(128, 128))


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("--no-memory",), "Set --checkpoint-blocks"),
        (("--checkpoint-blocks=30s",), "Simulate faults that cost a load, as with --no-memory"),
    ],
)
def test_nothing_to_draw(tmp_path: Path, words: tuple[str, ...], advice: str) -> None:
    failed = simulate(*SMALL, *words, f"--plot={tmp_path / 'interval.svg'}").exception
    assert advice in str(failed)


def test_a_plot_into_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    failed = simulate(*SMALL, f"--plot={tmp_path / 'none' / 'interval.svg'}").exception
    assert isinstance(failed, SettingError) and "cannot be written: No such file or directory" in str(failed)


def test_without_checkpoints_the_others_are_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "interval.svg"
    told(*SMALL, "--no-memory", "--checkpoint-every=0s", "--checkpoint-blocks=30s", f"--plot={picture}")
    assert picture.read_text().count("<circle") == len(AROUND) + 1


def test_recorded_faults(tmp_path: Path) -> None:
    trace = tmp_path / "faults.csv"
    trace.write_text("at_s,kind,unit\n3600,worker,2\n7200,master,\n")
    assert told("--nodes=4", "--for=1d", f"--trace={trace}")["faults"] == {"master": 1, "worker": 1}


def test_a_fault_on_the_command_line() -> None:
    process = parse_fault("node:every=30d,shape=0.7,lasts=~2h")
    assert process == FaultProcess(FaultType.NODE, 30 * 86_400.0, 0.7, 7200.0, varies=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("meteor:every=1d", "'meteor' is no kind of fault"),
        ("node", "every= is missing"),
        ("node:every=1d,often=2", "unknown 'often'"),
        ("node:every=often", "every='often' is no duration"),
        ("node:every=1d,shape=round", "shape='round' is no number"),
        ("straggler:every=1d", "--fault straggler:lasts=0: a straggler fault that does not last changes nothing"),
        ("worker:every=84d,lasts=2h", "--fault worker:lasts=7200: a worker fault has no duration"),
        ("drain:every=84d,factor=2", "--fault drain:factor=2: a drain fault has no factor"),
    ],
)
def test_bad_faults(text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        parse_fault(text)


@pytest.mark.parametrize(
    "words",
    [("--time=lunch=1h",), ("--step=long",), ("--checkpoint-size=huge",), ("--for=200d",), ("--min-nodes=900",)],
)
def test_other_bad_values_are_refused(words: tuple[str, ...]) -> None:
    assert simulate("--nodes=4", *words).exit_code != 0


def test_the_presets_are_those_that_exist() -> None:
    assert set(PRESETS) == set(published.PRESETS)
