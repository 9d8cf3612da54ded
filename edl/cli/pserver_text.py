"""Parameter servers as a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edl.cli.data_text import counts_of
from edl.rendezvous.phrases import amount
from edl.wire.status import JobStatus, ServiceView

SERVICE = "ps"
SERVERS = ("PSERVER", "BUCKETS", "COPIES", "ROWS", "MEMORY", "PULLS", "PUSHES", "COPIES BEHIND")
_MARK = "owned_buckets"
"""A count that only single pservers have."""


def servers_of(status: JobStatus) -> list[ServiceView]:
    """What the service of the parameter servers reports: all pservers together, each of them, trainers, a
    checkpoint."""
    return [one for one in status.services if one.service == SERVICE]


def summary_lines(items: Sequence[ServiceView]) -> list[str]:
    """One line about all pservers, one about the trainers, and one about the checkpoint."""
    return [one.text for one in items if _MARK not in counts_of(one)]


def server_rows(items: Sequence[ServiceView]) -> list[list[str]]:
    """The rows of the table ``SERVERS``. A pserver that has not reported its load has ``-``."""
    found = ((one.name, counts_of(one)) for one in items)
    return [_row(name, counts) for name, counts in found if _MARK in counts]


def _row(name: str, counts: Mapping[str, float]) -> list[str]:
    def number(key: str) -> str:
        return f"{counts[key]:,.0f}" if key in counts else "-"

    used, most = counts.get("rows_bytes"), counts.get("most_bytes", 0.0)
    memory = "-" if used is None else amount(int(used)) + (f" of {amount(int(most))}" if most else "")
    behind = f"{counts['lag_s']:.1f} s" if counts.get("lag_s", 0.0) > 0 else "-"
    whole = (number("owned_buckets"), number("copied_buckets"), number("rows"))
    return [name, *whole, memory, number("pulls"), number("pushes"), behind]
