"""A console that is slow, stopped, or not there is no concern of a launcher's."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.agent.workers.console_lines import CONSOLES, place_of
from edl.launch import console
from edl.launch.console import unblocked_console

PROGRAM = """
import sys
from edl.launch.console import close_console, open_console
open_console()
with open("file", "w+") as file:
    print("out")
    print("err", file=sys.stderr)
    file.seek(0)
    assert file.read() == sys.stdin.read() == ""
close_console()
"""

LEAVER = """
import sys
from edl.launch.console import exit_at_once, unblocked_console
with unblocked_console():
    sys.stderr.buffer.write(b"x" * 1_000_000)
    print("the last words", file=sys.stderr, flush=True)
    exit_at_once(7)
"""


class Terminal:
    """A pipe that takes the test's stdout and stderr; it fills up unless the test reads it."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)

    def read(self) -> bytes:
        """Read what is available now."""
        try:
            return os.read(self.reader, 1 << 20)
        except BlockingIOError:
            return b""

    def read_all(self, size: int) -> bytes:
        os.set_blocking(self.reader, True)
        text = b""
        while len(text) < size:
            text += os.read(self.reader, 1 << 20)
        return text


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    it = Terminal()
    yield it
    os.close(it.reader)
    os.close(it.writer)


@contextlib.contextmanager
def unblocked(out: int, err: int) -> Iterator[None]:
    """In the test itself: pytest puts its own streams there after the fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        for name, descriptor in (("stdout", out), ("stderr", err)):
            patch.setattr(sys, name, open(descriptor, "w", closefd=False))  # noqa: SIM115 - the descriptor is the test's
        before = sys.stdout, sys.stderr
        with unblocked_console():
            yield
        assert (sys.stdout, sys.stderr) == before


def test_who_writes_does_not_wait_and_nothing_is_lost(terminal: Terminal) -> None:
    text = b"".join(b"line %d\n" % number for number in range(100_000))
    with unblocked(terminal.writer, terminal.writer):
        assert sys.stdout.buffer.write(text) == len(text)  # far more than a pipe takes
        print("the last words", file=sys.stderr, flush=True)
        sys.stdout.write("and half a line")
        expected = text + b"the last words\n" + b"and half a line"
        sys.stdout.flush()
        assert terminal.read_all(len(expected)) == expected


def test_at_the_end_what_is_left_is_written(terminal: Terminal) -> None:
    with unblocked(terminal.writer, terminal.writer):
        print("half a line", end="")
        print("one more", file=sys.stderr)
    assert sorted(terminal.read().split(b"one more\n")) == [b"", b"half a line"]


def test_of_too_much_the_newest_is_kept_and_the_gap_is_told(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "WAITING_BYTES", 200_000)
    chunk = 1000 * (b"x" * 99 + b"\n")
    with unblocked(terminal.writer, terminal.writer):
        for _ in range(10):
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.write(b"the end\n")
        text = b""
        while not text.endswith(b"the end\n"):
            text += terminal.read()
    (gap,) = (line for line in text.splitlines() if line.startswith(b"[edl]"))
    lines = int(gap.split()[1])
    assert lines + text.count(b"\n") == 10_000 + 2
    assert 7000 <= lines < 10_000
    assert text.endswith(chunk + b"the end\n")


def test_a_terminal_that_somebody_does_not_want_to_wait_for_gets_all(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.set_blocking(terminal.writer, False)
    read: list[bytes] = []
    monkeypatch.setattr("edl.launch.console.select.select", lambda *_: read.append(terminal.read()))
    text = b"x" * 500_000
    with unblocked(terminal.writer, terminal.writer):
        sys.stderr.buffer.write(text)
    assert b"".join([*read, terminal.read()]) == text


def test_who_exits_at_once_is_still_heard() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVER], stderr=subprocess.PIPE)
    assert done.returncode == 7
    assert done.stderr == b"x" * 1_000_000 + b"the last words\n"


def test_a_stopped_terminal_keeps_nobody_from_exiting_at_once(terminal: Terminal) -> None:
    with subprocess.Popen([sys.executable, "-c", LEAVER], stderr=terminal.writer) as leaving:
        assert leaving.wait(60) == 7


def test_one_that_has_gone_away_is_told_of_with_a_later_write() -> None:
    with (
        open("/dev/full", "w") as full,
        unblocked(full.fileno(), full.fileno()),
        pytest.raises(OSError, match="No space left"),
    ):
        while True:
            sys.stdout.buffer.write(b"x")


def test_a_decision_that_comes_twice_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = console.console("n")
    first, second = "round 1: 1 node, 4 workers", "round 2: 1 node, 3 workers"
    # Others than worlds may come to be true again, and are said again then.
    said = [first, first, "round 1 is underway: a", first, "no contact", "contact", "no contact", second, "as wanted"]
    for text in (*said, second):
        log(text)
    lines = [line.partition("n] ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == [first, "round 1 is underway: a", "no contact", "contact", "no contact", second, "as wanted"]


def test_a_message_does_not_continue_a_workers_unfinished_line(capsys: pytest.CaptureFixture[str]) -> None:
    CONSOLES.shown(place_of(sys.stderr), "worker", b"", b"10%")
    log = console.console("n")
    log("one")
    log("two")
    assert [line[-3:] for line in capsys.readouterr().err.split("\n")] == ["", "one", "two", ""]


def test_what_has_no_descriptor_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with unblocked_console():
        assert sys.stdout is before
        print("seen")
    assert capsys.readouterr().out == "seen\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_lead_nowhere(closed: str, tmp_path: Path) -> None:
    """And what is opened next does not get what is printed."""
    command = f'exec "$0" -c "$1" {closed} </dev/null' if "<" not in closed else f'exec "$0" -c "$1" {closed}'
    done = subprocess.run(["sh", "-c", command, sys.executable, PROGRAM], cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == ""
