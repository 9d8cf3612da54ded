"""Rows of a timeline as lines of text for a terminal of any width. Pure but for the local time zone.

Names, tracebacks and output come from scripts and other hosts, so control characters are removed from all of them.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence

import click

from edl.history.timeline import Summary, TimelineRow, seconds
from edl.rendezvous.phrases import count, lines_of, one_line

NARROW = 60
"""Columns below which a row's label stands in front of its text instead of in a column."""
_LABELS = 15
_DURATION = re.compile(r"(?<=\d) (?=(?:s|min|h|d)\b)")
"""The space between a number and its unit, at which lines are not broken."""
_UNBROKEN = "\u00a0"
_COLOURS = {"bad": "red", "good": "green", "quiet": "bright_black"}


def row_lines(rows: Iterable[TimelineRow], width: int = 0) -> Iterator[str]:
    """Lines for these rows, with a heading for each day. ``width``: columns; 0: lines are not wrapped."""
    day = ""
    for row in rows:
        moment = time.localtime(row.at_s)
        today = time.strftime("%Y-%m-%d", moment)
        if today != day:
            day = today
            yield click.style(today, bold=True)
        narrow = 0 < width < NARROW
        head = f"{time.strftime('%H:%M:%S', moment)} "
        name = one_line(row.label)
        label = click.style(f"{name}:" if narrow else f"{name:<{_LABELS}}", fg=_COLOURS.get(row.mark))
        indent = "  " if narrow else " " * (len(head) + _LABELS + 1)
        begin = len(head) + (len(name) + 1 if narrow else max(_LABELS, len(name))) + 1
        first, *more = _wrapped(lines_of(row.text), width, begin, indent)
        yield f"{head}{label} {first}".rstrip()
        yield from more


def _wrapped(lines: Sequence[str], width: int, begin: int, indent: str) -> list[str]:
    """These lines in lines of at most ``width`` columns; the first one stands after ``begin`` columns."""
    found: list[str] = []
    for line in lines or [""]:
        inner = line[: len(line) - len(line.lstrip())]
        hang = begin if not found else 0
        if not width:
            found.append(line if not found else indent + line)
            continue
        wrapped = textwrap.wrap(
            _DURATION.sub(_UNBROKEN, line.strip()),
            max(width, len(indent) + len(inner) + 8),
            initial_indent=" " * hang if hang else indent + inner,
            subsequent_indent=indent + inner,
            break_on_hyphens=False,
        ) or [""]
        found += [wrapped[0][hang:] if hang else wrapped[0], *wrapped[1:]]
    return [line.replace(_UNBROKEN, " ") for line in found]


def summary_lines(one: Summary, width: int = 0) -> list[str]:
    """The head of a timeline."""
    text = (
        f"{one_line(one.job)}  run {one_line(one.run)}  {outcome(one)}  {count(one.rounds, 'round')}"
        f"{_restarts(one)}, {seconds(one.total_s)}"
    )
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False) if width else [text]


def _restarts(one: Summary) -> str:
    return f", {one.restarts} restart{'' if one.restarts == 1 else 's'}" if one.restarts >= 0 else ""


def outcome(one: Summary) -> str:
    """How the job ended, in short."""
    if one.outcome is None:
        return "no end recorded yet"
    return "succeeded" if one.outcome.exit_code == 0 else f"ended with exit code {one.outcome.exit_code}"


def job_lines(jobs: Iterable[Summary], width: int = 0) -> Iterator[str]:
    """A list of jobs, one on a line; on two lines in a narrow terminal."""
    for one in jobs:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.began_s))
        about = f"{outcome(one)}, {count(one.rounds, 'round')}, {seconds(one.total_s)}"
        parts = f"{began}  {one_line(one.job)}", f"run {one_line(one.run)}  {about}"
        if width and len("  ".join(parts)) > width:
            yield from textwrap.wrap(parts[0], width, subsequent_indent="  ", break_on_hyphens=False)
            yield from textwrap.wrap(
                parts[1], width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
            )
        else:
            yield "  ".join(parts)
