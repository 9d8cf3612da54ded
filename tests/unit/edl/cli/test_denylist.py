"""``edl denylist``: where it looks for the list."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from edl.cli.__main__ import edl
from edl.errors import UsageError


def test_a_directory_from_the_environment(tmp_path: Path) -> None:
    runner = CliRunner(env={"EDL_DENYLIST": str(tmp_path)})
    assert runner.invoke(edl, ["denylist", "add", "m1", "--reason=fans"]).exit_code == 0
    assert runner.invoke(edl, ["denylist", "list"]).stdout.startswith("host m1: until it is removed")


@pytest.mark.parametrize("where", ["off", ""])
def test_off_names_no_directory(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed = CliRunner(env={"EDL_DENYLIST": where}).invoke(edl, ["denylist", "add", "m1", "--reason=fans"]).exception
    assert isinstance(failed, UsageError) and "where is the denylist? Name its directory (--at=DIR)" in str(failed)
    assert not list(tmp_path.iterdir())
