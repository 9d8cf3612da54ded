"""A worker's report of an uncaught exception."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edl.agent.machine.diagnosis import last_words
from edl.worker import bootstrap


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("half made")


def fail(error: Exception) -> int | str | None:
    """The status that the worker ends with."""
    try:
        raise error
    except Exception as caught:  # noqa: BLE001 - as the top of a worker does
        with pytest.raises(SystemExit) as status:
            bootstrap._fail(caught)
        return status.value.code


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def test_the_error_file_says_what_and_where(error_file: Path) -> None:
    assert fail(ValueError("7 is odd")) == 1
    words = last_words(1, "", error_file.read_text())
    assert words.exception == "ValueError: 7 is odd"
    assert "raise error" in words.traceback


def test_an_exception_that_cannot_say_what_it_is_is_still_told_of(
    error_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fail(Mute()) == 1
    words = last_words(1, "", error_file.read_text())
    assert words.exception == "Mute: <exception str() failed>"
    assert "raise error" in words.traceback and "_fail" not in words.traceback
    assert "Mute" in capsys.readouterr().err


def test_what_the_decorator_has_told_of_the_same_error_stays(error_file: Path) -> None:
    theirs = json.dumps({"message": {"message": "ValueError: 7 is odd", "extraInfo": {"py_callstack": "theirs"}}})
    error_file.write_text(theirs)
    fail(ValueError("7 is odd"))
    assert error_file.read_text() == theirs
    fail(ValueError("8 is even"))
    assert "8 is even" in error_file.read_text()


def test_where_it_cannot_be_written_the_traceback_is_printed_all_the_same(
    error_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error_file.mkdir()
    assert fail(ValueError("7 is odd")) == 1
    said = capsys.readouterr().err
    assert f"cannot write the error file {error_file}" in said
    assert said.endswith("ValueError: 7 is odd\n")
