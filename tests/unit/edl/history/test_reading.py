"""Merging and reading the files of several Masters, whole and from the end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.adapters import line_files
from edl.adapters.line_files import LineFolder
from edl.errors import SettingError
from edl.history.merge import merged
from edl.history.parts import FOLDER, HistoryPart
from edl.history.reading import find_runs, read, select
from edl.wire.history_lines import HistoryLine, line_text, parse_line
from tests.support.history_fixture import RUN, line, other


def a_job(draw: random.Random) -> tuple[list[HistoryLine], list[list[HistoryLine]]]:
    """What a job's Masters report, in order, and what each of them writes: also copies of what was before."""
    true: list[HistoryLine] = []
    files: list[list[HistoryLine]] = []
    number = rounds = term = 0
    for _ in range(draw.randrange(1, 5)):
        term += draw.randrange(1, 5)
        at_s = draw.random() * 1e9  # each host has a clock of its own
        own = [other(term, 1, number, "begin", {"node": f"n{term}", "edl": "1"})]
        copies = [one for one in true if one.kind in ("event", "round") and draw.random() < 0.7]
        written = [*own]
        for one in copies:
            again = line(term, len(written) + 1, one.after, copied=True, at_s=at_s)
            if one.kind == "round":
                again = other(term, len(written) + 1, one.after, "round", dict(one.body), copied=True)
            written.append(again)
        for _ in range(draw.randrange(0, 15)):
            at_s += draw.choice((1.0, -500.0, 1e6))
            number += 1
            new = [line(term, len(written) + 1, number, at_s=at_s)]
            if draw.random() < 0.3:
                rounds += 1
                new.append(other(term, len(written) + 2, number, "round", {"round": rounds}))
            own += new
            written += new
        true += own
        files.append(written)
    return true, files


class TestMerging:
    def test_seeded_jobs_are_told_in_order_with_everything_once(self) -> None:
        for seed in range(3000):
            draw = random.Random(seed)
            true, files = a_job(draw)
            several = [one for written in files for one in written]
            several += draw.choices(several, k=draw.randrange(0, 20))
            draw.shuffle(several)
            found = merged(several)
            assert [(one.kind, one.after, one.body.get("round")) for one in found] == [
                (one.kind, one.after, one.body.get("round")) for one in true
            ], seed
            assert not any(one.copied for one in found)

    def test_a_round_is_told_by_the_master_that_saw_it(self) -> None:
        copy = other(9, 2, 4, "round", {"round": 2}, copied=True)
        seen = other(3, 7, 4, "round", {"round": 2, "formed_s": 1.5})
        assert merged([copy, seen]) == merged([seen, copy]) == [seen]

    def test_unknown_kinds_and_fields_are_no_error(self) -> None:
        text = line_text(other(3, 7, 4, "round", {"round": 2})).replace(b'"body"', b'"colour":"red","body"')
        assert parse_line(text) == other(3, 7, 4, "round", {"round": 2})
        assert other(3, 7, 4, "of the future", {"x": [1]}).fact() is None
        assert parse_line(text.replace(b'"v":1', b'"v":2')) is None
        for torn in (b"", b"{", text[:40], b"\xff\xfe", b"[1]"):
            assert parse_line(torn) is None


