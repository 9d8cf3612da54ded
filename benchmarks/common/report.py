"""Combines the numbers of all runs in one table and optionally one JSON file."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one launcher through one event. ``values``: measured seconds by metric, empty when it never recovered.

    ``started`` is ``False`` when the job did not even reach the event: that says nothing about recovery and is counted
    separately.
    """

    event: str
    launcher: str
    values: dict[str, float] = field(default_factory=dict)
    redone: int | None = None
    started: bool = True
    note: str = ""
    load: float = 0.0
    """One-minute load average of the machine just before the run."""


def load_average() -> float:
    """The machine's one-minute load average."""
    return float(psutil.getloadavg()[0])


def machine() -> dict[str, object]:
    """A description of the machine."""
    return {
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "at": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def seconds(value: float) -> str:
    """Format seconds with at least two significant digits; below a second as milliseconds."""
    if value >= 1:
        return f"{value:.1f} s"
    return f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.1f} ms"


def figures(values: Mapping[str, float]) -> str:
    """The figures of one run on one line."""
    return ", ".join(f"{metric} {seconds(value)}" for metric, value in values.items())


def _rows(outcomes: Sequence[Outcome], own: str) -> list[list[str]]:
    keys = dict.fromkeys((one.event, metric) for one in outcomes for metric in one.values)
    for one in outcomes:
        if not any(event == one.event for event, _ in keys):
            keys[(one.event, "-")] = None
    rows = []
    for event, metric in sorted(keys, key=lambda key: list(dict.fromkeys(o.event for o in outcomes)).index(key[0])):
        here = [one for one in outcomes if one.event == event]
        base = [one.values[metric] for one in here if one.launcher == own and metric in one.values]
        for launcher in dict.fromkeys(one.launcher for one in here):
            mine = [one for one in here if one.launcher == launcher]
            if any(one.values for one in mine) and not any(metric in one.values for one in mine):
                continue  # not applicable to this event
            rows.append([event, metric, launcher, *_cells(mine, metric, base, launcher == own)])
    return rows


def _cells(mine: Sequence[Outcome], metric: str, base: Sequence[float], is_own: bool) -> list[str]:
    values = [one.values[metric] for one in mine if metric in one.values]
    redone = [one.redone for one in mine if one.redone is not None]
    ran = [one for one in mine if one.started]
    never = sum(1 for one in ran if not one.values)
    ratio = ""
    if values and base and not is_own:
        times = statistics.median(values) / statistics.median(base)
        ratio = f"{times:.1f}x" if times >= 1 else f"{times:.2g}x"
    return [
        str(len(ran)),
        seconds(statistics.median(values)) if values else "-",
        f"{seconds(min(values))} - {seconds(max(values))}" if values else "-",
        f"{never} of {len(ran)}" if never else "0",
        f"{statistics.median(redone):g} ({min(redone)}-{max(redone)})" if redone else "-",
        ratio,
    ]


def show(title: str, outcomes: Sequence[Outcome], own: str = "edl") -> None:
    """Print the table: medians over the runs that recovered, spread, number of runs that never did, and each median as
    a multiple of that of ``own``."""
    table = Table(title=title)
    for heading in ("event", "metric", "launcher"):
        table.add_column(heading, no_wrap=True)
    for heading in ("runs", "median", "min - max", "never", "steps redone", f"ratio to {own}"):
        table.add_column(heading, justify="right", no_wrap=True)
    previous = ""
    for row in _rows(outcomes, own):
        if previous and row[0] != previous:
            table.add_section()
        previous = row[0]
        table.add_row(*row)
    console = Console(width=max(Console().width, 150))
    console.print(table)
    for one in outcomes:
        if one.note:
            console.print(f"{one.event}, {one.launcher}: {one.note}", highlight=False, markup=False)


def progress(text: str) -> None:
    """Print one line of progress."""
    Console(stderr=True, width=150).print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, markup=False)


def write_json(path: Path | None, title: str, outcomes: Sequence[Outcome], **settings: object) -> None:
    """Write all measurements, run by run, with the machine and the settings; does nothing if ``path`` is ``None``."""
    if path is None:
        return
    data = {
        "title": title,
        "machine": machine(),
        "settings": settings,
        "outcomes": [asdict(one) for one in outcomes],
    }
    path.write_text(json.dumps(data, indent=1) + "\n")
