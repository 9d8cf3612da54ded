"""What a launcher leaves behind of a job that has ended: files for tools at once, and at the very end how it failed."""

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
    """Knows where reports go. ``folder``: this launcher's for logs, ``outer_error_file``: the file that whoever started
    the launcher looks at; either may be empty."""

    job: str
    folder: str
    outer_error_file: str
    log: Callable[[str], None]
    report_file: str = ""
    """Gets the report of any end; empty: nobody asks for it."""
    _text: str = field(default="", init=False)

    def keep(
        self, exit_code: int, reason: str, failures: Sequence[Failure], history: Sequence[JournalEntry] = ()
    ) -> None:
        """The job has ended like this: write the files. One that cannot be written costs a line.

        ``history``: what the Master leaves of it, which goes from the store with the job.
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
        """Show the report. Nothing may be said after this, so that the root cause is where people look first."""
        if self._text:
            self.log(f"the job has failed\n{self._text}")

    def _write(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            self.log(f"cannot write {path}: {error.strerror}")


def _read(path: str) -> str:
    """Of a worker on this node; one of another node has its file where that node has it."""
    try:
        return Path(path).read_text(errors="replace") if path else ""
    except OSError:
        return ""
