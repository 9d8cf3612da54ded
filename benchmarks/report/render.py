"""Writes the report from a record: pure, so that it can be written again without measuring again."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.common.report import Outcome, seconds
from benchmarks.report.bars import Bar, draw
from benchmarks.report.contenders import CONTENDERS, Contender
from benchmarks.report.record import Record
from benchmarks.report.rows import ROWS, Metric, Row

FORMATS: dict[str, Callable[[float], str]] = {
    "s": seconds,
    "MB": lambda value: f"{value:.0f} MB",
    "%": lambda value: f"{value:.1f} %",
}
AXES = {"s": "seconds", "MB": "MB", "%": "% of a core"}
DASH, TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
NO_RUN = "no run"
"""The reason when nobody has measured it yet."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The values of a metric over the runs that have it."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def show(self, unit: str) -> str:
        """``median (lowest to highest)``, or the value if there is only one; a dash without any."""
        if not self.values:
            return DASH
        shape = FORMATS[unit]
        if len(self.values) == 1:
            return shape(self.median)
        return f"{shape(self.median)} ({shape(min(self.values))}{DASH}{shape(max(self.values))})"


def spread(runs: Iterable[Outcome], metric: str) -> Spread:
    """The values of a metric in these runs."""
    return Spread(tuple(run.values[metric] for run in runs if metric in run.values))


def ratio(value: Spread, base: Spread) -> str:
    """The median as a multiple of that of ``base``; a dash where one of them is missing or 0."""
    if not value.values or not base.values or not base.median:
        return DASH
    times = value.median / base.median
    return f"{times:.0f}{TIMES}" if times >= 10 else f"{times:.2g}{TIMES}"


def took_part(row: Row) -> list[Contender]:
    """The contenders of a row, in order."""
    return [one for one in CONTENDERS if not one.rows or row.name in one.rows]


def base_of(row: Row, contender: Contender, record: Record) -> Spread:
    """What the contender is compared with."""
    return spread(record.of(row.name, dict(row.base)[contender.framework]), row.metrics[0].name)


def missing(record: Record, row: Row, contender: Contender) -> str:
    """Why the row has no run of the contender; empty if it has one."""
    if record.of(row.name, contender.name):
        return ""
    return record.missing.get(row.name, {}).get(contender.name, NO_RUN)


def plot(record: Record, row: Row) -> str:
    """The picture of a row's first metric; empty if there is nothing to draw."""
    metric = row.metrics[0]
    bars = []
    for contender in took_part(row):
        runs = record.of(row.name, contender.name)
        found = Spread(tuple(value for value in spread(runs, metric.name).values if value > 0))
        never = sum(1 for run in runs if run.started and not run.values)
        own = contender.launcher.startswith("edl")
        if found.values:
            note = f" ({never} of {len(runs)} never)" if never else ""
            bars.append(Bar(contender.name, found.values, found.median, own, note))
        elif runs:
            bars.append(Bar(contender.name, own=own, note="never" if never else "did not start"))
    return draw(bars, f"{metric.name}, {AXES[metric.unit]}")


def render(record: Record) -> str:
    """The whole report as Markdown, with links to ``ROW.svg`` of the rows that have a picture."""
    return "\n".join((*_head(record), *_overview(record), *(line for row in ROWS for line in _row(record, row)), ""))


def _head(record: Record) -> Iterator[str]:
    machine = record.machine
    yield from ("# edl and its peers", "")
    yield (
        f"{machine['at']}, {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB of memory, {machine['system']}, Python {machine['python']}. "
        "All nodes are simulated on this host, over loopback, without a GPU; contenders take turns."
    )
    yield ""
    yield load_line([run.load for run in record.outcomes], int(machine["cores"]))
    yield from ("", f"A figure is the median (lowest{DASH}highest) of the runs that have it.")
    yield "`runs` are those that reached the event, `never` those of them that did not recover. "
    yield "Ratios are those of the medians, to the contender in the heading or to its twin with the same framework."
    yield from ("", "## Contenders", "", "| contender | version | settings; defaults in brackets |", "|---|---|---|")
    for one in CONTENDERS:
        yield f"| {one.name} | {record.versions.get(one.name, DASH)} | {one.settings} |"
    yield ""


