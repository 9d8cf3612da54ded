"""``python -m edl.metrics``: generates the tables of docs/metrics.md.

``--markdown`` prints them; ``--write FILE`` writes them into that page, between two comments. A unit test fails if the
page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from edl.metrics.job import JOB_METRICS
from edl.metrics.metric import Metric
from edl.metrics.node import NODE_METRICS

BEGIN = "<!-- begin of the metrics: python -m edl.metrics --write docs/metrics.md -->"
END = "<!-- end of the metrics -->"


def markdown() -> str:
    """Both tables."""
    return "\n\n".join(
        (
            "### Of the job\n\nServed by the Master's launcher.\n\n" + _table(JOB_METRICS),
            "### Of each node\n\nServed by every launcher.\n\n" + _table(NODE_METRICS),
        )
    )


def _table(metrics: Sequence[Metric[Any]]) -> str:
    head = "| metric | type | labels | meaning |\n|---|---|---|---|\n"
    return head + "\n".join(_row(metric) for metric in metrics)


def _row(metric: Metric[Any]) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help} |"


def replaced(page: str) -> str:
    """The page with up-to-date tables. Raises ``ValueError`` if one of the two comments is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks the line {BEGIN!r} or {END!r}")
    return f"{before}{BEGIN}\n\n{markdown()}\n\n{END}{after}"


def main(arguments: Sequence[str]) -> None:
    """Print the tables, or write them into a page. Raises ``SystemExit`` for other arguments."""
    match list(arguments):
        case ["--markdown"]:
            click.echo(markdown())
        case ["--write", path]:
            page = Path(path)
            page.write_text(replaced(page.read_text()))
        case _:
            raise SystemExit("usage: python -m edl.metrics --markdown | --write docs/metrics.md")


if __name__ == "__main__":
    main(sys.argv[1:])
