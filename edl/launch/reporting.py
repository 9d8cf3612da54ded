"""Reports about a job that has ended: files for programs, written at once, and a text about the failure, which is
printed last."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edl.agent.failure_report import error_file, json_report, text_report
from edl.agent.workers.log_paths import HISTORY, REPORT
from edl.wire.json_messages import to_plain
from edl.wire.messages import Failure
from edl.wire.status import JournalEntry


@dataclass(slots=True)
class Reporter:
    """Writes the reports of one launcher. ``folder``: its log folder. ``outer_error_file``: where the program that
    started the launcher looks for an error (``TORCHELASTIC_ERROR_FILE``). Either may be empty."""

    job: str
    folder: str
    outer_error_file: str
    log: Callable[[str], None]
    report_file: str = ""
    """File for a JSON report about every end of the job, success included; empty: none."""
    _text: str = field(default="", init=False)

    def keep(
        self, exit_code: int, reason: str, failures: Sequence[Failure], history: Sequence[JournalEntry] = ()
    ) -> None:
        """Write the files about the end of the job. A file that cannot be written is logged.

        ``history``: the job's history, which the Master deletes from the store at the end.
        """
        self._text = text_report(self.job, reason, failures, self.folder) if failures else ""
        if history and self.folder:
            lines = [json.dumps(to_plain(entry)) for entry in history]
            self._write(Path(self.folder) / HISTORY, "\n".join(lines) + "\n")
        if self.report_file:
            ended = json_report(self.job, exit_code, reason, failures, self.folder)
            self._write(Path(self.report_file), json.dumps(ended))
        if not failures:
            self.log(reason)
            return
        if self.folder:
            report = json_report(self.job, exit_code, reason, failures, self.folder)
            self._write(Path(self.folder) / REPORT, json.dumps(report, indent=2))
        if self.outer_error_file:
            self._write(Path(self.outer_error_file), error_file(failures[0], _read(failures[0].error_file)))

    def close(self) -> None:
        """Print the report of a failed job. Must be the last output, so that it ends with the root cause."""
        if self._text:
            self.log(f"the job has failed\n{self._text}")

    def _write(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            self.log(f"cannot write {path}: {error.strerror}")


def _read(path: str) -> str:
    """The content of a worker's error file; empty if it cannot be read, for instance on another node."""
    try:
        return Path(path).read_text(errors="replace") if path else ""
    except OSError:
        return ""