class TestReading:
    def write(self, folder: Path, files: list[list[HistoryLine]], draw: random.Random) -> None:
        """Each Master's lines in some parts, in some of the nodes' directories; some with a torn last line."""
        for lines in files:
            place = folder / f"node{draw.randrange(3)}" / "job"
            place.mkdir(parents=True, exist_ok=True)
            number = 0
            while lines:
                number, count = number + 1, draw.randrange(1, 9)
                text = b"".join(map(line_text, lines[:count]))
                torn = line_text(lines[0])[: draw.randrange(0, 50)] if draw.random() < 0.3 else b""
                (place / HistoryPart(RUN, lines[0].term, number).name).write_bytes(text + torn)
                lines = lines[count:]

    def test_seeded_directories_whole_and_from_the_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(line_files, "BLOCK_BYTES", 300)
        for seed in range(300):
            draw = random.Random(seed)
            true, files = a_job(draw)
            folder = tmp_path / str(seed)
            self.write(folder, files, draw)
            (found,) = find_runs(sorted(folder.iterdir()))
            view = read(found, line_files)
            assert view.lines == true, seed
            assert (view.first, view.complete) == (true[0], True)
            for enough in (1, 3, 10, 1000):
                tail = read(found, line_files, enough)
                assert tail.lines == true[len(true) - len(tail.lines) :], (seed, enough)
                assert len(tail.lines) >= min(enough, len(true)), (seed, enough)
                assert tail.first == true[0]

    def test_the_end_of_a_long_history_is_read_without_the_rest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = LineFolder(tmp_path / "job")
        folder.create(parents=False)
        for part in range(1, 11):
            lines = (line(3, number, number) for number in range(part * 10_000 - 9_999, part * 10_000 + 1))
            folder.append(HistoryPart(RUN, 3, part).name, b"".join(map(line_text, lines)))
        parsed = 0

        def counted(text: bytes) -> HistoryLine | None:
            nonlocal parsed
            parsed += 1
            return parse_line(text)

        monkeypatch.setattr("edl.history.reading.parse_line", counted)
        view = read(find_runs([tmp_path])[0], line_files, 200)
        assert [one.after for one in view.lines] == list(range(99_801, 100_001))
        assert view.first == line(3, 1, 1)
        assert parsed < 500

    def test_lines_backwards_of_any_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        draw = random.Random(5)
        for size in (1, 2, 7, 64):
            monkeypatch.setattr(line_files, "BLOCK_BYTES", size)
            for _ in range(200):
                data = bytes(draw.choices(b"ab\n", k=draw.randrange(0, 60)))
                (tmp_path / "file").write_bytes(data)
                expected = [one for one in reversed(data.split(b"\n")) if one]
                assert list(line_files.lines_backwards(tmp_path / "file")) == expected, data


class TestFinding:
    def place(self, folder: Path, job: str, run: str = RUN) -> None:
        (folder / job).mkdir(parents=True, exist_ok=True)
        (folder / job / HistoryPart(run, 3, 1).name).write_bytes(line_text(line(3, 1, 1)))

    def test_history_checkpoint_and_job_directories(self, tmp_path: Path) -> None:
        self.place(tmp_path / FOLDER, "one")
        for folder in (tmp_path, tmp_path / FOLDER, tmp_path / FOLDER / "one"):
            assert [(run.job, run.run) for run in find_runs([folder])] == [("one", RUN)]

    def test_an_empty_or_missing_directory_is_an_error_that_helps(self, tmp_path: Path) -> None:
        (tmp_path / "job").mkdir()
        (tmp_path / "job" / "events.jsonl").write_text("{}\n")
        with pytest.raises(SettingError, match=r"holds no history of a job.*--history-dir.*events\.jsonl"):
            find_runs([tmp_path])
        with pytest.raises(SettingError, match="cannot be read: No such file"):
            find_runs([tmp_path / "missing"])

    def test_a_folder_that_is_not_ours_to_read_is_passed_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At the root of a file system there is one named lost+found."""
        self.place(tmp_path, "one")
        (tmp_path / "lost+found").mkdir()
        real = Path.iterdir

        def refusing(path: Path) -> Iterator[Path]:
            if path.name == "lost+found":
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        monkeypatch.setattr(Path, "iterdir", refusing)
        assert [run.job for run in find_runs([tmp_path])] == ["one"]

    def test_the_job_is_chosen_or_all_are_listed(self, tmp_path: Path) -> None:
        self.place(tmp_path, "one")
        assert select(find_runs([tmp_path]), "").job == "one"
        self.place(tmp_path, "two")
        self.place(tmp_path, "two", "f" * 12)
        runs = find_runs([tmp_path])
        assert select(runs, "two").run == "f" * 12
        assert select(runs, "two", "0123").run == RUN
        for job, run, what in (("", "", "one, two"), ("three", "", "one, two"), ("two", "77", RUN)):
            with pytest.raises(SettingError, match=what):
                select(runs, job, run)
