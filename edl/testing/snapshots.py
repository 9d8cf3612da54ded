"""Small snapshots for tests: one array filled with a single byte value."""

from __future__ import annotations

from edl.wire import snapshot
from edl.wire.records import Holding

JOB = "job"


def make_snapshot(holding: Holding, fill: int, size: int = 4096, job: str = JOB) -> bytes:
    """A commit with one array of ``size`` bytes, all of this value."""
    version = holding.version
    meta = snapshot.Meta(job, version.era, version.commit, 1, holding.shard, holding.shards, "none")
    plan = snapshot.plan([("values", "U8", (size,), size)], meta, {})
    return plan.header + bytes([fill]) * size


def fill_of(data: memoryview | bytes) -> int:
    """The byte value that fills such a snapshot's array. Raises ``AssertionError`` if it has several."""
    entry = snapshot.parse(data).entries["values"]
    values = bytes(data[entry.offset : entry.offset + entry.size])
    if values.count(values[0]) != len(values):
        raise AssertionError(f"a mixture of {sorted(set(values))}")
    return values[0]
