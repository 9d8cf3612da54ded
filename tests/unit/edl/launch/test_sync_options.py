"""``--sync-dir``: which directories are accepted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edl.config import JobSpec, NodeRange
from edl.errors import SettingError
from edl.job_records import Training
from edl.launch.options.agreement import differences
from edl.launch.sync_options import sync_from
from edl.types import JobId

OPTIONS = {"sync_timeout": 600.0}


def spec(*given: str, servers: Training | None = None) -> JobSpec:
    return JobSpec(JobId("j"), NodeRange(1, 2), sync_dirs=given, servers=servers)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the launcher runs, below the home folder."""
    (tmp_path / "home/here").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home/here")
    return tmp_path / "home/here"


def test_directories_are_relative_to_where_the_launcher_runs(here: Path) -> None:
    assert sync_from(OPTIONS, spec()).roots == ()
    assert sync_from(OPTIONS, spec("out", "file:///data/b")).roots == (str(here / "out"), "/data/b")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("/", "contains the folder in which"),
        (".", "is the folder in which"),
        ("..", "contains the folder in which"),
        ("", "is not a directory of this host"),
        ("s3://bucket/x", "is not a directory of this host"),
        ("file", "is not a directory"),
    ],
)
def test_what_would_copy_far_more_or_nothing_is_refused(here: Path, given: str, why: str) -> None:
    (here / "file").write_text("")
    with pytest.raises(SettingError, match="--sync-dir") as raised:
        sync_from(OPTIONS, spec(given))
    assert why in str(raised.value)
    assert "Name the folder that holds the script's checkpoints" in str(raised.value)


def test_a_user_without_a_home_folder_may_have_synchronised_directories(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that runs as any user id."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    assert sync_from(OPTIONS, spec("out")).roots == (str(here / "out"),)


def test_the_home_folder_is_refused_from_elsewhere(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    with pytest.raises(SettingError, match="is the home folder"):
        sync_from(OPTIONS, spec(str(here.parent)))


def test_one_directory_in_another_is_refused() -> None:
    with pytest.raises(SettingError, match="overlaps"):
        sync_from(OPTIONS, spec("out", "out/a"))


def test_trainers_of_parameter_servers_are_refused() -> None:
    with pytest.raises(SettingError, match="parameter servers"):
        sync_from(OPTIONS, spec("out", servers=Training()))


def test_launchers_must_name_the_same_directories() -> None:
    assert differences(spec("out"), spec("output")) == ["--sync-dir=out (the running job has output)"]
