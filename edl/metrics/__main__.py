"""``python -m edl.metrics``: generates the tables of docs/metrics.md.

``--markdown`` prints them; ``--write FILE`` writes them into that page, between two comments. A unit test fails if the
page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from edl.marked_page import MarkedPage
from edl.metrics.job import JOB_METRICS
from edl.metrics.metric import Metric
from edl.metrics.node import NODE_METRICS


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


TABLES = MarkedPage(
    module="edl.metrics",
    page="docs/metrics.md",
    begin="<!-- begin of the metrics: python -m edl.metrics --write docs/metrics.md -->",
    end="<!-- end of the metrics -->",
    markdown=markdown,
)

if __name__ == "__main__":
    TABLES.main(sys.argv[1:])
