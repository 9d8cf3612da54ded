"""Requests of operators, autoscalers and schedulers to the Master: the size of the job, and which nodes take part.

Each is one call (see ``edl.proto``). The Master answers ``Granted`` once the request is in the store; its effect is
shown in the status. The newest request wins. Switches (checkpoint, stop) are ``Asked`` in ``messages.py``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resize:
    """Train with this many nodes; with fewer until that many are available."""

    nodes: int
    by: str
    """Source of the request, for display: ``edl scale (user@host)``, ``statefulset/train``."""
    reason: str = ""
    revision: int = 0
    """Store revision at which the client read the size; stale if the size has changed since. 0: any."""
    key: str = ""
    """Idempotency key, chosen by the client: of several requests with one key only the first counts, and all get the
    same answer. Empty: none."""
    external: bool = False
    """Sent by the scheduler that owns the size. It is a fact, so it is clamped to the bounds instead of refused."""
    auto: bool = False
    """Ignore ``nodes``: the autoscale policy decides from now on."""


@dataclass(frozen=True, slots=True)
class SetBounds:
    """From now on, allow the job ``minimum`` to ``maximum`` nodes."""

    minimum: int
    maximum: int
    by: str
    reason: str = ""
    revision: int = 0


class DrainMode(enum.Enum):
    """Whether a drain writes a checkpoint."""

    MUST = "must"
    """The nodes stay until a checkpoint with their state is complete; refused if none can be written."""
    TRY = "try"
    """A checkpoint is written if there is a checkpoint directory and enough time."""
    NO = "no"
    """No checkpoint is written. Copies in the memory of other nodes are not affected."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Make nodes leave the job gracefully; their launchers exit."""

    nodes: tuple[str, ...]
    by: str
    reason: str = ""
    deadline_s: float = 0.0
    """Seconds until the nodes must be gone; 0: ``--shutdown-timeout`` applies."""
    mode: DrainMode = DrainMode.TRY


@dataclass(frozen=True, slots=True)
class Cordon:
    """Cordon or uncordon a node or one of its slots. Its launcher keeps running."""

    node: str
    cordoned: bool
    by: str
    reason: str = ""
    device: str = ""
    """Only this slot: its number, or the UUID of its device. Empty: the whole node."""


@dataclass(frozen=True, slots=True)
class Suspend:
    """Commit, end the workers and wait; or resume from there. Launchers keep running."""

    suspended: bool
    by: str
    reason: str = ""


ScaleRequest = Resize | SetBounds | Drain | Cordon | Suspend


class Verdict(enum.Enum):
    """The Master's decision about a request."""

    ACCEPTED = "accepted"
    """The request is in the store, so the next Master knows it too."""
    KNOWN = "known"
    """The request is already fulfilled or pending; nothing has changed."""
    STALE = "stale"
    """The client's revision is not the newest. Read the size again, then repeat the request."""
    REFUSED = "refused"
    """The request is not allowed. Repeating it does not help."""
    UNKNOWN = "unknown"
    """No node of that name is known."""


@dataclass(frozen=True, slots=True)
class Granted:
    """Answer of the Master to a ``ScaleRequest``."""

    verdict: Verdict
    text: str
    """For display; if refused, the reason and what to do."""
    revision: int = 0
    """Store revision at which the size was last changed."""
    generation: int = 0
    """Number of requests of all kinds accepted over the life of the job."""

    @property
    def ok(self) -> bool:
        """Whether the request is or will be fulfilled."""
        return self.verdict in (Verdict.ACCEPTED, Verdict.KNOWN)


@dataclass(frozen=True, slots=True)
class ScaleView:
    """The part of ``JobStatus`` about the job's size."""

    minimum: int = 0
    maximum: int = 0
    unit: int = 1
    desired: int = 0
    """Desired number of nodes, within the bounds; ``maximum`` until fewer are requested."""
    nodes: int = 0
    """Nodes in the running world; 0: none runs."""
    revision: int = 0
    """Store revision of the last change of the size."""
    generation: int = 0
    observed: int = 0
    """Generation to which the running world (or its absence) conforms, as far as the available nodes allow."""
    by: str = ""
    reason: str = ""
    """Reason of the newest change."""
    suspended: bool = False
    cordoned: tuple[str, ...] = ()
    owner: str = ""
    """The scheduler, and which side decides the size: ``statefulset/train (external)``; empty: no scheduler."""
    waiting: str = ""
    """Why the world does not have the desired size yet: missing nodes, a cool-down; empty: it has."""
    need_s: float = 0.0
    """Estimated seconds for an orderly departure: one step plus two checkpoints; 0: not measured yet."""
    proposal: int = 0
    """Size proposed by the autoscale policy; 0: none, or no policy."""
    proposal_reason: str = ""
    asked: int = 0
    """Nodes of the newest ``Resize``; 0: no size was requested."""

    @property
    def requested(self) -> int:
        """The requested number of nodes, within the bounds; 0: none was requested, any size within them is fine."""
        return self.desired if self.asked else 0


NO_SCALE = ScaleView()
