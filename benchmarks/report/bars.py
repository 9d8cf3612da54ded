"""Draws medians and spreads on a logarithmic scale as SVG: one line for each contender."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from edl.simulate.loglog import COLOURS, TEXT, LogScale

WIDTH, LEFT, RIGHT, TOP, LINE, BOTTOM = 760, 150, 90, 16, 26, 44
OWN, OTHER, NEUTRAL = COLOURS[0], COLOURS[1], COLOURS[4]


@dataclass(frozen=True, slots=True)
class Bar:
    """One contender. Without values, ``note`` stands in its line (such as "never recovered"). ``own``: it is edl."""

    name: str
    values: tuple[float, ...] = ()
    median: float = 0.0
    own: bool = False
    note: str = ""


def draw(bars: Sequence[Bar], across: str) -> str:
    """Draw the lines in order; empty if no bar has a value. Values must be above 0. ``across``: title of the axis."""
    values = [value for bar in bars for value in bar.values]
    if not values:
        return ""
    scale = LogScale((min(values) / 1.3, max(values) * 1.3), LEFT, WIDTH - RIGHT)
    bottom = TOP + LINE * len(bars)
    height = bottom + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for mark in scale.marks():
        place = scale.place(mark)
        parts.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{bottom}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{place:.1f}" y="{bottom + 16}" text-anchor="middle" {TEXT}>{mark:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{height - 8}" text-anchor="middle" {TEXT}>{html.escape(across)}</text>')
    for number, bar in enumerate(bars):
        parts += _line(bar, scale, TOP + LINE * (number + 0.5))
    return "\n".join([*parts, "</svg>", ""])


def _line(bar: Bar, scale: LogScale, level: float) -> list[str]:
    name = f'<text x="{LEFT - 10}" y="{level + 4:.1f}" text-anchor="end" {TEXT}>{html.escape(bar.name)}</text>'
    if not bar.values:
        return [name, f'<text x="{LEFT + 6}" y="{level + 4:.1f}" {TEXT}>{html.escape(bar.note)}</text>']
    colour = OWN if bar.own else OTHER
    low, middle, high = (scale.place(value) for value in (min(bar.values), bar.median, max(bar.values)))
    thick = f'y1="{level:.1f}" y2="{level:.1f}" stroke="{colour}"'
    return [
        name,
        f'<line x1="{low:.1f}" x2="{high:.1f}" {thick} stroke-width="3" stroke-linecap="round"/>',
        *(f'<circle cx="{scale.place(one):.1f}" cy="{level:.1f}" r="2.5" fill="{colour}"/>' for one in bar.values),
        f'<circle cx="{middle:.1f}" cy="{level:.1f}" r="5.5" fill="{colour}"/>',
        f'<text x="{high + 12:.1f}" y="{level + 4:.1f}" {TEXT}>{bar.median:.3g}{html.escape(bar.note)}</text>',
    ]
