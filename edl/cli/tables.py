"""Prints tables for people: plain columns, without lines around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from edl.rendezvous.phrases import one_line


def show_table(console: Console, names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under their names, with control characters removed."""
    table = Table(*names, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    console.print(table)


def show_lines(console: Console, lines: Iterable[str]) -> None:
    """Print lines as they are, with control characters removed."""
    for line in lines:
        console.print(one_line(line), markup=False, highlight=False, soft_wrap=True)
