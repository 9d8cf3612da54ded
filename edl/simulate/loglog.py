"""Draws lines on two logarithmic scales as SVG: a straight line is a power law."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence

Point = tuple[float, float]

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 420, 64, 150, 24, 376
COLOURS = ("#1c7ed6", "#e8590c", "#2b8a3e", "#862e9c", "#222222")
TEXT = 'font-family="sans-serif" font-size="12" fill="#333333"'


class LogScale:
    """Maps values between two bounds to positions between two others, logarithmically."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        self.low, self.high = math.log10(min(values)), math.log10(max(values))
        self._begin, self._end = begin, end

    def place(self, value: float) -> float:
        """The position of a value above 0."""
        return self._begin + (self._end - self._begin) * (math.log10(value) - self.low) / ((self.high - self.low) or 1)

    def marks(self) -> Iterator[float]:
        """1, 2 and 5 times each power of ten in between."""
        for power in range(math.floor(self.low), math.ceil(self.high) + 1):
            for digit in (1, 2, 5):
                value = digit * 10.0**power
                if self.low - 1e-9 <= math.log10(value) <= self.high + 1e-9:
                    yield value


def draw(lines: Mapping[str, Sequence[Point]], across: str, up: str) -> str:
    """Draw the lines. ``lines``: points by name; both coordinates must be above 0. ``across``, ``up``: titles of the
    axes."""
    points = [point for line in lines.values() for point in line]
    x = LogScale([point[0] for point in points], LEFT, WIDTH - RIGHT)
    y = LogScale([point[1] for point in points], BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *_grid(x, y),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle" {TEXT}>'
        f"{html.escape(across)}</text>",
        f'<text transform="translate(16 {(TOP + BOTTOM) / 2}) rotate(-90)" text-anchor="middle" {TEXT}>'
        f"{html.escape(up)}</text>",
    ]
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(x.place(across_), y.place(up_)) for across_, up_ in line]
        way = " ".join(f"{right:.1f},{down:.1f}" for right, down in places)
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{right:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>' for right, down in places]
        at = TOP + 18 * number
        parts.append(f'<circle cx="{WIDTH - RIGHT + 18}" cy="{at}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 28}" y="{at + 4}" {TEXT}>{html.escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _grid(x: LogScale, y: LogScale) -> Iterator[str]:
    for value in y.marks():
        level = y.place(value)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}" stroke="#e5e5e5"/>'
        yield f'<text x="{LEFT - 8}" y="{level + 4:.1f}" text-anchor="end" {TEXT}>{value:g}</text>'
    for value in x.marks():
        place = x.place(value)
        yield f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{BOTTOM}" stroke="#f0f0f0"/>'
        yield f'<text x="{place:.1f}" y="{BOTTOM + 18}" text-anchor="middle" {TEXT}>{value:g}</text>'
