"""The options about stragglers."""

from __future__ import annotations

from pathlib import Path

import pytest
from click import UsageError

from edl.errors import EdlError
from edl.job_records import StragglerMode, StragglerRules
from edl.launch.watching import judged_by
from tests.unit.edl.launch.test_cli import read


def rules(*options: str) -> StragglerRules:
    """As the Master of this launcher applies them."""
    settings = read("--nnodes=1", *options, "x.py")
    return judged_by(settings.spec, settings.limits).stragglers


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("")


def test_by_default_they_are_reported() -> None:
    assert rules() == StragglerRules(StragglerMode.REPORT, windows=6, share=0.2)


def test_what_is_given_applies() -> None:
    found = rules("--stragglers=exclude", "--straggler-windows=12", "--watch=straggler=0.5")
    assert found == StragglerRules(StragglerMode.EXCLUDE, windows=12, share=0.5)


@pytest.mark.parametrize("option", ["--stragglers=off", "--watch=straggler=off", "--watch=off"])
def test_off(option: str) -> None:
    assert rules("--stragglers=exclude", option).mode is StragglerMode.OFF


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--stragglers=kill", "'kill' is not one of 'off', 'report', 'exclude'"),
        ("--straggler-windows=0", "--straggler-windows=0: must be from 1 to 1000"),
        ("--straggler-windows=1001", "must be from 1 to 1000"),
    ],
)
def test_what_makes_no_sense_is_refused(option: str, message: str) -> None:
    with pytest.raises((EdlError, UsageError), match=message):
        rules(option)


def test_the_limit_is_no_part_of_what_launchers_must_agree_on() -> None:
    assert read("--nnodes=1", "--watch=straggler=0.5", "x.py").spec.stragglers == StragglerRules()
