"""Messages of the health check: what the Master asks of agents, what they find, and what the status shows."""

from __future__ import annotations

from dataclasses import dataclass

from edl.types import NodeId


@dataclass(frozen=True, slots=True)
class HealthPeer:
    """A node with which another one exchanges data during a check."""

    node: NodeId
    host: str
    port: int
    """Port on which its probe listens."""


@dataclass(frozen=True, slots=True)
class CheckHealth:
    """Order to an agent: probe this node. A newer order replaces an older one; the same order again is answered
    again."""

    number: int
    """Number of the check."""
    stage: int
    """1 or 2: the second one repeats the probe of suspects, with other peers."""
    port: int
    """Port on which this node's probe listens."""
    peers: tuple[HealthPeer, ...]
    """Nodes to exchange data with; empty: only the matrix product is computed."""
    size: int
    """Rows of the matrices."""
    timeout_s: float
    """Seconds that the probe may take."""
    reason: str


@dataclass(frozen=True, slots=True)
class LinkFinding:
    """Result of the exchange with one peer."""

    node: NodeId
    error: str = ""
    """Empty: all bytes arrived as they were sent, in both directions."""
    latency_s: float = 0.0
    """Median round trip of one byte."""
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SlotFinding:
    """What is wrong with the device in one slot."""

    slot: int
    error: str


@dataclass(frozen=True, slots=True)
class HealthChecked:
    """An agent's answer to ``CheckHealth``."""

    number: int
    stage: int
    kind: str = ""
    """Kind of device and library, such as ``NVIDIA H200, torch``: speeds are compared within a kind."""
    product_s: float = 0.0
    """Seconds of one matrix product on the slowest device; 0: not measured."""
    error: str = ""
    """What is wrong with the node as a whole; empty: nothing."""
    slots: tuple[SlotFinding, ...] = ()
    """Slots with a defective device, if others are sound."""
    links: tuple[LinkFinding, ...] = ()
    remarks: tuple[str, ...] = ()
    """What is worth knowing and no reason to keep the node out."""


@dataclass(frozen=True, slots=True)
class HealthView:
    """A node's health as ``edl status`` shows it."""

    node: str
    host: str
    state: str
    """``good``, ``slow``, ``faulty``, ``checking`` or ``due``."""
    why: str
    excluded: bool
    age_s: float = 0.0
    """Seconds since the verdict, as far as the Master knows."""
    expires_s: float = 0.0
    """Seconds until the verdict expires; 0: never, or there is no verdict."""
    devices: tuple[str, ...] = ()
    host_id: str = ""
    """See ``NodeInfo``."""
