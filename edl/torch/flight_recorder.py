"""CollectiveWaits in collectives of an accelerator, from the records of torch's flight recorder.

NCCL's collectives run on the device, where the host neither starts nor ends them. The flight recorder keeps the last of
them, with their times on the device if ``TORCH_NCCL_ENABLE_TIMING=1`` is set. A collective ends on all ranks at about
the same time and begins on each when that rank has arrived: so the last rank to arrive has the shortest one, and no
common clock is needed. torch records gloo's collectives too, but not when they end (2.13); those are measured by
``edl.torch.collectives``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from edl.wire.rank_pace import UNKNOWN
from edl.worker.framework import CollectiveWaits

MOST_COST = 0.001
"""Largest share of the time that reading the records may take."""
LONGEST_REST_S = 60.0
"""Seconds after which they are read again, whatever that costs."""
_DUMPS = ("_dump_nccl_trace_json",)


@dataclass(frozen=True, slots=True)
class Collective:
    """One recorded collective."""

    record: int
    """Number of the record, in the order of creation."""
    created_ns: int
    """When the host started it; on this host's clock."""
    duration_ms: float
    """Time on the device, waiting for other ranks included."""


class _Entry(msgspec.Struct, gc=False):
    """What is read of a record. Other fields are skipped, which makes reading cheap."""

    record_id: Any = None
    time_created_ns: Any = None
    duration_ms: Any = None
    is_p2p: Any = None
    state: Any = None


class _Dump(msgspec.Struct, gc=False):
    entries: list[_Entry] = []


def parse(text: str | bytes) -> list[Collective]:
    """The completed collectives of a dump whose durations are known, oldest first. What is not understood is left out:
    the format is torch's own and changes between releases."""
    try:
        entries = msgspec.json.decode(text, type=_Dump).entries
    except ValueError:
        return []
    found = [_collective(one) for one in entries]
    return sorted((one for one in found if one is not None), key=lambda one: one.record)


def _collective(entry: _Entry) -> Collective | None:
    record, created, duration = entry.record_id, entry.time_created_ns, entry.duration_ms
    if not (isinstance(record, int) and isinstance(created, int) and isinstance(duration, (int, float))):
        return None
    if entry.is_p2p or entry.state != "completed" or duration < 0:
        return None
    return Collective(record, created, float(duration))


def waited_share(collectives: Sequence[Collective]) -> float:
    """The share of time spent in these collectives, from the start of the first to the start of the last; ``UNKNOWN``
    for less than two."""
    if len(collectives) < 2:
        return UNKNOWN
    span_ms = (collectives[-1].created_ns - collectives[0].created_ns) / 1e6
    if span_ms <= 0:
        return UNKNOWN
    return min(1.0, sum(one.duration_ms for one in collectives[:-1]) / span_ms)


class WaitReader:
    """Adds up the waits of this process since it was created. The recorder keeps a limited number of collectives: the
    share of those that it has is taken for the whole time since the last look."""

    def __init__(self, dump: Callable[[], str | bytes] | None = None) -> None:
        """``dump``: returns all records as JSON."""
        self._dump = dump or _dump_of_torch()
        self._waits = CollectiveWaits()
        self._looked_s: float | None = None
        self._newest = -1
        self._rests_until_s = 0.0
        self._cost_s = float("inf")
        """Seconds that the last reading has taken."""

    def waits(self, now_s: float) -> CollectiveWaits | None:
        """The time in collectives so far; None if it cannot be measured, or reading would cost too much now."""
        if self._dump is None or now_s < self._rests_until_s:
            return None
        began_s = _now_s()
        try:
            records = parse(self._dump())
        except (RuntimeError, TypeError, ValueError):
            self._dump = None
            return None
        # The cheaper of two: what else this process or machine did in that moment says nothing about the next reading.
        before_s, self._cost_s = self._cost_s, _now_s() - began_s
        self._rests_until_s = now_s + min(min(before_s, self._cost_s) / MOST_COST, LONGEST_REST_S)
        share = waited_share([one for one in records if one.record > self._newest])
        looked_s, self._looked_s = self._looked_s, now_s
        if share < 0:
            return None
        self._newest = records[-1].record
        self._waits.waited_s += share * (now_s - looked_s) if looked_s is not None else 0.0
        return self._waits


def _dump_of_torch() -> Callable[[], str | bytes] | None:
    """torch's own function; None if this build has none that records times."""
    import torch._C._distributed_c10d as native

    for name in _DUMPS:
        dump: Any = getattr(native, name, None)
        if dump is not None:
            return lambda: dump(includeCollectives=True, onlyActive=False)
    return None


_now_s = time.perf_counter
