"""What the placement machine knows, and what one of its turns does. Changed in place, kept piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from edl.job_records import Replication, Training
from edl.master.service import Caller, Effect, Note, Tell, WakeAt
from ps.coordinator.membership import Membership
from ps.coordinator.placement import Grid, Site
from ps.protocol import messages
from ps.spec import TableSpec

CHART, SERVERS, PEOPLE, TABLES, CUT, LR = "chart", "servers", "trainers", "tables", "cut", "lr"
"""Names under which the pieces are kept."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long, and how much at once."""

    grace_s: float = 1.0
    """The first placement waits so long for more pservers than the least."""
    recover_s: float = 600.0
    """The job fails after so long without a pserver that can hold what is to be held."""
    silent_s: float = 2.0
    """A pserver to which the line is down for so long counts as dead, if nothing is lost with it. A line is down when
    there was no answer for the length of a lease."""
    halt_s: float = 60.0
    """For a checkpoint, trainers come to a boundary within this time, or it is given up."""
    mark_s: float = 30.0
    write_s: float = 3600.0
    motion: tuple[int, int] = (128, 2048)
    """Least and most buckets in motion on one pserver at once: as many as ``motion_bytes`` are worth, by what is known
    of the rows."""
    motion_bytes: int = 64 << 20
    gather_s: float = 0.02
    """What pservers say of copies that are made, and buckets that are taken, is gathered so long for one version."""
    heat_s: float = 10.0
    """Hot buckets are looked at so often."""


@dataclass(slots=True)
class Pserver:
    """One that lives, as far as is known."""

    number: int
    name: str
    """Of its key."""
    host: str
    port: int
    path: str = ""
    machine: str = ""
    most_bytes: int = 0
    draining: bool = False
    confirmed: bool = False
    """It has followed orders once: from then on it is not empty."""
    greeted: bool = False
    """Its line stands, and it has said who it is."""
    load: messages.Load | None = None
    followed: int = 0

    def public(self) -> messages.Server:
        """As charts have it."""
        return messages.Server(self.number, self.name, self.host, self.port, self.path, self.machine)


class Turn:
    """One event's effects."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self.effects: list[Effect] = []
        self.changed: set[str] = set()
        """Pieces that are different now; anything in here means new orders."""
        self.kept: set[str] = set()
        """Pieces that have to be kept."""

    def tell(self, caller: Caller, word: Any) -> None:
        """Say something to a trainer."""
        self.effects.append(Tell(caller, messages.encode(word)))

    def note(self, text: str) -> None:
        """A line of the job's history."""
        self.effects.append(Note(text))

    def wake(self, at_s: float) -> None:
        """Have a tick at that time."""
        self.effects.append(WakeAt(at_s))

    def keep(self, piece: str) -> None:
        """Something that pservers need not know has to be kept."""
        self.kept.add(piece)

    def change(self, piece: str) -> None:
        """Something that is kept, and that pservers have to know, is different now."""
        self.changed.add(piece)


@dataclass(slots=True)
class PlacementState:
    """All of it."""

    training: Training
    limits: Limits
    grid: Grid
    version: int = 0
    history: int = 1
    opened: bool = False
    """Trainers have been let in: rows are not what they began as."""
    stage: str = "new"
    """``new``: there are no pservers yet. ``finding``: one looks for a checkpoint. ``placed``: buckets have owners."""
    reason: str = ""
    """Why a checkpoint is needed; empty at the job's start."""
    found: tuple[messages.FoundCut, ...] = ()
    """Those that may be restored, the best first; the first is being, or has been, restored."""
    servers: dict[int, Pserver] = field(default_factory=dict)
    numbers: int = 0
    """The last one given to a pserver."""
    people: Membership = field(default_factory=Membership)
    tables: dict[str, TableSpec] = field(default_factory=dict)
    holds: list[messages.LrHold] = field(default_factory=list)
    """Factors of the LR that trainers have set, by rising step; of several for one step the last counts."""
    world_holds: list[messages.LrHold] = field(default_factory=list)
    """Those of the world's settings, which multiply them; by rising step."""
    world_factor: float = 1.0
    top_step: int = 0
    """The highest that anybody has told."""

    @property
    def lr(self) -> tuple[messages.LrHold, ...]:
        """What holds for tables, from which step on: both kinds of factors multiplied."""
        found: list[messages.LrHold] = []
        worlds = {hold.step for hold in self.world_holds}
        for step in sorted(worlds | {hold.step for hold in self.holds}):
            world = next((one.factor for one in reversed(self.world_holds) if one.step <= step), 1.0)
            before = [hold for hold in self.holds if hold.step <= step]
            names = {hold.table for hold in before if hold.step == step or step in worlds}
            for name in sorted(names | ({""} if step in worlds else set())):
                factor = next((one.factor for one in reversed(before) if one.table in ("", name)), 1.0)
                found.append(messages.LrHold(step, factor * world, name))
        return tuple(found)

    @property
    def copies(self) -> bool:
        """Whether buckets have copies."""
        return self.training.replication is not Replication.NONE

    @property
    def lagging(self) -> bool:
        """Whether pushes are acknowledged before copies have them."""
        return self.training.replication is Replication.ASYNC

    @property
    def whole(self) -> bool:
        """Every bucket has an owner who serves it, or is about to be released to one."""
        return self.stage == "placed" and messages.RESTORE not in self.grid.giver

    def sites(self) -> list[Site]:
        """Pservers as places for buckets."""
        able = sorted(one.number for one in self.servers.values() if not one.draining)[: self.training.servers[1]]
        return [Site(one.number, one.machine or one.host, one.number in able) for one in self.servers.values()]

    def named(self, name: str) -> Pserver | None:
        """The living pserver of this key."""
        return next((one for one in self.servers.values() if one.name == name), None)

    def members(self) -> tuple[messages.Member, ...]:
        """Trainers of the membership epoch."""
        return self.people.members()

    def motion(self) -> int:
        """Buckets that may be in motion on one pserver at once."""
        loads = [one.load for one in self.servers.values() if one.load is not None]
        least, most = self.limits.motion
        total = sum(load.bytes for load in loads) / (2 if self.copies else 1)
        each = total / self.grid.buckets if loads else self.limits.motion_bytes / least
        return most if each * most <= self.limits.motion_bytes else max(least, int(self.limits.motion_bytes / each))

    def reach(self, step: int) -> None:
        """Somebody has told this step."""
        self.top_step = max(self.top_step, step)


def listed(names: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    items = list(names)
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 2 else items)