def load_line(loads: Sequence[float], cores: int) -> str:
    """The load before the runs, and whether that makes the figures worthless."""
    if not loads:
        return "No run yet."
    text = (
        f"One-minute load before the runs: {statistics.median(loads):.1f} ({min(loads):.1f}{DASH}{max(loads):.1f}). "
        "The run before, which keeps all cores busy for a while, counts in it."
    )
    if statistics.median(loads) > 1.5 * cores:
        text += " **The machine was busy with other work: the figures show what works, not how fast it is.**"
    return text


def _overview(record: Record) -> Iterator[str]:
    yield from ("## Overview", "", f"The first figure of each row; {DASH} without a run: the reason is below.", "")
    yield f"| contender | {' | '.join(row.name for row in ROWS)} |"
    yield f"|---|{'---|' * len(ROWS)}"
    for contender in CONTENDERS:
        cells = [_cell(record, row, contender) for row in ROWS]
        if any(cell != DASH for cell in cells):
            yield f"| {contender.name} | {' | '.join(cells)} |"
    yield ""


def _cell(record: Record, row: Row, contender: Contender) -> str:
    runs = record.of(row.name, contender.name)
    found = spread(runs, row.metrics[0].name)
    if found.values:
        return FORMATS[row.metrics[0].unit](found.median)
    if not runs:
        return DASH
    return "never" if any(run.started for run in runs) else "did not start"


def _row(record: Record, row: Row) -> Iterator[str]:
    yield from (f"## {row.title} (`{row.name}`)", "", row.text, "")
    runs = record.of(row.name)
    shown = [one for one in row.metrics if spread(runs, one.name).values] or [row.metrics[0]]
    again = any(run.redone is not None for run in runs)
    if runs:
        if plot(record, row):
            yield from (f"![{row.title}, by contender]({row.name}.svg)", "")
        names = [*(one.name for one in shown), f"{TIMES} {row.base[0][1]}", "runs", "never"]
        names += ["steps redone"] if again else []
        yield f"| contender | {' | '.join(names)} |"
        yield f"|---|{'---|' * len(names)}"
        for contender in took_part(row):
            if mine := record.of(row.name, contender.name):
                compared = (
                    "1"
                    if contender.name in dict(row.base).values()
                    else ratio(spread(mine, row.metrics[0].name), base_of(row, contender, record))
                )
                cells = [*_figures(mine, shown), compared, *_counts(mine), *([_redone(mine)] if again else [])]
                yield f"| {contender.name} | {' | '.join(cells)} |"
        yield ""
    yield from _remarks(record, row)


def _figures(runs: Sequence[Outcome], metrics: Sequence[Metric]) -> list[str]:
    return [spread(runs, one.name).show(one.unit) for one in metrics]


def _counts(runs: Sequence[Outcome]) -> list[str]:
    started = [run for run in runs if run.started]
    return [str(len(started)), str(sum(1 for run in started if not run.values))]


def _redone(runs: Sequence[Outcome]) -> str:
    counts = [run.redone for run in runs if run.redone is not None]
    if not counts:
        return DASH
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{math.floor(statistics.median(counts))} ({low}{DASH}{high})"


def _remarks(record: Record, row: Row) -> Iterator[str]:
    lines = []
    for contender in took_part(row):
        if reason := missing(record, row, contender):
            lines.append(f"- {contender.name} is not in this row: {reason}.")
        mine = record.of(row.name, contender.name)
        lines += [f"- {contender.name}, run {number}: {run.note}." for number, run in enumerate(mine, 1) if run.note]
    yield from (*lines, *([""] if lines else []))
