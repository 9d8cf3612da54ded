"""The folder that a user's jobs share on a host: nobody else may have made it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from edl.adapters.host_notes import runtime_folder
from edl.errors import SettingError


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory that all users share."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_the_user_may_enter(shared: Path) -> None:
    assert runtime_folder().stat().st_mode & 0o777 == 0o700
    runtime_folder().chmod(0o755)
    assert runtime_folder().stat().st_mode & 0o777 == 0o700


def test_a_link_that_somebody_has_put_there_is_refused(shared: Path) -> None:
    elsewhere = shared / "elsewhere"
    elsewhere.mkdir()
    (shared / f"edl-{os.getuid()}").symlink_to(elsewhere)
    with pytest.raises(SettingError, match=r"TMPDIR=.*belongs to somebody else"):
        runtime_folder()


def test_a_folder_of_somebody_else_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.getuid()
    (shared / f"edl-{mine + 1}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(SettingError, match="Set TMPDIR to a folder of your own"):
        runtime_folder()
