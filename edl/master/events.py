"""Events and effects of the Master's machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from edl import machine
from edl.machine import Tick as Tick
from edl.machine import WakeAt as WakeAt
from edl.master.state import MasterState
from edl.types import Incarnation, NodeId
from edl.wire.alarm import Alarm
from edl.wire.denylist import DenylistEntry
from edl.wire.messages import AgentMessage, Asked, Attach, MasterMessage
from edl.wire.records import NodeInfo
from edl.wire.scale_requests import ScaleRequest, Verdict
from edl.wire.status import Kind as Kind

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeRegistered:
    """A node's leased key appeared in the store."""

    info: NodeInfo


@dataclass(frozen=True, slots=True)
class NodeExpired:
    """A node's key is gone because its lease ended, which proves its death."""

    node: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """The node's host refuses connections on the agent's port: the agent is dead, though its lease still lives."""

    node: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class NodeAttached:
    """An agent opened its stream."""

    attach: Attach


@dataclass(frozen=True, slots=True)
class NodeDetached:
    """An agent's stream broke, which does not prove its death."""

    node: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class NodeSaid:
    """An attached agent sent a message."""

    node: NodeId
    incarnation: Incarnation
    message: AgentMessage


@dataclass(frozen=True, slots=True)
class OperatorRequest:
    """A request from the command line or the HTTP API, not through a node."""

    asked: Asked


@dataclass(frozen=True, slots=True)
class ScaleRequested:
    """A request for another size, or for other nodes to take part."""

    request: ScaleRequest
    held: int = 0
    """Store revision of the current size; the shell fills it in."""
    saves: bool = True
    """There is a checkpoint directory, as far as the shell knows."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """A check found a slot of a node unfit for training; it is dropped as if it had failed too often."""

    node: NodeId
    incarnation: Incarnation
    slot: int
    why: str


@dataclass(frozen=True, slots=True)
class Flawed:
    """A service has something to report at the end of the job; an empty text withdraws it."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A service cannot continue, and so neither can the job."""

    text: str


@dataclass(frozen=True, slots=True)
class JobAlarms:
    """The watchdogs of the whole job have other alarms now; these are all of them."""

    alarms: tuple[Alarm, ...]


@dataclass(frozen=True, slots=True)
class DenylistChanged:
    """Other entries of the denylist count now; these are all of them, without those of this run of the job."""

    entries: tuple[DenylistEntry, ...]


Event = (
    NodeRegistered
    | NodeExpired
    | NodeRefused
    | NodeAttached
    | NodeDetached
    | NodeSaid
    | OperatorRequest
    | ScaleRequested
    | Unfit
    | Flawed
    | Failed
    | JobAlarms
    | DenylistChanged
    | Tick
)

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TellNode:
    """Send a message to one incarnation of a node."""

    node: NodeId
    incarnation: Incarnation
    message: MasterMessage


@dataclass(frozen=True, slots=True)
class Probe:
    """Probe the agent's address; a refused connection is reported as ``NodeRefused``."""

    info: NodeInfo


@dataclass(frozen=True, slots=True)
class Revoke:
    """Revoke the lease of a dead incarnation, so that its key does not linger."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Grant:
    """Answer the request that this step handled."""

    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True)
class HistoryNote:
    """A line for the job's history, which numbers it (``HistoryEntry``). Stored in one transaction with the record."""

    kind: Kind
    text: str
    node: str = ""
    severity: str = ""
    """See ``HistoryEntry``."""
    round: int = field(default=0, compare=False)
    """The last round when it was noted, which several events of one step may leave behind; 0: that of the record."""


@dataclass(frozen=True, slots=True)
class Conclude:
    """The job has ended and all reachable nodes have been notified; the Master may exit."""


Effect = TellNode | Probe | Revoke | WakeAt | Grant | HistoryNote | Conclude


Decision = machine.Decision[MasterState, Effect]
