"""Decides what a running job adds to the denylist and removes from it. Pure.

A job adds the devices of the slots that it has dropped for their failures or for a failed health check. It adds a host
that its health check has found faulty, or if it has dropped all of its slots and their devices are unknown. A slot
without a known device is not added on its own: in another job the same number may be another device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from edl.wire.denylist import DenylistEntry
from edl.wire.health import HealthView
from edl.wire.health_records import Fitness
from edl.wire.status import DroppedSlot, JobStatus

FAULTY, GOOD = Fitness.FAULTY.value, Fitness.GOOD.value


@dataclass(frozen=True, slots=True)
class Author:
    """The run of a job that adds entries."""

    job: str
    run: str
    """Differs from that of every other run of the job."""
    keep_s: float
    """Seconds until an entry expires; 0: never."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to change."""

    add: tuple[DenylistEntry, ...] = ()
    remove: tuple[str, ...] = ()
    """Names of entries that have expired, or whose slots this run uses again."""


def counting(entries: Sequence[DenylistEntry], author: Author, wall_s: float) -> tuple[DenylistEntry, ...]:
    """The entries that keep slots out of this run. Its own ones do not: it has dropped these slots already, and its own
    rules decide when it uses them again."""
    return tuple(one for one in entries if one.run != author.run and not one.expired(wall_s))


class Sightings:
    """How long this Master has seen each entry, by a clock that nobody sets.

    The wall clock of one host may be wrong, and the list belongs to all jobs. So an expired entry is only deleted by a
    Master that has seen it for as long as it was meant to last.
    """

    def __init__(self) -> None:
        self._since_s: dict[DenylistEntry, float] = {}

    def outlived(self, entries: Sequence[DenylistEntry], now_s: float) -> frozenset[str]:
        """Names of the entries that have been there for their whole time. ``entries``: all that are there now."""
        self._since_s = {one: self._since_s.get(one, now_s) for one in entries}
        return frozenset(
            one.name
            for one, since_s in self._since_s.items()
            if one.until_s and now_s - since_s >= one.until_s - one.since_s
        )


def plan(
    status: JobStatus,
    entries: Sequence[DenylistEntry],
    added: Collection[str],
    author: Author,
    wall_s: float,
    outlived: Collection[str] = (),
) -> Plan:
    """What to change. ``added``: names of the entries that this run has added before; if one of them is gone, somebody
    has removed it, and it is not added again. ``wall_s``: now, in seconds since 1970. ``outlived``: see ``Sightings``;
    other expired entries stay, and do not count."""
    if status.phase == "ended":
        return Plan()
    bad, faulty = _dropped(status), _faulty(status)
    there = {one.name for one in entries if not one.expired(wall_s)}
    until_s = wall_s + author.keep_s if author.keep_s else 0.0
    found = [*((one.host_id, "", one.why, True) for one in faulty), *_bad_hardware(status, bad)]
    wanted = {
        one.name: one
        for one in (
            DenylistEntry(host, device, why, f"job {author.job}", author.run, wall_s, until_s, checked)
            for host, device, why, checked in found
        )
        if one.name not in there and one.name not in added
    }
    used = _Used(status)
    outdated = (
        one.name
        for one in entries
        if (one.expired(wall_s) and one.name in outlived) or (one.run == author.run and used.contains(one))
    )
    return Plan(tuple(wanted.values()), tuple(name for name in outdated if name not in wanted))


class _Used:
    """What the job uses, as far as it may be on the denylist."""

    def __init__(self, status: JobStatus) -> None:
        self._bad = _places(status)
        self._sound = {one.host_id for one in status.health if one.state == GOOD}

    def contains(self, entry: DenylistEntry) -> bool:
        """Whether the job uses again what this entry of its own is about. That a verdict is forgotten, because its node
        is gone or has moved, says nothing for the host."""
        if any(entry.covers(*place) for place in self._bad):
            return False
        return not entry.checked or entry.host in self._sound


def still_bad(status: JobStatus, added: Collection[str]) -> list[str]:
    """Those of the added names whose device or host the job still keeps out. Of one that it uses again a later defect
    counts as new."""
    bad = {
        name
        for host, devices in _places(status)
        for name in (f"host/{host}", *(f"device/{device}" for device in devices.split(",")))
    }
    return sorted(bad.intersection(added))


def _dropped(status: JobStatus) -> list[DroppedSlot]:
    return [one for one in status.dropped if one.by == "job"]


def _faulty(status: JobStatus) -> list[HealthView]:
    return [one for one in status.health if one.excluded and one.state == FAULTY and one.host_id]


def _places(status: JobStatus) -> list[tuple[str, str]]:
    """Host and devices of all that the job has found bad."""
    return [
        *((slot.host_id, slot.device) for slot in _dropped(status)),
        *((one.host_id, "") for one in _faulty(status)),
    ]


def _bad_hardware(status: JobStatus, bad: Sequence[DroppedSlot]) -> Iterator[tuple[str, str, str, bool]]:
    """Host, device (empty: the whole host) and reason of all slots that the job has found bad; no check of the host has
    found them."""
    slots = {node.node: node.slots + node.spare_slots for node in status.nodes}
    for one in bad:
        for device in filter(None, one.device.split(",")):
            yield one.host_id, device, one.why, False
        # A node that has moved may have left slots behind on another host.
        here = [other for other in bad if (other.node, other.host_id) == (one.node, one.host_id) and not other.device]
        if not one.device and one.host_id and len(here) == slots.get(one.node):
            yield one.host_id, "", one.why, False
