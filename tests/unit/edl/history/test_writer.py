"""Writing history files: limits, disks that refuse, and Masters that follow one another."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from edl.adapters.system_threads import SYSTEM_THREADS
from edl.history import writer as writer_module
from edl.history.merge import merged
from edl.history.parts import part_of
from edl.history.writer import HistoryFiles, WriterThread
from edl.wire.history_lines import HistoryLine, parse_line
from tests.support.history_fixture import RUN, MemoryDisk, line


def numbers(*disks: MemoryDisk) -> list[int]:
    """Events on these disks, in order, each once."""
    texts = (text for disk in disks for data in disk.content.values() for text in data.split(b"\n"))
    return [one.after for one in merged(filter(None, map(parse_line, texts)))]


class TestFiles:
    def test_each_master_has_files_of_its_own(self) -> None:
        disk, said = MemoryDisk(), list[str]()
        HistoryFiles(disk, RUN, 0, said.append).append([line(4, 1, 1), line(4, 2, 2)])
        HistoryFiles(disk, RUN, 0, said.append).append([line(9, 1, 3)])
        assert sorted(disk.content) == [f"{RUN}.4.1.jsonl", f"{RUN}.9.1.jsonl"]
        assert (numbers(disk), said) == ([1, 2, 3], [])

    def test_the_next_master_adds_only_what_is_missing(self) -> None:
        disk = MemoryDisk()
        HistoryFiles(disk, RUN, 0, print).append([line(4, 1, 1), line(4, 2, 3)])
        copies = [line(9, number, number, copied=True) for number in (1, 2, 3)]
        HistoryFiles(disk, RUN, 0, print).append([*copies, line(9, 4, 4)])
        added = [parse_line(text) for text in disk.content[f"{RUN}.9.1.jsonl"].splitlines()]
        assert [one.after for one in added if one is not None] == [2, 4]

    def test_never_more_than_the_limit_and_the_newest_stay(self) -> None:
        draw = random.Random(3)
        most = 1 << 20
        disk = MemoryDisk()
        disk.content["notes of somebody"] = b"x" * most
        disk.times["notes of somebody"] = 0.0
        files, number = HistoryFiles(disk, RUN, most, print), 0
        for _ in range(3000):
            count = draw.randrange(1, 12)
            files.append([line(4, number + one, number + one) for one in range(1, count + 1)])
            number += count
            assert disk.used - most <= most
        left = numbers(disk)
        assert left == list(range(left[0], number + 1))
        assert left[0] > 1
        assert "notes of somebody" in disk.content
        assert disk.used - most > most // 2
        assert all(len(data) <= most // 8 for name, data in disk.content.items() if part_of(name))


class TestDisksThatRefuse:
    @pytest.mark.parametrize("tears", [False, True])
    def test_a_full_disk_is_reported_once_and_what_waits_is_written_later(self, tears: bool) -> None:
        disk, said = MemoryDisk(quota=1000), list[str]()
        disk.tears = tears
        files = HistoryFiles(disk, RUN, 0, said.append)
        for number in range(1, 50):
            files.append([line(4, number, number)])
        assert said == [
            "cannot write the history to /disk (No space left on device): the job continues, and lines of the history "
            "may be lost"
        ]
        assert files.troubled
        disk.quota = 1 << 40
        files.append([line(4, 50, 50)])
        assert said[1:] == ["the history is written to /disk again; no line is lost"]
        assert numbers(disk) == list(range(1, 51))

    def test_what_waits_goes_into_the_file_of_its_own_term(self) -> None:
        """Readers go back from term to term, and would take older lines in a newer file for the end of all others."""
        disk = MemoryDisk(quota=0)
        files = HistoryFiles(disk, RUN, 0, lambda text: None)
        files.append([line(4, 1, 1), line(4, 2, 2)])
        files.append([line(9, 1, 5)])
        disk.quota = 1 << 40
        files.append([line(9, 2, 6), line(9, 3, 7)])
        found = {name: data.splitlines() for name, data in disk.content.items()}
        terms = {name: {one.term for one in map(parse_line, lines) if one is not None} for name, lines in found.items()}
        assert terms == {f"{RUN}.4.1.jsonl": {4}, f"{RUN}.9.1.jsonl": {9}}
        assert numbers(disk) == [1, 2, 5, 6, 7]

    def test_what_is_too_much_is_lost_and_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(writer_module, "MOST_KEPT_BYTES", 1000)
        disk, said = MemoryDisk(), list[str]()
        files = HistoryFiles(disk, RUN, 0, said.append)
        files.append([line(4, 1, 1)])
        disk.gone = True
        for number in range(2, 100):
            files.append([line(4, number, number)])
        disk.gone = False
        files.retry()
        left = numbers(disk)
        assert left == list(range(1, len(left) + 1))
        assert said[1:] == [f"the history is written to /disk again; {99 - len(left)} lines are lost"]

    def test_seeded_disks_lose_nothing_else(self) -> None:
        """Masters on two disks, which fill up, tear lines and vanish; the next one has what the store has kept."""
        for seed in range(400):
            draw = random.Random(seed)
            disks = [MemoryDisk(), MemoryDisk()]
            disks[0].tears, disks[1].tears = draw.random() < 0.5, draw.random() < 0.5
            number = term = 0
            for _ in range(draw.randrange(1, 6)):
                term += draw.randrange(1, 9)
                disk, said = disks[draw.randrange(2)], list[str]()
                files, seq = HistoryFiles(disk, RUN, 0, said.append), 0
                kept = list(range(1, number + 1))
                files.append([line(term, seq := seq + 1, one, copied=True) for one in kept])
                for _ in range(draw.randrange(0, 12)):
                    disk.gone = draw.random() < 0.2
                    disk.quota = disk.used + draw.choice((0, 100, 5000, 1 << 30))
                    count = draw.randrange(0, 4)
                    files.append([line(term, seq := seq + 1, number := number + 1) for _ in range(count)])
                disk.gone, disk.quota = False, 1 << 40
                if draw.random() < 0.8:
                    files.retry()
                    assert not files.troubled
                else:
                    number = max([*numbers(*disks), 0])  # it is killed, and the store has no more either
                assert all("again" in text for text in said[1::2])
                assert numbers(*disks) == list(range(1, number + 1)), seed


class TestThread:
    def thread(self, disk: MemoryDisk, said: list[str], work: object = None) -> WriterThread[int]:
        def lines_of(number: int) -> Sequence[HistoryLine]:
            if callable(work):
                work(number)
            return [line(4, number, number)]

        return WriterThread(SYSTEM_THREADS, HistoryFiles(disk, RUN, 0, said.append), lines_of, said.append)

    def test_writes_everything_before_the_end(self) -> None:
        disk, said = MemoryDisk(), list[str]()
        thread = self.thread(disk, said)
        for number in range(1, 2001):
            thread.put(number)
        assert thread.end(60.0)
        assert (numbers(disk), said) == (list(range(1, 2001)), [])
        thread.put(2001)
        assert len(numbers(disk)) == 2000

    def test_without_anything_to_write_there_is_no_thread(self) -> None:
        assert self.thread(MemoryDisk(), []).end(0.0)

    def test_a_disk_that_hangs_delays_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(writer_module, "MOST_WAITING", 10)
        hangs, begun, disk, said = threading.Event(), threading.Event(), MemoryDisk(), list[str]()

        def work(number: int) -> None:
            if number == 1:
                begun.set()
                assert hangs.wait(60)

        thread = self.thread(disk, said, work)
        thread.put(1)
        assert begun.wait(60)
        for number in range(2, 101):
            thread.put(number)
        assert [text.partition(":")[0] for text in said] == ["the disk of the history does not respond"]
        assert not thread.end(0.0)
        hangs.set()
        assert thread.end(60.0)
        assert numbers(disk) == list(range(1, 12))
        assert said[1:] == ["the disk of the history responds again; 89 steps of the Master are missing in it"]

    def test_an_unexpected_error_ends_the_history_and_not_the_job(self) -> None:
        said: list[str] = []

        def work(number: int) -> None:
            raise KeyError(number)

        thread = self.thread(MemoryDisk(), said, work)
        thread.put(1)
        assert thread.end(60.0)
        assert said == ["the history is not written any more: KeyError: 1"]

    def test_without_further_threads_it_is_written_later(self) -> None:
        class FullSystem:
            full = True

            def __getattr__(self, name: str) -> Any:
                return getattr(SYSTEM_THREADS, name)

            def start(self, target: Callable[..., object], *arguments: Any, name: str) -> Any:
                if self.full:
                    raise RuntimeError("can't start new thread")
                return SYSTEM_THREADS.start(target, *arguments, name=name)

        disk, said, system = MemoryDisk(), list[str](), FullSystem()
        files = HistoryFiles(disk, RUN, 0, said.append)
        thread = WriterThread[int](system, files, lambda number: [line(4, number, number)], said.append)
        thread.put(1)
        thread.put(2)
        assert said == ["no further thread can be started: the job continues, and its history is written later"]
        assert not thread.end(0.0), "there is something to write"
        system.full = False
        assert thread.end(60.0)
        assert numbers(disk) == [1, 2]
