"""Output of workers reaches its destinations, and failing destinations never block a worker."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from edl.agent.workers import log_file
from edl.agent.workers.console_lines import ConsoleLines
from edl.agent.workers.logs import CHUNK_BYTES, DRAIN_CHUNKS, TAIL_BYTES, TAIL_LINES, OutputStream, StreamPlan
from edl.agent.workers.writer_thread import Scribe

LOOKS = 1000
"""Turns of the event loop that a test gives a stream; one is usually enough."""
NEVER_S = 1e6


class Worker:
    """The far end of a stream, and everything that came out at this end."""

    def __init__(
        self, file: Path | None = None, prefix: bytes = b"", console: BinaryIO | None = None, hold_s: float = NEVER_S
    ) -> None:
        self.console = io.BytesIO()
        self.warnings: list[str] = []
        shown = self.console if console is None else console
        self.scribe = Scribe()
        plan = StreamPlan(shown, prefix, file)
        self.stream = OutputStream(plan, self.scribe, self.warnings.append, ConsoleLines(), hold_s)
        self.write_fd = os.dup(self.stream.write_fd)
        self.stream.close_write_end()

    def write(self, data: bytes) -> None:
        """At most as much as a pipe takes, 64 KiB."""
        assert os.write(self.write_fd, data) == len(data)

    def end(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    async def shows(self, text: bytes) -> None:
        await until(lambda: self.console.getvalue() == text)


@contextlib.asynccontextmanager
async def worker(
    file: Path | None = None, prefix: bytes = b"", console: BinaryIO | None = None, hold_s: float = NEVER_S
) -> AsyncIterator[Worker]:
    made = Worker(file, prefix, console, hold_s)
    try:
        yield made
    finally:
        made.end()
        made.stream.close()
        await written(made.scribe)


async def written(scribe: Scribe) -> None:
    """All of it, and all warnings of it have been said."""
    assert await scribe.done(10)
    await asyncio.sleep(0)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(LOOKS):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come")


def play(scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    """Also what goes wrong where only the event loop sees it counts."""
    problems: list[str] = []

    async def whole() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(str(context)))
        await scenario()

    asyncio.run(whole())
    assert problems == []


class TestConsole:
    def test_lines_come_out_as_they_are_written(self) -> None:
        async def scenario() -> None:
            async with worker() as it:
                it.write(b"one\ntwo\n")
                await it.shows(b"one\ntwo\n")
                it.write(b"three\n")
                await it.shows(b"one\ntwo\nthree\n")

        play(scenario)

    def test_each_line_has_the_prefix(self) -> None:
        async def scenario() -> None:
            async with worker(prefix=b"[default4]:") as it:
                it.write(b"one\n\ntwo\n")
                await it.shows(b"[default4]:one\n[default4]:\n[default4]:two\n")

        play(scenario)

    def test_half_a_line_waits_for_its_end(self) -> None:
        async def scenario() -> None:
            async with worker(prefix=b">") as it:
                it.write(b"one\nlo")
                await it.shows(b">one\n")
                it.write(b"ss 0.5\n")
                await it.shows(b">one\n>loss 0.5\n")

        play(scenario)

    def test_half_a_line_that_stays_unfinished_is_shown_and_kept(self, tmp_path: Path) -> None:
        """A prompt, or a progress bar."""

        async def scenario() -> None:
            file = tmp_path / "stderr.log"
            async with worker(file, prefix=b">", hold_s=0) as it:
                it.write(b"\r10%")
                await it.shows(b"\r>10%")
                await written(it.scribe)
                assert file.read_bytes() == b"\r10%"
                it.write(b"\r20%")
                await it.shows(b"\r>10%\r>20%")
                it.write(b" done\nnext\n")
                await it.shows(b"\r>10%\r>20% done\n>next\n")
                assert it.stream.tail() == "\r10%\r20% done\nnext"
            assert file.read_bytes() == b"\r10%\r20% done\nnext\n"

        play(scenario)

    def test_two_streams_on_one_console_do_not_end_each_others_lines(self) -> None:
        async def scenario() -> None:
            console, lines = io.BytesIO(), ConsoleLines()
            one, two = (
                OutputStream(StreamPlan(console, prefix, None), Scribe(), print, lines, 0) for prefix in (b"1:", b"2:")
            )
            os.write(one.write_fd, b"10%")
            await until(lambda: console.getvalue() == b"1:10%")
            os.write(two.write_fd, b"hello\n")
            await until(lambda: console.getvalue() == b"1:10%\n2:hello\n")
            os.write(one.write_fd, b"\nnext\n")
            one.close()
            two.close()
            assert console.getvalue() == b"1:10%\n2:hello\n1:next\n"

        play(scenario)

    def test_half_a_line_is_shown_at_the_end(self) -> None:
        async def scenario() -> None:
            async with worker() as it:
                it.write(b"one\nlast words")
                it.stream.close()
                assert it.console.getvalue() == b"one\nlast words"

        play(scenario)

    def test_what_still_sits_in_the_pipe_is_taken_at_the_end(self) -> None:
        async def scenario() -> None:
            async with worker() as it:
                it.write(b"x" * 1023 + b"\n")
                it.end()
                it.stream.close()
                assert it.console.getvalue() == b"x" * 1023 + b"\n"

        play(scenario)

    def test_a_line_without_end_is_passed_on_in_pieces(self) -> None:
        async def scenario() -> None:
            async with worker() as it:
                for _ in range(3):
                    it.write(b"\r 10%" * 8000)
                    it.stream.tail()
                assert len(it.console.getvalue()) > CHUNK_BYTES
                it.stream.close()
                assert it.console.getvalue() == b"\r 10%" * 24000

        play(scenario)

    def test_closing_twice_is_no_error(self) -> None:
        async def scenario() -> None:
            async with worker() as it:
                it.stream.close()
                it.stream.close()
                it.stream.close_write_end()

        play(scenario)

    def test_no_descriptor_is_left(self) -> None:
        async def scenario() -> None:
            before = set(os.listdir("/proc/self/fd"))
            stream = OutputStream(StreamPlan(None, b"", None), Scribe(), print)
            stream.close()
            assert set(os.listdir("/proc/self/fd")) == before

        play(scenario)


class TestFile:
    def test_the_file_has_the_lines_without_prefix(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            file = tmp_path / "attempt_0" / "0" / "stdout.log"
            async with worker(file, b"[default0]:") as it:
                it.write(b"one\ntw")
                await it.shows(b"[default0]:one\n")
                await written(it.scribe)
                assert file.read_bytes() == b"one\n"
                it.write(b"o")
                it.stream.close()
            assert file.read_bytes() == b"one\ntwo"

        play(scenario)

    def test_the_file_may_be_all_there_is(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            file = tmp_path / "stderr.log"
            warnings: list[str] = []
            scribe = Scribe()
            stream = OutputStream(StreamPlan(None, b"", file), scribe, warnings.append)
            os.write(stream.write_fd, b"one\n")
            stream.close()
            await written(scribe)
            assert file.read_bytes() == b"one\n"
            assert warnings == []

        play(scenario)

    def test_an_old_file_is_added_to(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            file = tmp_path / "stdout.log"
            file.write_bytes(b"before\n")
            async with worker(file) as it:
                it.write(b"after\n")
            assert file.read_bytes() == b"before\nafter\n"

        play(scenario)

    def test_a_full_device_costs_one_warning_and_nothing_else(self) -> None:
        async def scenario() -> None:
            async with worker(Path("/dev/full")) as it:
                it.write(b"one\n")
                await it.shows(b"one\n")
                it.write(b"two\n")
                await it.shows(b"one\ntwo\n")
                assert it.stream.tail() == "one\ntwo"
            assert len(it.warnings) == 1
            assert "/dev/full (No space left on device)" in it.warnings[0]
            assert "--log-dir" in it.warnings[0]

        play(scenario)

    def test_a_disk_that_fills_up_costs_only_what_comes_after(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept: list[bytes] = []

        class Filling(io.BytesIO):
            def write(self, data: object, /) -> int:
                if len(kept) == 1:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                kept.append(bytes(data))  # type: ignore[call-overload]
                return len(kept[-1])

        monkeypatch.setattr(log_file, "open", lambda *_: Filling(), raising=False)

        async def scenario() -> None:
            async with worker(tmp_path / "stdout.log") as it:
                for number in range(4):
                    it.write(b"line %d\n" % number)
                    it.stream.tail()
                assert it.console.getvalue().count(b"line") == 4
            assert kept == [b"line 0\n"]
            assert len(it.warnings) == 1

        play(scenario)

    def test_a_quota_that_is_used_up_for_an_hour_costs_the_lines_of_that_hour(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The free space does not show it. A round may take weeks."""
        room = [12]

        class Limited(io.FileIO):
            def write(self, data: Any, /) -> int:
                written = min(len(data), room[0])
                if not written:
                    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
                room[0] -= written
                return super().write(bytes(data)[:written])

        monkeypatch.setattr(log_file, "open", lambda path, *_: Limited(path, "ab"), raising=False)

        async def scenario() -> None:
            async with worker(tmp_path / "stdout.log") as it:
                for number in range(4):
                    it.write(b"line %d\n" % number)
                    it.stream.tail()
                await written(it.scribe)
                room[0] = 1 << 20
                it.write(b"line 4\n")
                it.stream.tail()
            assert len(it.warnings) == 1
            assert "until there is space" in it.warnings[0]

        play(scenario)
        missing = "[edl: 3 lines are missing here, the disk had no space for them]"
        assert (tmp_path / "stdout.log").read_text().splitlines() == ["line 0", "line ", missing, "line 4"]

    def test_a_file_that_cannot_be_made_costs_one_warning(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            (tmp_path / "taken").write_bytes(b"")
            async with worker(tmp_path / "taken" / "stdout.log") as it:
                it.write(b"one\n")
                await it.shows(b"one\n")
            assert len(it.warnings) == 1
            assert str(tmp_path / "taken") in it.warnings[0]

        play(scenario)


class TestAHangingDisk:
    """A named pipe that nobody reads: to open it for writing takes until somebody does."""

    def test_keeps_nobody_waiting_and_gets_its_lines_when_it_answers(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            file = tmp_path / "stdout.log"
            os.mkfifo(file)
            async with worker(file) as it:
                it.write(b"one\n")
                await it.shows(b"one\n")
                assert it.stream.tail() == "one"
                assert not await it.scribe.done(0.05)
                reading = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
                it.stream.close()
                await written(it.scribe)
                assert os.read(reading, 100) == b"one\n"
                os.close(reading)
            assert it.warnings == []

        play(scenario)

    def test_costs_what_is_written_beyond_a_bound_and_the_file_says_how_much(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            file = tmp_path / "stdout.log"
            os.mkfifo(file)
            made = Worker(file)
            made.scribe = scribe = Scribe(most_bytes=100)
            made.stream.close()
            stream = OutputStream(StreamPlan(None, b"", file), scribe, made.warnings.append)
            for number in range(5):
                os.write(stream.write_fd, b"%060d\n" % number)
                stream.tail()
            reading = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
            await written(scribe)
            os.write(stream.write_fd, b"again\n")
            stream.close()
            await written(scribe)
            missing = b"[edl: 4 lines are missing here, the disk was too slow]\n"
            assert os.read(reading, 1000) == b"%060d\n" % 0 + missing + b"again\n"
            assert [text.split(":")[0] for text in made.warnings] == [f"the disk of {file} is too slow"]
            os.close(reading)
            made.end()

        play(scenario)


class TestSwitch:
    """A round begins that the worker lives to see."""

    def test_what_sits_in_the_pipe_stays_with_the_last_round(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with worker(tmp_path / "0.log", b"1:") as it:
                it.write(b"old\nbegun")
                it.stream.switch(StreamPlan(it.console, b"2:", tmp_path / "1.log"))
                await written(it.scribe)
                assert (tmp_path / "0.log").read_bytes() == b"old\n"
                it.write(b" and ended\n")
                assert it.stream.tail() == "old\nbegun and ended"
            assert (tmp_path / "0.log").read_bytes() == b"old\n"
            assert (tmp_path / "1.log").read_bytes() == b"begun and ended\n"
            assert it.console.getvalue() == b"1:old\n2:begun and ended\n"

        play(scenario)

    def test_after_the_end_is_no_error_and_opens_nothing(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with worker(tmp_path / "0.log") as it:
                it.stream.close()
                it.stream.switch(StreamPlan(None, b"", tmp_path / "1.log"))
            assert not (tmp_path / "1.log").exists()

        play(scenario)

    def test_filtered_lines_are_found_whatever_the_console_does(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            scribe = Scribe()
            plan = StreamPlan(None, b">", tmp_path / "all", tmp_path / "some", (b"loss", b"acc"))
            stream = OutputStream(plan, scribe, print)
            os.write(stream.write_fd, b"loss 1\nother\nacc 2\n")
            stream.close()
            await written(scribe)
            assert (tmp_path / "all").read_bytes() == b"loss 1\nother\nacc 2\n"
            assert (tmp_path / "some").read_bytes() == b">loss 1\n>acc 2\n"

        play(scenario)


class TestTail:
    def test_the_last_lines_are_kept(self) -> None:
        async def scenario() -> None:
            async with worker() as it:
                it.write(b"".join(b"line %d\n" % number for number in range(1000)))
                lines = it.stream.tail().splitlines()
                assert len(lines) == TAIL_LINES
                assert (lines[0], lines[-1]) == (f"line {1000 - TAIL_LINES}", "line 999")

        play(scenario)

    def test_includes_what_has_not_been_read_yet_and_has_no_end(self) -> None:
        async def scenario() -> None:
            async with worker() as it:
                it.write(b"one\nSegmentation fau")
                assert it.stream.tail() == "one\nSegmentation fau"

        play(scenario)

    def test_still_has_the_unfinished_line_after_the_worker_has_gone(self) -> None:
        async def scenario() -> None:
            async with worker() as it:
                it.write(b"one\nlast words")
                it.end()
                await it.shows(b"one\nlast words")
                assert it.stream.tail() == "one\nlast words"

        play(scenario)

    def test_is_small_whatever_the_lines_are(self) -> None:
        async def scenario() -> None:
            async with worker() as it:
                for _ in range(20):
                    it.write(b"x" * 20_000 + b"\n")
                    it.stream.tail()
                it.write(b"the end\n")
                tail = it.stream.tail()
                assert len(tail) == TAIL_BYTES
                assert tail.endswith("x\nthe end")

        play(scenario)

    def test_of_a_silent_worker_is_empty(self) -> None:
        async def scenario() -> None:
            async with worker() as it:
                assert it.stream.tail() == ""

        play(scenario)

    def test_bytes_that_are_no_text_do_no_harm(self) -> None:
        async def scenario() -> None:
            async with worker() as it:
                it.write(b"caf\xe9\n")
                assert it.stream.tail() == "caf\N{REPLACEMENT CHARACTER}"
                await it.shows(b"caf\xe9\n")

        play(scenario)


class TestClosedConsole:
    @pytest.mark.parametrize(
        "error",
        [
            BrokenPipeError(errno.EPIPE, "Broken pipe"),
            ValueError("write to closed file"),
            BlockingIOError(errno.EAGAIN, "write could not complete without blocking"),
        ],
    )
    def test_costs_one_warning_and_the_file_goes_on(self, error: Exception, tmp_path: Path) -> None:
        class Gone(io.BytesIO):
            def write(self, data: object, /) -> int:
                raise error

        async def scenario() -> None:
            async with worker(tmp_path / "stdout.log", b">", Gone()) as it:
                for number in range(3):
                    it.write(b"line %d\n" % number)
                    it.stream.tail()
            assert len(it.warnings) == 1
            assert "console" in it.warnings[0]
            assert (tmp_path / "stdout.log").read_bytes() == b"line 0\nline 1\nline 2\n"

        play(scenario)


class TestOthersOnThePipe:
    def test_a_grandchild_that_holds_the_pipe_does_not_hold_the_launcher(self) -> None:
        async def scenario() -> None:
            async with worker() as it:
                grandchild = os.dup(it.write_fd)
                it.write(b"bye\n")
                it.end()
                it.stream.close()
                assert it.console.getvalue() == b"bye\n"
                with pytest.raises(BrokenPipeError):
                    os.write(grandchild, b"is anybody there?\n")
                os.close(grandchild)

        play(scenario)

    def test_a_worker_that_never_stops_writing_does_not_stop_the_launcher(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reads = 0
        real = os.read

        async def scenario() -> None:
            nonlocal reads
            async with worker() as it:
                pipe = it.stream._read_fd

                def endless(descriptor: int, count: int) -> bytes:
                    nonlocal reads
                    if descriptor != pipe:
                        return real(descriptor, count)
                    reads += 1
                    assert reads < 10 * DRAIN_CHUNKS
                    return b"y\n" * (count // 2)

                monkeypatch.setattr(os, "read", endless)
                it.write(b"go\n")
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert 0 < reads <= 2  # the event loop gets its turn after each piece
                it.stream.close()
                assert reads <= 2 + DRAIN_CHUNKS

        play(scenario)
