"""``edl history``: what happened in a job, from its files. Needs no running job."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edl.adapters.clock import wall_clock_s
from edl.cli.options import duration_s
from edl.config import environment
from edl.errors import SettingError

if TYPE_CHECKING:
    from edl.history.reading import RunFiles, RunView

SHOWN = 200
"""Default of ``--last``."""
_MARGIN = 3
"""Lines of a file that are read for each row: a round has several."""
_AFTER_END = 50
"""Lines at least that are read to find the end of a job: checkpoints may be complete, and alarms cleared, after it."""


@click.command()
@click.argument("folders", nargs=-1, metavar="[DIR]…", type=click.Path(path_type=Path))
@click.option("--job", default="", metavar="JOB", help="Name of the job (--rdzv-id). Default: the only one.")
@click.option("--run", default="", metavar="ID", help="Run of the job, as listed. Default: the newest one.")
@click.option("--list", "listing", is_flag=True, help="List the jobs and their runs.")
@click.option("--last", default=SHOWN, type=click.IntRange(0), help=f"Number of rows. 0: all. Default: {SHOWN}.")
@click.option("--since", default="", metavar="TIME", help="Only what is newer: 90s, 15m, 2h, 3d, or a date and time.")
@click.option("--errors", is_flag=True, help="Show whole tracebacks.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines of the files as JSON, in order, each once.")
def history(
    folders: tuple[Path, ...],
    job: str,
    run: str,
    listing: bool,
    last: int,
    since: str,
    errors: bool,
    as_json: bool,
) -> None:
    """Show the history of a job, also after its end. DIR: its --history-dir or --checkpoint-dir; name those of all
    nodes if each node has its own. Default: EDL_HISTORY_DIR, or EDL_CHECKPOINT_DIR, or the current directory. Several
    jobs are listed."""
    from edl.history.reading import find_runs, runs_of, select

    runs = find_runs(folders or (_default(),))
    several = len({one.job for one in runs}) > 1
    if listing or (several and not job and not as_json):
        _list(runs_of(runs, job), as_json)
        return
    _show(select(runs, job, run), last, _since(since), errors=errors, as_json=as_json)


def _default() -> Path:
    variables = environment()
    own = variables.get("EDL_HISTORY_DIR", "")
    return Path((own if own != "auto" else "") or variables.get("EDL_CHECKPOINT_DIR") or Path.cwd())


def _read(files: RunFiles, enough: int) -> RunView:
    """Raises ``SettingError`` if the files cannot be read."""
    from edl.adapters import line_files
    from edl.history.reading import ADVICE, read

    try:
        found = read(files, line_files, enough)
    except OSError as error:
        raise SettingError("DIR", error.filename or "", f"cannot be read: {error.strerror}", ADVICE) from None
    if not found.lines:
        what = f"the files of job {files.job}, run {files.run}, hold no line that this edl can read"
        raise SettingError("DIR", str(next(iter(files.parts.values()))[0].parent), what, ADVICE)
    return found


def _list(runs: Sequence[RunFiles], as_json: bool) -> None:
    from edl.history.layout import job_lines
    from edl.history.timeline import summary
    from edl.wire.json_messages import encode

    found = (summary(view.lines, view.first) for view in (_read(one, _AFTER_END) for one in runs))
    if as_json:
        for one in found:
            click.echo(encode(one))
    else:
        for line in job_lines(found, _width()):
            click.echo(line)


def _show(files: RunFiles, last: int, since_s: float, *, errors: bool, as_json: bool) -> None:
    from edl.history.layout import row_lines, summary_lines
    from edl.history.timeline import rows, summary
    from edl.wire.history_lines import line_text

    whole = since_s > 0 or not last
    view = _read(files, 0 if whole else last if as_json else max(last * _MARGIN, _AFTER_END))
    lines = [line for line in view.lines if line.moment_s >= since_s] if since_s else view.lines
    if as_json:
        output = sys.stdout.buffer
        output.writelines(line_text(line) for line in (lines[-last:] if last else lines))
        output.flush()
        return
    for text in summary_lines(summary(view.lines, view.first), _width()):
        click.echo(click.style(text, bold=True))
    found = rows(lines, view.first, errors=errors)
    shown = found[-last:] if last else found
    if not view.complete or len(shown) < len(found):
        click.echo("Earlier rows are left out; --last=0 shows all")
    for text in row_lines(shown, _width()):
        click.echo(text)
    if not shown:
        click.echo("Nothing happened since then")
    if view.unreadable:
        click.echo(f"{view.unreadable} lines are torn or from a newer edl, and left out", err=True)


def _width() -> int:
    """Columns of the terminal; 0 if the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def _since(text: str) -> float:
    """Seconds since 1970; 0: no limit. Raises ``SettingError``."""
    if not text:
        return 0.0
    ago_s = duration_s(text)
    if ago_s is not None:
        return wall_clock_s() - ago_s
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise SettingError(
            "--since", text, "is no time", "Write 90s, 15m, 2h, 3d, or a date such as 2026-05-04 13:20"
        ) from None
