"""The progress of data sets as tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edl.rendezvous.phrases import duration
from edl.wire.status import JobStatus, ServiceView

SERVICE = "data"
READERS = "readers"
"""Name of the item that counts remote readers; it is no data set."""
SETS = ("DATA SET", "EPOCH", "SHARDS", "RECORDS", "LEASED", "QUARANTINED", "RATE", "LEFT", "READERS")
SHARES = ("DATA SET", "NODE", "WORKERS", "LEASES", "RECORDS")


def data_sets(status: JobStatus) -> list[ServiceView]:
    """The data sets of a job."""
    return [one for one in status.services if one.service == SERVICE and one.name != READERS]


def counts_of(one: ServiceView) -> dict[str, float]:
    """The counts of an item by name."""
    return {count.name: count.value for count in one.counts}


def set_row(one: ServiceView) -> list[str]:
    """The row of a data set in the table ``SETS``. What is not known is ``-``."""
    counts = counts_of(one)
    records = counts.get("records", -1)
    known = records >= 0 and "done_records" in counts
    return [
        one.name,
        _whole(counts, "epoch"),
        f"{_whole(counts, 'done_shards')}/{_whole(counts, 'shards')}",
        f"{counts['done_records']:,.0f}/{records:,.0f}" if known else _whole(counts, "done_records"),
        _whole(counts, "leased_shards"),
        _whole(counts, "quarantined_shards"),
        f"{counts['records_per_s']:,.0f}/s" if counts.get("records_per_s") else "-",
        duration(counts["left_s"]) if "left_s" in counts else "-",
        str(sum(share.workers for share in one.shares)),
    ]


def share_rows(sets: Sequence[ServiceView], node: str = "") -> list[list[str]]:
    """The rows of the table ``SHARES``: which node reads what. ``node``: only this one; empty: all."""
    return [
        [one.name, share.node, str(share.workers), str(share.leases), f"{share.records:,}"]
        for one in sets
        for share in one.shares
        if node in ("", share.node)
    ]


def _whole(counts: Mapping[str, float], name: str) -> str:
    return f"{counts[name]:,.0f}" if name in counts else "-"
