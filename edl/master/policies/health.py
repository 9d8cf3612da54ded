"""Which nodes must be checked before they take part, and which are kept out. Pure: no clock, no I/O.

A verdict holds for one incarnation of a node, until it expires. A node without one is checked when it is new
(``--health-check=join``), when it is suspected (``failure``), or if its host had a node that was kept out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from edl.health.plan import Pairing
from edl.job_records import HealthMode, HealthRules
from edl.types import Incarnation, NodeId
from edl.wire.health import HealthChecked
from edl.wire.health_records import Fitness, HealthRecord, HealthSuspect, HealthVerdict
from edl.wire.records import NodeInfo

KEPT = 256
"""Most suspects, and most verdicts about nodes that are absent, that are kept; the newest ones."""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A check in progress. It is not recorded: the next Master begins another one."""

    number: int
    stage: int
    until_s: float
    """Time until which answers to this stage are waited for."""
    due: tuple[NodeId, ...]
    """Nodes for which a verdict is wanted; the others are witnesses."""
    incarnations: Mapping[NodeId, Incarnation]
    rounds: tuple[tuple[Pairing, Mapping[str, HealthChecked]], ...]
    """Who exchanges data with whom, and the answers so far; one entry for each stage."""


@dataclass(frozen=True, slots=True)
class HealthMemory:
    """What one Master knows about checks besides the record."""

    check: HealthCheck | None = None
    checked_s: float = float("-inf")
    """Time at which the last check ended."""
    due_since_s: float | None = None
    """Time since which nodes wait for a check while a world runs; None: none does."""
    verdict_s: Mapping[Incarnation, float] = field(default_factory=dict)
    """Times of verdicts, as far as this Master knows; older ones count from its take-over."""


NO_CHECKS = HealthMemory()


class KnownHealth:
    """A health record with indexes."""

    def __init__(self, record: HealthRecord) -> None:
        self.record = record
        self.empty = not (record.verdicts or record.suspects)
        """Whether nothing is known."""
        self._verdicts = {one.incarnation: one for one in record.verdicts}
        self._suspects = {one.node: one for one in record.suspects}
        self._hosts = {_host_of(one): one.why for one in record.suspects}
        self._bad = {text: one for one in record.verdicts if one.excluded for text in (one.node, _host_of(one))}

    def verdict(self, info: NodeInfo) -> HealthVerdict | None:
        """The verdict about this incarnation of a node; None: there is none that holds."""
        return self._verdicts.get(info.incarnation)

    def is_kept_out(self, info: NodeInfo) -> bool:
        """Whether this node must not be in any world."""
        found = self.verdict(info)
        return found is not None and found.excluded

    def why_due(self, info: NodeInfo, rules: HealthRules, *, member: bool) -> str:
        """Why a node must be checked before it is in the next world; empty: it need not be. ``member``: whether it is
        in the last world."""
        suspect = self._suspects.get(info.node)
        if suspect is not None:
            return suspect.why
        if rules.mode is HealthMode.OFF or member or self.verdict(info) is not None:
            return ""
        host = info.host_id or info.host
        if host in self._hosts:
            return self._hosts[host]
        bad = self._bad.get(info.node) or self._bad.get(host)
        if bad is not None:
            return f"{bad.node} on this host was kept out: {bad.why}"
        return "it is new" if rules.mode.on_join else ""


def with_suspect(record: HealthRecord, info: NodeInfo, why: str) -> HealthRecord:
    """The record after a node has become suspect: what was known about it no longer holds."""
    suspects = tuple(one for one in record.suspects if one.node != info.node)
    here = info.host_id or info.host
    return dataclasses.replace(
        record,
        verdicts=tuple(
            one for one in record.verdicts if one.node != info.node or (one.excluded and _host_of(one) != here)
        ),
        suspects=(*suspects, HealthSuspect(info.node, info.host, why, info.host_id))[-KEPT:],
    )


def with_verdicts(
    record: HealthRecord, found: Sequence[HealthVerdict], present: Mapping[NodeId, Incarnation]
) -> HealthRecord:
    """The record after a check. ``present``: the nodes that exist now.

    What is known of a host that is checked now is forgotten, unless its node is still there; what is known of a bad
    host is not, although its node's name is used on another host now."""
    judged, hosts = {one.node for one in found}, {_host_of(one) for one in found}

    def holds(one: HealthVerdict) -> bool:
        if present.get(one.node) == one.incarnation:
            return one.node not in judged
        return _host_of(one) not in hosts and (one.excluded or one.node not in judged)

    verdicts = (*(one for one in record.verdicts if holds(one)), *found)
    absent = [one for one in verdicts if present.get(one.node) != one.incarnation]
    outdated = absent[:-KEPT]
    return dataclasses.replace(
        record,
        verdicts=tuple(one for one in verdicts if one not in outdated) if outdated else verdicts,
        suspects=tuple(
            one
            for one in record.suspects
            if one.node not in judged and not (_host_of(one) in hosts and one.node not in present)
        ),
    )


def _host_of(one: HealthVerdict | HealthSuspect) -> str:
    """The host's own name, which stays when its address changes; its address if there is none."""
    return one.host_id or one.host


def without_expired(
    record: HealthRecord, expired: Collection[Incarnation], present: Mapping[NodeId, Incarnation]
) -> HealthRecord:
    """The record after verdicts have expired, which are named by the incarnations of their nodes: nodes that were kept
    out and are still there must be checked again."""
    gone = [one for one in record.verdicts if one.incarnation in expired]
    again = [one for one in gone if one.excluded and present.get(one.node) == one.incarnation]
    why = "the time for which it was kept out is over"
    suspects = (HealthSuspect(one.node, one.host, why, one.host_id) for one in again)
    return dataclasses.replace(
        record,
        verdicts=tuple(one for one in record.verdicts if one.incarnation not in expired),
        suspects=(*record.suspects, *suspects)[-KEPT:],
    )


def sound(info: NodeInfo, number: int, why: str = "") -> HealthVerdict:
    """The verdict about a node in which nothing was found that keeps it out. The devices are left out, because a job
    may have a thousand such nodes."""
    return HealthVerdict(info.node, info.host, info.incarnation, Fitness.GOOD, why, number=number, host_id=info.host_id)
