"""What the Master remembers about the health of nodes, and what the process of a probe is given."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from edl.types import Incarnation, NodeId
from edl.wire.health import CheckHealth


class Fitness(enum.Enum):
    """What a check has found about a node."""

    GOOD = "good"
    SLOW = "slow"
    FAULTY = "faulty"


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    """Result of the last check of a node."""

    node: NodeId
    host: str
    incarnation: Incarnation
    fitness: Fitness
    why: str
    """For people; empty: nothing remarkable."""
    excluded: bool = False
    """Whether the node is kept out of every world."""
    devices: tuple[str, ...] = ()
    """Device UUIDs of each slot, as in ``NodeInfo``."""
    number: int = 0
    """Number of the check."""
    host_id: str = ""
    """See ``NodeInfo``."""


@dataclass(frozen=True, slots=True)
class HealthSuspect:
    """A node that must be checked before it takes part again."""

    node: NodeId
    host: str
    why: str
    host_id: str = ""
    """See ``NodeInfo``."""


@dataclass(frozen=True, slots=True)
class HealthRecord:
    """What the next Master must know about health checks."""

    checks: int = 0
    """Number of checks that have begun."""
    verdicts: tuple[HealthVerdict, ...] = ()
    suspects: tuple[HealthSuspect, ...] = ()


NO_HEALTH = HealthRecord()


PROBE_VARIABLE = "EDL_PROBE_ORDER"
"""Environment variable of a probe's process with its ``ProbeOrder`` as JSON."""


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """Everything that the process of a probe needs. It answers with lines of JSON on stdout, each a ``HealthChecked``
    that replaces the one before: when its own part is done, before each exchange between devices, and at the end."""

    order: CheckHealth
    node: NodeId
    slots: int
    """Number of slots, spare ones included."""
    secret: str
    """By it the probes of a check recognise each other."""
    probes: tuple[str, ...] = ()
    """The user's own probes, as ``module:function``."""
