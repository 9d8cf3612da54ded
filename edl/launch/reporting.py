"""Reports about a job that has ended: files for programs, written at once, and a text about the failure, which is
printed last."""

from __future__ import annotations

import itertools
import json
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edl.adapters.clock import wall_clock_s
from edl.agent.failure_report import NOT_AVAILABLE, error_file, json_report, own_error_file, text_report
from edl.agent.workers.log_paths import HISTORY, REPORT, Attempt, WorkerFiles
from edl.config import LogPlan
from edl.wire.json_messages import to_plain
from edl.wire.records import Failure
from edl.wire.status import HistoryEntry


@dataclass(slots=True)
class Reporter:
    """Writes the reports of one launcher. ``outer_error_file``: where the program that started the launcher looks for
    an error (``TORCHELASTIC_ERROR_FILE``); may be empty."""

    job: str
    node: str
    logs: LogPlan
    outer_error_file: str
    log: Callable[[str], None]
    report_file: str = ""
    """File for a JSON report about every end of the job, success included; empty: none."""
    _text: str = field(default="", init=False)

    @property
    def folder(self) -> str:
        """The launcher's log folder; may be empty."""
        return self.logs.folder

    def keep(
        self, exit_code: int, reason: str, failures: Sequence[Failure], history: Sequence[HistoryEntry] = ()
    ) -> None:
        """Write the files about the end of the job. A file that cannot be written is logged.

        ``history``: the job's history, which the Master deletes from the store at the end.
        """
        self._text = text_report(self.job, reason, failures, self.folder, self._log_of) if failures else ""
        if history and self.folder:
            lines = [json.dumps(to_plain(entry)) for entry in history]
            self._write(Path(self.folder) / HISTORY, "\n".join(lines) + "\n")
        if self.report_file:
            ended = json_report(self.job, exit_code, reason, failures, self.folder)
            self._write(Path(self.report_file), json.dumps(ended))
        if not failures:
            self.log(reason)
            if exit_code and self.outer_error_file:
                self._write(Path(self.outer_error_file), own_error_file(reason, exit_code, wall_clock_s()))
            return
        if self.folder:
            report = json_report(self.job, exit_code, reason, failures, self.folder)
            self._write(Path(self.folder) / REPORT, json.dumps(report, indent=2))
        if self.outer_error_file:
            self._write(Path(self.outer_error_file), error_file(failures[0], _read(failures[0].error_file)))

    def close(self) -> None:
        """Print the report of a failed job, or else where the workers' output is. Must be the last output, so that a
        report ends with the root cause."""
        if self._text:
            self.log(f"the job has failed\n{self._text}")
        elif self.logs.keeps_output:
            self.log(f"the workers' output is in {self.logs.links or self.folder}")

    def _log_of(self, failure: Failure) -> str:
        """The file with a failed worker's stderr, or else its stdout; otherwise why there is none."""
        if failure.node != self.node:
            return f"see the report of node {failure.node}"
        attempt = Attempt(failure.round, failure.local_rank)
        newest = ""
        for again in itertools.count(1):  # a process that took the same place in the same round has another folder
            files = WorkerFiles(self.folder, attempt, again, self.logs.layout)
            if not files.folder or not Path(files.folder).is_dir():
                break
            newest = next((path for path in (files.stderr, files.stdout) if Path(path).exists()), newest)
        return newest or f"{NOT_AVAILABLE} (--redirects=3 or --tee=3 keeps the workers' output in files)"

    def _write(self, path: Path, text: str) -> None:
        _write(path, text, self.log)


def report_error(path: str, error: Exception, exit_code: int, log: Callable[[str], None]) -> None:
    """Write the error that ends a launcher where the program that started it looks for one. ``path``: that file
    (``TORCHELASTIC_ERROR_FILE``); empty: nobody looks."""
    if path:
        trace = "".join(traceback.format_exception(error))
        text = own_error_file(f"{type(error).__name__}: {error}", exit_code, wall_clock_s(), trace)
        _write(Path(path), text, log)


def _write(path: Path, text: str, log: Callable[[str], None]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        log(f"cannot write {path}: {error.strerror}")


def _read(path: str) -> str:
    """The content of a worker's error file; empty if it cannot be read, for instance on another node."""
    try:
        return Path(path).read_text(errors="replace") if path else ""
    except OSError:
        return ""
