"""What people, autoscalers and schedulers ask of a Master: the size of the job, and who takes part in it.

Each is one call (see ``edl.proto``) that the Master answers with ``Granted`` once the wish is in the store: what comes
of it is seen in the status. The newest wish wins. Switches (a checkpoint, the end) are ``Asked`` in ``messages.py``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resize:
    """Have so many nodes train, as soon as there are so many; fewer of them until then."""

    nodes: int
    by: str
    """Who asks, in words: ``edl scale (user@host)``, ``statefulset/train``."""
    reason: str = ""
    revision: int = 0
    """Store revision at which the asker has seen the size; refused as stale when it has changed since. 0: any."""
    key: str = ""
    """Chosen by the asker: of several wishes with one key only the first counts (the answer is the same). Empty: none.
    """
    external: bool = False
    """Said by the scheduler that owns the size: it is a fact, not a wish, so it is brought within the bounds instead of
    being refused."""
    auto: bool = False
    """No size of its own (``nodes`` does not count): the autoscale policy decides from now on."""


@dataclass(frozen=True, slots=True)
class SetBounds:
    """Let the job have from ``minimum`` to ``maximum`` nodes from now on."""

    minimum: int
    maximum: int
    by: str
    reason: str = ""
    revision: int = 0


class DrainMode(enum.Enum):
    """What a drain does about the state."""

    MUST = "must"
    """The nodes stay until a checkpoint that has their state is complete; refused where none can be written."""
    TRY = "try"
    """A checkpoint is written if there is time and a directory."""
    NO = "no"
    """No checkpoint is written for it. What other nodes have in memory goes on as ever."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Have nodes leave in good order; their launchers end."""

    nodes: tuple[str, ...]
    by: str
    reason: str = ""
    deadline_s: float = 0.0
    """Seconds from now until which they have to be gone; 0: as long as ``--shutdown-timeout``."""
    care: DrainMode = DrainMode.TRY


@dataclass(frozen=True, slots=True)
class Cordon:
    """Have a node, or one slot of it, take no part, or let it take part again. Its launcher stays."""

    node: str
    cordoned: bool
    by: str
    reason: str = ""
    device: str = ""
    """Only this slot: its number, or the UUID of what is in it. Empty: the whole node."""


@dataclass(frozen=True, slots=True)
class Suspend:
    """Commit, end the workers and wait; or go on from there. Launchers stay."""

    suspended: bool
    by: str
    reason: str = ""


ScaleRequest = Resize | SetBounds | Drain | Cordon | Suspend


class Verdict(enum.Enum):
    """What becomes of a wish."""

    ACCEPTED = "accepted"
    """It is in the store, and the next Master knows it as well."""
    KNOWN = "known"
    """It holds already; nothing has changed."""
    STALE = "stale"
    """The asker's revision is not the newest. Read again, and ask again."""
    REFUSED = "refused"
    """Outside the rules. Asking again does not help."""
    UNKNOWN = "unknown"
    """There is no such node."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The answer."""

    verdict: Verdict
    text: str
    """In words; where it is refused, why, and what to do."""
    revision: int = 0
    """Store revision at which the size was last changed."""
    generation: int = 0
    """Counts the wishes of every kind that were accepted over the life of the job."""

    @property
    def ok(self) -> bool:
        """Whether what was asked for holds or will."""
        return self.verdict in (Verdict.ACCEPTED, Verdict.KNOWN)


@dataclass(frozen=True, slots=True)
class ScaleView:
    """The size in ``JobStatus``."""

    minimum: int = 0
    maximum: int = 0
    unit: int = 1
    desired: int = 0
    """Nodes that are wanted, within the bounds; ``maximum`` as long as nobody has asked for less."""
    nodes: int = 0
    """Nodes in the running world; 0 while none runs."""
    revision: int = 0
    """See ``Granted``."""
    generation: int = 0
    observed: int = 0
    """Generation that the running world (or its absence) conforms to, as far as the nodes that are there allow."""
    by: str = ""
    reason: str = ""
    """Of the newest change."""
    suspended: bool = False
    cordoned: tuple[str, ...] = ()
    owner: str = ""
    """Which scheduler, and who of the two decides: ``statefulset/train (external)``; empty: there is none."""
    waiting: str = ""
    """What stands between the wish and the world: nodes that have not come, a cool-down; empty: nothing."""
    need_s: float = 0.0
    """Measured time for leaving in good order: a step and twice a checkpoint; 0: nothing has been measured yet."""
    proposal: int = 0
    """Size that the autoscale policy proposes; 0: none, or there is no policy."""
    proposal_reason: str = ""
    asked: int = 0
    """Nodes of the newest ``Resize``; 0: nobody has asked for a size."""


NO_SCALE = ScaleView()
