"""What the demo prints: a live progress bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from scripts.demo_parts.measure import Recovery, StepRecord
from scripts.demo_parts.nodes import now_s

PLAIN_EVERY_S = 5.0
"""Without a terminal, a line about the progress is printed this often."""


@dataclass(frozen=True)
class Chapter:
    """One row of the table at the end."""

    what: str
    recovery: Recovery


class Show:
    """Prints happenings with the seconds since the start, and shows how far training is."""

    def __init__(self, steps: int) -> None:
        self._console = Console(highlight=False)
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        if not self._live:
            self._console = Console(highlight=False, no_color=True, force_terminal=False, width=118)
        self._start_s = now_s()
        self._last_line_s = self._start_s
        self._steps = steps
        self._progress = Progress(
            TextColumn("steps"), BarColumn(40), MofNCompleteColumn(), TextColumn("{task.fields[about]}"),
            console=self._console, auto_refresh=False,
        )  # fmt: skip
        self._task = self._progress.add_task("steps", total=steps, about="")

    def open(self) -> None:
        """Begin to show the progress."""
        if self._live:
            self._progress.start()

    def close(self) -> None:
        """Stop showing the progress; lines may still be printed."""
        if self._live:
            self._progress.stop()

    def say(self, text: str) -> None:
        """One happening, in plain words."""
        start = f"{now_s() - self._start_s:6.1f} s  "
        wrapped = textwrap.fill(text, self._console.width - 1, initial_indent=start, subsequent_indent=" " * len(start))
        self.print(wrapped)

    def print(self, text: str) -> None:
        """Text as it is."""
        self._console.print(text, markup=False, soft_wrap=True)
        self._last_line_s = now_s()

    def step(self, done: int, latest: StepRecord | None) -> None:
        """How far training is; `latest` is the newest line of rank 0."""
        about = "" if latest is None else f"world {latest.world}  loss {latest.loss:.3f}"
        if self._live:
            self._progress.update(self._task, completed=done, about=about, refresh=True)
        elif latest is not None and now_s() - self._last_line_s >= PLAIN_EVERY_S:
            self.say(f"step {done} of {self._steps}  {about}")

    def table(self, chapters: Sequence[Chapter]) -> None:
        """All chapters with what they cost."""
        table = Table("what happened", title="What it cost", title_justify="left")
        for heading in ("all ranks step again after", "standstill", "steps redone", "ranks"):
            table.add_column(heading, justify="right")
        for chapter in chapters:
            found = chapter.recovery
            table.add_row(
                chapter.what,
                f"{found.seconds:.2f} s",
                f"{found.standstill_s:.2f} s",
                str(found.redone),
                f"{found.world_before} -> {found.world_after}",
            )
        self._console.print(table)
