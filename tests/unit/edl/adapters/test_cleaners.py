"""What a job needs in a temporary folder looks as if it were in use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edl.adapters.cleaners import is_temporary, touch

LONG_AGO = (1_000_000_000.0, 1_000_000_000.0)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder that nobody has used for years."""
    (tmp_path / "tls").mkdir()
    (tmp_path / "tls" / "cert.pem").write_text("a certificate")
    (tmp_path / "gone").symlink_to("nowhere")
    for path in (tmp_path / "tls" / "cert.pem", tmp_path / "tls", tmp_path):
        os.utime(path, LONG_AGO)
    return tmp_path


def test_files_and_folders_look_used_and_unchanged(old: Path) -> None:
    touch(old)
    for path in (old, old / "tls", old / "tls" / "cert.pem"):
        found = path.lstat()
        assert found.st_atime > LONG_AGO[0], path
        assert found.st_mtime == LONG_AGO[1], path


def test_one_file_is_enough(old: Path) -> None:
    touch(old / "tls" / "cert.pem")
    assert (old / "tls" / "cert.pem").lstat().st_atime > LONG_AGO[0]
    assert (old / "tls").lstat().st_atime == LONG_AGO[0]


def test_what_is_not_there_is_passed_over(tmp_path: Path) -> None:
    touch(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []


def test_only_temporary_folders_are_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert is_temporary(tmp_path / "edl-1000" / "job")
    assert is_temporary(Path("/var/tmp/edl-1000"))
    assert not is_temporary(Path("/data/tmp/edl"))
    assert not is_temporary(Path("/tmpfiles"))
