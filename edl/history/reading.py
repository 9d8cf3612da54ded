"""Finds the history files in directories, and reads them. The directories of several nodes are read as one."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from edl.errors import SettingError
from edl.history.merge import Merger
from edl.history.parts import FOLDER, HistoryPart, part_of
from edl.wire.history_lines import HistoryLine, parse_line

ADVICE = "Name the --history-dir of the job; by default it is .edl-history in the job's --checkpoint-dir"
NONE_WRITTEN = f"{ADVICE}. A job without either has only events.jsonl in its log folder"
SHOWN = 8
"""Number of jobs that an error lists."""


class FileLines(Protocol):
    """Reads files of lines; implemented by the module ``edl.adapters.line_files``. The methods raise ``OSError``."""

    @property
    def lines_backwards(self) -> Callable[[Path], Iterator[bytes]]:
        """The lines of a file, the last one first."""
        ...

    @property
    def first_line(self) -> Callable[[Path], bytes]:
        """The first line of a file."""
        ...


@dataclass(slots=True)
class RunFiles:
    """The files of one run of a job."""

    job: str
    run: str
    written_s: float = 0.0
    """When the last of them was written, in seconds since 1970."""
    parts: dict[HistoryPart, list[Path]] = field(default_factory=dict)
    """The files by part; several if directories were copied."""


@dataclass(frozen=True, slots=True)
class RunView:
    """The lines of a run, or the last ones."""

    lines: list[HistoryLine]
    first: HistoryLine | None
    """The run's first line that is left; it may not be among ``lines``."""
    complete: bool
    """Whether ``lines`` are all."""
    unreadable: int
    """Number of lines that are torn, or of a format that is too new."""


def find_runs(folders: Sequence[Path]) -> list[RunFiles]:
    """All runs in these history directories, in the order in which they were last written. A checkpoint directory, and
    the folder of one job, are accepted too. Raises ``SettingError`` if one cannot be read, or if all are empty."""
    found: dict[tuple[str, str], RunFiles] = {}
    for folder in folders:
        try:
            for job, path in _files(folder):
                _add(found, job, path)
        except OSError as error:
            raise SettingError("DIR", folder, f"cannot be read: {error.strerror or error}", ADVICE) from None
    if not found:
        raise SettingError("DIR", ", ".join(map(str, folders)), "holds no history of a job", NONE_WRITTEN)
    return sorted(found.values(), key=lambda run: run.written_s)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """History files with the names of their jobs."""
    default = folder / FOLDER
    root = default if default.is_dir() else folder
    for entry in sorted(root.iterdir()):
        if part_of(entry.name) is not None:
            yield root.resolve().name, entry
        elif entry.is_dir() and not entry.is_symlink():
            with contextlib.suppress(PermissionError):  # such as lost+found, or the folder of another user's job
                yield from ((entry.name, inner) for inner in sorted(entry.iterdir()) if part_of(inner.name) is not None)


def _add(found: dict[tuple[str, str], RunFiles], job: str, path: Path) -> None:
    part = part_of(path.name)
    assert part is not None  # noqa: S101 - _files yields only these
    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
        written_s = path.stat().st_mtime
        run = found.setdefault((job, part.run), RunFiles(job, part.run))
        run.written_s = max(run.written_s, written_s)
        run.parts.setdefault(part, []).append(path)


def runs_of(runs: Sequence[RunFiles], job: str) -> list[RunFiles]:
    """The runs of this job; of all if ``job`` is empty. Raises ``SettingError`` that lists the jobs if it has none."""
    found = [one for one in runs if job in ("", one.job)]
    if not found:
        raise SettingError("--job", job, f"this directory holds the history of: {_jobs_in(runs)}", "Name one of these")
    return found


def select(runs: Sequence[RunFiles], job: str, run: str = "") -> RunFiles:
    """The newest run of this job, or the one whose id begins with ``run``. An empty ``job`` means the only one. Raises
    ``SettingError`` that lists what there is."""
    mine = runs_of(runs, job)
    if len({one.job for one in mine}) > 1:
        what = f"this directory holds the history of: {_jobs_in(runs)}"
        raise SettingError("--job", "''", what, "Name one with --job")
    named = [one for one in mine if one.run.startswith(run)]
    if not named:
        known = ", ".join(one.run for one in mine[-SHOWN:])
        raise SettingError("--run", run, f"job {mine[0].job} has the runs {known}", "Name one of these")
    return named[-1]


def _jobs_in(runs: Sequence[RunFiles]) -> str:
    jobs = sorted({one.job for one in runs})
    return ", ".join(jobs[:SHOWN]) + (f" and {len(jobs) - SHOWN} more" if len(jobs) > SHOWN else "")


def read(files: RunFiles, reader: FileLines, enough: int = 0) -> RunView:
    """Read the lines of a run; with ``enough`` at least that many of the last ones, and not much more. Raises
    ``OSError``."""
    reading = _TailReading(reader.lines_backwards, enough)
    terms = sorted({part.term for part in files.parts}, reverse=True)
    complete = True
    for term in terms:
        of_term = {part: paths for part, paths in files.parts.items() if part.term == term}
        if not reading.read_term(of_term):
            complete = False
            break
    lines = reading.merger.lines()
    first = lines[0] if complete and lines else _first_of(files, reader.first_line)
    if not complete:
        # Below this, some lines have not been read: those of an earlier term, or events that were copied from it.
        # What a later Master has copied is out of place without them, except for events, which have numbers.
        lines = [line for line in lines if line.after > reading.low and not (line.copied and line.kind != "event")]
    return RunView(lines, first, complete, reading.unreadable)


def _first_of(files: RunFiles, first_line: Callable[[Path], bytes]) -> HistoryLine | None:
    """The first line of the oldest file that begins with one."""
    for part in sorted(files.parts):
        for path in files.parts[part]:
            line = parse_line(first_line(path))
            if line is not None:
                return line
    return None


class _TailReading:
    """Reads terms from the newest to the oldest, each from its end."""

    def __init__(self, backwards: Callable[[Path], Iterator[bytes]], enough: int) -> None:
        self._backwards = backwards
        self._enough = enough
        self.merger = Merger()
        self.low = 0
        """All lines after this event have been read."""
        self.unreadable = 0
        self._below: list[int] = []
        """Positions of the lines that were read and are not after ``low``: a heap, the highest first."""
        self._count = 0
        """Number of lines after ``low``."""

    def read_term(self, parts: Mapping[HistoryPart, list[Path]]) -> bool:
        """Read a term's files; False if enough lines have been read."""
        for part in sorted(parts, reverse=True):
            for number, path in enumerate(parts[part]):
                # Copies of one file hold the same lines, so only the last one shows how far back everything is known.
                if not self._read_file(path, known=number == len(parts[part]) - 1):
                    return False
        return True

    def _read_file(self, path: Path, *, known: bool) -> bool:
        for text in self._backwards(path):
            line = parse_line(text)
            if line is None:
                self.unreadable += 1
                continue
            if self.merger.add(line) and self._enough:
                heapq.heappush(self._below, -line.after)
            if self._enough and known and not line.copied:
                while self._below and -self._below[0] > line.after:
                    heapq.heappop(self._below)
                    self._count += 1
                if self._count >= self._enough:
                    self.low = line.after
                    return False
        return True
