"""A value made of files: made anew when they change, kept when they are no good."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from edl.errors import SettingError
from edl.file_backed import FileBacked


class Number:
    """What a file says, as a number."""

    def __init__(self, folder: Path) -> None:
        self.file, self.log = folder / "number", list[str]()
        self.put("1")
        self.value = FileBacked("the numbers", [str(self.file)], self.make, self.log.append)

    def make(self) -> int:
        text = self.file.read_text()
        if not text.isdigit():
            raise SettingError("number", text, "is none")
        return int(text)

    def put(self, text: str) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(text)
        new.replace(self.file)

    def refreshed(self) -> int:
        self.value.refresh()
        return self.value.newest


@pytest.fixture
def number(tmp_path: Path) -> Number:
    return Number(tmp_path)


def test_it_is_made_anew_when_a_file_changes_and_only_then(number: Number) -> None:
    assert (number.refreshed(), number.value.loads, number.log) == (1, 1, [])
    number.put("2")
    assert number.value.newest == 1
    assert (number.refreshed(), number.refreshed(), number.value.loads) == (2, 2, 2)
    assert number.log == ["the numbers have changed; new connections use them"]


@pytest.mark.parametrize("bad", ["half", None], ids=["no good", "gone"])
def test_it_stays_while_the_files_are_no_good(number: Number, bad: str | None) -> None:
    number.put(bad) if bad else number.file.unlink()
    assert (number.refreshed(), number.refreshed(), number.value.loads) == (1, 1, 1)
    assert len(number.log) == 1
    assert number.log[0].startswith("cannot read the numbers again: ")
    number.put("3")
    assert number.refreshed() == 3
    number.file.unlink()
    assert (number.refreshed(), len(number.log)) == (3, 3), "a problem that comes again is logged again"


def test_files_that_are_no_good_from_the_start_raise(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileBacked("the numbers", [str(tmp_path / "none")], (tmp_path / "none").read_text, print)


def test_nobody_waits_for_a_file_system_that_hangs(number: Number) -> None:
    reading, hangs = threading.Event(), threading.Event()

    def make() -> int:
        reading.set()
        assert hangs.wait(60)
        return 5

    number.put("4")
    number.value._make = make
    one = threading.Thread(target=number.value.refresh)
    one.start()
    assert reading.wait(60)
    assert number.refreshed() == 1
    hangs.set()
    one.join(60)
    assert number.value.newest == 5
