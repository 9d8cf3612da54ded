"""The options of the autoscale policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.config import AutoscaleRules, JobSpec, NodeRange
from edl.errors import SettingError
from edl.launch.options.agreement import differences
from edl.types import JobId
from tests.unit.edl.launch.test_cli import read


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("")


def test_it_is_off_unless_asked_for() -> None:
    assert read("--nnodes=1:4", "x.py").spec.autoscale == AutoscaleRules()


def test_what_is_asked_for() -> None:
    found = read(
        "--nnodes=1:4", "--autoscale=throughput", "--autoscale-efficiency=0.8", "--autoscale-cooldown=5", "x.py"
    )
    assert found.spec.autoscale == AutoscaleRules(True, 0.8, 5.0)


def test_launchers_that_differ_are_told() -> None:
    one, other = (JobSpec(JobId("j"), NodeRange(1, 2), autoscale=AutoscaleRules(on)) for on in (True, False))
    assert differences(one, other) == ["--autoscale=throughput (the running job has off)"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--autoscale=throughput",), "leaves no choice of size"),
        (("--nnodes=1:2", "--autoscale-efficiency=0"), "more than 0, and at most 1"),
        (("--nnodes=1:2", "--autoscale-efficiency=1.5"), "more than 0, and at most 1"),
        (("--nnodes=1:2", "--autoscale-efficiency=nan"), "more than 0, and at most 1"),
        (("--nnodes=1:2", "--autoscale-cooldown=-1"), "must be 0 or more"),
    ],
)
def test_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        read(*arguments, "x.py")
