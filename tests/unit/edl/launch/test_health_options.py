"""The options of health checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.config import JobSpec, NodeRange
from edl.errors import SettingError
from edl.job_records import HealthMode, HealthRules, SlowNodes
from edl.launch.options.agreement import differences
from edl.types import JobId
from tests.unit.edl.launch.test_cli import read


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("")


def test_it_is_off_unless_asked_for() -> None:
    found = read("x.py")
    assert found.spec.health == HealthRules()
    assert found.spec.health.mode is HealthMode.OFF and found.health_probes == ()


def test_what_is_asked_for() -> None:
    found = read(
        *("--health-check=both", "--health-check-timeout=5", "--health-check-size=512", "--health-check-slow=exclude"),
        *(
            "--health-check-factor=1.5",
            "--health-check-expiry=0",
            "--health-probe=a.b:c",
            "--health-probe=d:e.f",
            "x.py",
        ),
    )
    assert found.spec.health == HealthRules(HealthMode.BOTH, 5.0, 512, SlowNodes.EXCLUDE, 1.5, 0.0)
    assert found.health_probes == ("a.b:c", "d:e.f")


@pytest.mark.parametrize(
    ("mode", "on_join", "on_failure"),
    [("off", False, False), ("join", True, False), ("failure", False, True), ("both", True, True)],
)
def test_modes(mode: str, on_join: bool, on_failure: bool) -> None:
    assert (HealthMode(mode).on_join, HealthMode(mode).on_failure) == (on_join, on_failure)


def test_launchers_that_differ_are_refused() -> None:
    one, other = (JobSpec(JobId("j"), NodeRange(1, 2), health=HealthRules(mode)) for mode in list(HealthMode)[:2])
    assert differences(one, other) == ["--health-check=off (the running job has join)"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--health-check-timeout=0", "more than 0"),
        ("--health-check-timeout=inf", "finite"),
        ("--health-check-size=15", "from 16 to 65536"),
        ("--health-check-size=65537", "from 16 to 65536"),
        ("--health-check-factor=1", "more than 1"),
        ("--health-check-factor=nan", "more than 1"),
        ("--health-check-expiry=-1", "0 or more"),
        ("--health-probe=module", "MODULE:FUNCTION"),
        ("--health-probe=", "MODULE:FUNCTION"),
        ("--health-probe=a:b:c", "MODULE:FUNCTION"),
    ],
)
def test_refused(argument: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        read(argument, "x.py")
