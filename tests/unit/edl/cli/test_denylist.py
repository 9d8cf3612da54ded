"""``edl denylist``: where it looks for the list."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from edl.cli.__main__ import edl
from edl.errors import SettingError, UsageError


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


def test_expired_entries_are_told_of_and_removed_together(tmp_path: Path) -> None:
    """Jobs that are shorter than an entry leave it where it is."""
    runner = CliRunner(env={"EDL_DENYLIST": str(tmp_path)})

    def call(*words: str) -> str:
        done = runner.invoke(edl, ["denylist", *words])
        assert done.exit_code == 0, done.output
        return done.output

    call("add", "m1", "--reason=fans")
    call("add", "--device=GPU-1", "--reason=ECC", "--for=1h")
    assert "expired" not in call("list")
    for path in tmp_path.glob("*GPU-1*"):
        plain = json.loads(path.read_text())
        path.write_text(json.dumps({**plain, "until_s": 1000.0}))
    assert f"edl: 1 expired entry in {tmp_path}: delete with edl denylist remove --expired\n" in call("list")
    assert call("remove", "--expired") == "removed: GPU-1 (expired 1970-01-01 00:16 UTC)\n"
    assert call("list").startswith("host m1:")
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert call("remove", "--expired") == ""


@pytest.mark.parametrize("words", [[], ["m1", "--expired"]])
def test_what_to_remove_is_said_in_one_way(words: list[str], tmp_path: Path) -> None:
    failed = CliRunner(env={"EDL_DENYLIST": str(tmp_path)}).invoke(edl, ["denylist", "remove", *words]).exception
    assert isinstance(failed, UsageError) and "name hosts or devices, or give --expired" in str(failed)


@pytest.mark.parametrize("period", ["0s", "0d", "soon", "7"])
def test_an_entry_for_no_time_is_refused(period: str, tmp_path: Path) -> None:
    """For the denylist itself, 0 would mean that the entry never expires."""
    runner = CliRunner(env={"EDL_DENYLIST": str(tmp_path)})
    failed = runner.invoke(edl, ["denylist", "add", "m1", "--reason=fans", f"--for={period}"]).exception
    assert isinstance(failed, SettingError) and f"--for={period}: must be a time above 0" in str(failed)
    assert not list(tmp_path.iterdir())
