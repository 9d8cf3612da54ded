"""Draws curves as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Point = tuple[int, int, float]
"""Samples seen, workers, loss."""
Curve = list[Point]
Scale = Callable[[float], float]

WIDTH, HEIGHT, LEFT, RIGHT, TOP = 860, 460, 62, 20, 40
LOSS_BOTTOM, WORKERS_TOP, WORKERS_BOTTOM = 320, 356, 420
STYLES = (
    ("#222222", "3.2", ""),
    ("#e8590c", "1.4", ""),
    ("#1c7ed6", "1.4", "5 3"),
)
TEXT = 'font-family="sans-serif" font-size="12" fill="#333333"'


def draw(curves: Mapping[str, Sequence[Point]]) -> str:
    """Draw the losses over samples on a logarithmic scale, and the number of workers below."""
    most = max(samples for curve in curves.values() for samples, _, _ in curve)
    losses = [loss for curve in curves.values() for _, _, loss in curve]
    low, high = math.log10(max(min(losses), 1e-4)), math.log10(max(losses))
    workers = max(size for curve in curves.values() for _, size, _ in curve)

    def x(samples: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * samples / most

    def y(loss: float) -> float:
        return TOP + (LOSS_BOTTOM - TOP) * (high - math.log10(max(loss, 1e-4))) / (high - low)

    def y_workers(size: float) -> float:
        return WORKERS_BOTTOM - (WORKERS_BOTTOM - WORKERS_TOP) * size / workers

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *_axes(x, y, y_workers, most, (low, high), workers),
    ]
    for number, (name, curve) in enumerate(curves.items()):
        colour, width, dashes = STYLES[number % len(STYLES)]
        style = f'fill="none" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dashes}"'
        parts.append(_line(((x(samples), y(loss)) for samples, _, loss in curve), style))
        parts.append(_line(_stairs(curve, x, y_workers), style))
        at = LEFT + 10 + number * 230
        parts.append(f'<line x1="{at}" y1="20" x2="{at + 26}" y2="20" {style}/>')
        parts.append(f'<text x="{at + 32}" y="24" {TEXT}>{html.escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _axes(
    x: Scale, y: Scale, y_workers: Scale, most: int, range_of_losses: tuple[float, float], workers: int
) -> Iterator[str]:
    low, high = range_of_losses
    for power in range(math.floor(low), math.ceil(high) + 1):
        for digit in (1, 2, 5):
            value = digit * 10.0**power
            if low <= math.log10(value) <= high:
                level = y(value)
                yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}" stroke="#e5e5e5"/>'
                yield f'<text x="{LEFT - 8}" y="{level + 4:.1f}" text-anchor="end" {TEXT}>{value:g}</text>'
    for size in range(1, workers + 1):
        level = y_workers(size)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}" stroke="#f0f0f0"/>'
        yield f'<text x="{LEFT - 8}" y="{level + 4:.1f}" text-anchor="end" {TEXT}>{size}</text>'
    step = 10 ** math.floor(math.log10(most)) // 2
    for samples in range(0, most + 1, step):
        yield f'<text x="{x(samples):.1f}" y="{WORKERS_BOTTOM + 18}" text-anchor="middle" {TEXT}>{samples}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle" {TEXT}>samples seen</text>'
    for top, text in ((TOP + 140, "loss of the step"), ((WORKERS_TOP + WORKERS_BOTTOM) / 2, "workers")):
        yield f'<text transform="translate(14 {top}) rotate(-90)" text-anchor="middle" {TEXT}>{text}</text>'


def _stairs(curve: Sequence[Point], x: Scale, y: Scale) -> Iterator[tuple[float, float]]:
    before = 0
    for samples, size, _ in curve:
        yield x(before), y(size)
        yield x(samples), y(size)
        before = samples


def _line(points: Iterable[tuple[float, float]], style: str) -> str:
    return f'<polyline points="{" ".join(f"{across:.1f},{down:.1f}" for across, down in points)}" {style}/>'
