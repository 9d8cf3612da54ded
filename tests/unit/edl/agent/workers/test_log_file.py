"""A log file leaves room for others, is parted when it is long, and says what is missing."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from edl.agent.workers.log_file import LOOK_S, Bounds, LogFile, LogRoom
from edl.agent.workers.writer_thread import Scribe

BLOCK = 4096
MIB = 1 << 20


class Disk:
    """A fake disk for ``statvfs``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int, free: int) -> None:
        self.size, self.free, self.looks = size, free, 0
        monkeypatch.setattr(os, "statvfs", self.statvfs)

    def statvfs(self, path: str) -> object:
        self.looks += 1
        return SimpleNamespace(f_bavail=self.free // BLOCK, f_blocks=self.size // BLOCK, f_frsize=BLOCK)


class Room:
    """A disk that is shut when the test says so."""

    def __init__(self) -> None:
        self.shut = False

    def admits(self, size: int) -> bool:
        return not self.shut


def room(reserve: int) -> tuple[LogRoom, list[str], list[str]]:
    said: list[str] = []
    warned: list[str] = []
    return LogRoom("/logs", reserve, said.append, warned.append), said, warned


class TestRoom:
    def test_logs_stop_below_the_mark_and_go_on_well_above_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        disk = Disk(monkeypatch, 1000 * MIB, 500 * MIB)
        asked, said, warned = room(100 * MIB)
        assert asked.admits(1)
        disk.free = 99 * MIB
        assert not asked.admits(2 * MIB)
        disk.free = 110 * MIB
        assert not asked.admits(1)
        disk.free = 126 * MIB
        assert asked.admits(1)
        assert [text.partition(" has ")[2][:12] for text in said] == ["99.0 MiB lef", "space again "]
        assert "/logs" in warned[0] and "--log-reserve" in warned[0] and warned[1:] == [""]

    def test_the_usual_mark_is_a_share_of_the_disk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        disk = Disk(monkeypatch, 100 * MIB, 6 * MIB)
        asked, _, _ = room(-1)
        assert asked.admits(1)
        disk.free = 4 * MIB
        assert not asked.admits(2 * MIB)

    def test_but_not_more_than_a_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Disk(monkeypatch, 10_000_000 * MIB, 1025 * MIB)
        assert room(-1)[0].admits(1)

    def test_it_is_not_asked_for_each_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        disk = Disk(monkeypatch, 1000 * MIB, 500 * MIB)
        asked, _, _ = room(100 * MIB)
        for _ in range(100):
            assert asked.admits(100)
        assert disk.looks == 1

    def test_without_a_reserve_nobody_looks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        disk = Disk(monkeypatch, 1000 * MIB, 0)
        assert room(0)[0].admits(MIB) and not disk.looks

    def test_a_disk_that_says_nothing_is_written_to(self) -> None:
        assert LogRoom("/nowhere/at/all", 1 << 60, print, print).admits(MIB)


def play(scenario: Callable[[Scribe], None]) -> None:
    async def whole() -> None:
        scribe = Scribe()
        scenario(scribe)
        assert await scribe.done(10)

    asyncio.run(whole())


def wait(scribe: Scribe) -> None:
    """Until all is done that was asked for so far."""
    done = os.pipe()
    scribe.do(lambda: os.close(done[1]))
    os.read(done[0], 1)
    os.close(done[0])


class TestFile:
    def test_lines_without_room_are_counted_where_they_are_missing(self, tmp_path: Path) -> None:
        disk, took = Room(), list[int]()

        def scenario(scribe: Scribe) -> None:
            file = LogFile(tmp_path / "stdout.log", scribe, print, Bounds(disk, took=took.append))
            for lines in ([b"1"], [b"2", b"3"], [b"4"], [b"5"]):
                wait(scribe)
                disk.shut = lines in ([b"2", b"3"], [b"4"])
                file.write(b"".join(line + b"\n" for line in lines), len(lines))
            file.close()

        play(scenario)
        missing = "[edl: 3 lines are missing here, the disk had no space for them]"
        assert (tmp_path / "stdout.log").read_text().splitlines() == ["1", missing, "5"]
        assert took == [2, 2], "what is not written does not count"

    def test_a_remark_about_missing_lines_is_a_line_of_its_own(self, tmp_path: Path) -> None:
        disk = Room()

        def scenario(scribe: Scribe) -> None:
            file = LogFile(tmp_path / "stderr.log", scribe, print, Bounds(disk))
            for text in (b"\r10%", b"\r20%", b"\r30%\n"):
                wait(scribe)
                disk.shut = text == b"\r20%"
                file.write(text, 1)
            file.close()

        play(scenario)
        missing = b"[edl: 1 lines are missing here, the disk had no space for them]"
        assert (tmp_path / "stderr.log").read_bytes() == b"\r10%\n" + missing + b"\n\r30%\n"

    def test_a_long_file_is_parted_and_says_where_it_goes_on(self, tmp_path: Path) -> None:
        names: list[str] = []

        def parted(path: Path, size: int) -> Path:
            names.append(f"{path.name}.{len(names) + 1}")
            assert size == 20
            return path.with_name(names[-1])

        def scenario(scribe: Scribe) -> None:
            file = LogFile(tmp_path / "stdout.log", scribe, print, Bounds(Room(), 20, parted=parted))
            for number in range(10):
                file.write(b"line %04d\n" % number, 1)
            file.close()

        play(scenario)
        assert sorted(os.listdir(tmp_path)) == ["stdout.log", *names] and len(names) == 4
        assert (
            tmp_path / "stdout.log.4"
        ).read_text() == "[edl: older lines are in stdout.log.3]\nline 0006\nline 0007\n"
        assert (tmp_path / "stdout.log").read_text().endswith("line 0008\nline 0009\n")

    def test_a_file_that_another_program_has_moved_or_deleted_is_begun_anew(self, tmp_path: Path) -> None:
        path, now = tmp_path / "attempt" / "stdout.log", Now()

        def scenario(scribe: Scribe) -> None:
            file = LogFile(path, scribe, print, Bounds(Room(), wall_clock_s=now))
            file.write(b"1\n", 1)
            wait(scribe)
            path.rename(tmp_path / "rotated")
            file.write(b"2\n", 1)
            wait(scribe)
            now.s += LOOK_S
            file.write(b"3\n", 1)
            wait(scribe)
            path.unlink()
            path.parent.rmdir()
            now.s += LOOK_S
            file.write(b"4\n", 1)
            file.close()

        play(scenario)
        assert (tmp_path / "rotated").read_text() == "1\n2\n"
        assert path.read_text() == "4\n"

    def test_a_file_that_could_not_be_written_is_continued(self, tmp_path: Path) -> None:
        path, now, said = tmp_path / "logs" / "stdout.log", Now(), list[str]()

        def scenario(scribe: Scribe) -> None:
            (tmp_path / "logs").write_text("in the way of the folder")
            file = LogFile(path, scribe, said.append, Bounds(Room(), wall_clock_s=now))
            for number in range(3):
                file.write(b"line %d\n" % number, 1)
                wait(scribe)
                now.s += LOOK_S
            (tmp_path / "logs").unlink()
            file.write(b"line 3\n", 1)
            file.close()

        play(scenario)
        missing = "[edl: 3 lines are missing here, the file could not be written]"
        assert path.read_text().splitlines() == [missing, "line 3"]
        assert len(said) == 1 and "until it can be written" in said[0]

    def test_lines_that_are_lost_meanwhile_are_counted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, now, said = tmp_path / "stdout.log", Now(), list[str]()

        def scenario(scribe: Scribe) -> None:
            file = LogFile(path, scribe, said.append, Bounds(Room(), wall_clock_s=now))
            file.write(b"1\n", 1)
            wait(scribe)
            with monkeypatch.context() as broken:
                broken.setattr(LogFile, "_put", failing)
                file.write(b"2\n3\n", 2)
                wait(scribe)
            file.write(b"4\n", 1)
            wait(scribe)
            now.s += LOOK_S
            file.write(b"5\n", 1)
            file.close()

        play(scenario)
        assert path.read_text() == "1\n[edl: 3 lines are missing here, the file could not be written]\n5\n"
        assert len(said) == 1 and os.strerror(errno.ESTALE) in said[0]


class Now:
    """A clock that stands still."""

    s = 1000.0

    def __call__(self) -> float:
        return self.s


def failing(*_: object) -> None:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
