"""The state of the placement machine and the effects of one turn. Mutable; persisted in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from edl.job_records import Replication, Training
from edl.master.service import AddToHistory, Caller, Effect, TellWorker, WakeAt
from ps.coordinator.membership import Membership
from ps.coordinator.placement import Grid, Site
from ps.protocol import messages
from ps.spec import TableSpec

PLACEMENT, SERVERS, PEOPLE, TABLES, CHECKPOINT, LR = "placement", "servers", "trainers", "tables", "checkpoint", "lr"
"""Names of the persisted pieces."""


@dataclass(frozen=True, slots=True)
class CoordinatorLimits:
    """Timeouts and concurrency limits."""

    grace_s: float = 1.0
    """Seconds that the first placement waits for more pservers than the minimum."""
    recover_s: float = 600.0
    """Seconds without enough pservers after which the job fails."""
    silent_s: float = 2.0
    """Seconds after which an unreachable pserver is considered dead, if that loses no data. A connection counts as down
    when nothing was answered for the length of a lease."""
    returns_s: float = 5.0
    """Seconds to wait for the key of a pserver without which rows are lost. Its launcher renews its lease three times
    in the length of one, and writes the key again if it finds the lease ended and the process alive."""
    halt_s: float = 60.0
    """Seconds within which all trainers must reach a step boundary for a checkpoint, or it is abandoned."""
    mark_s: float = 30.0
    write_s: float = 3600.0
    motion: tuple[int, int] = (128, 2048)
    """Least and most buckets in motion per pserver. In between, as many as ``motion_bytes`` allows, by the known row
    sizes."""
    motion_bytes: int = 64 << 20
    gather_s: float = 0.02
    """Seconds for which reports of synced and taken buckets are batched into one version."""
    find_s: float = 5.0
    """Seconds between a failed search for checkpoints and the next one."""
    heat_s: float = 10.0
    """Seconds between looks at hot buckets."""


PREFIX = "servers/"
"""Prefix of the keys under which pservers register, below the service's name."""


def label_of(key: str) -> str:
    """What people call the pserver with this key."""
    return key.removeprefix(PREFIX)


@dataclass(slots=True)
class Pserver:
    """A pserver that is alive as far as known."""

    number: int
    name: str
    """The name of its key."""
    host: str
    port: int
    path: str = ""
    machine: str = ""
    most_bytes: int = 0
    draining: bool = False
    confirmed: bool = False
    """It has carried out orders at least once, so from now on it is not empty."""
    greeted: bool = False
    """It is connected and has sent its Hello."""
    saves: bool = True
    """It has a checkpoint directory, as far as known."""
    load: messages.PserverLoad | None = None
    followed: int = 0

    @property
    def label(self) -> str:
        """As people call it."""
        return label_of(self.name)

    def public(self) -> messages.PserverAddress:
        """As it appears in placement maps."""
        return messages.PserverAddress(self.number, self.label, self.host, self.port, self.path, self.machine)


class PlacementTurn:
    """The effects of one event."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self.effects: list[Effect] = []
        self.changed: set[str] = set()
        """Pieces that have changed and require new orders."""
        self.kept: set[str] = set()
        """Pieces that must be persisted."""

    def send(self, caller: Caller, message: Any) -> None:
        """Send a message to a trainer."""
        self.effects.append(TellWorker(caller, messages.encode(message)))

    def note(self, text: str) -> None:
        """Add a line to the job's history."""
        self.effects.append(AddToHistory(text))

    def wake(self, at_s: float) -> None:
        """Request a tick at that time."""
        self.effects.append(WakeAt(at_s))

    def keep(self, piece: str) -> None:
        """Mark a piece for persistence only; pservers need not know."""
        self.kept.add(piece)

    def change(self, piece: str) -> None:
        """Mark a piece as changed: it is persisted, and new orders are sent."""
        self.changed.add(piece)


@dataclass(slots=True)
class PlacementState:
    """The complete state of the placement machine."""

    training: Training
    limits: CoordinatorLimits
    grid: Grid
    version: int = 0
    history: int = 1
    opened: bool = False
    """Whether trainers have been admitted: rows may differ from their initial values."""
    stage: str = "new"
    """``new``: no placement yet. ``finding``: a pserver looks for a checkpoint. ``placed``: all buckets have owners."""
    reason: str = ""
    """Why a checkpoint must be restored; empty at the start of the job."""
    unread: str = ""
    """Who cannot read the checkpoints, and why; empty if the search has not failed."""
    found: tuple[messages.FoundCheckpoint, ...] = ()
    """Candidates for a restore, best first; the first one is being, or has been, restored."""
    servers: dict[int, Pserver] = field(default_factory=dict)
    numbers: int = 0
    """The last number given to a pserver."""
    people: Membership = field(default_factory=Membership)
    tables: dict[str, TableSpec] = field(default_factory=dict)
    saved_lr: set[str] = field(default_factory=set)
    """Tables of a restored checkpoint that no trainer has defined yet: they still have the LR that was saved."""
    holds: list[messages.LrHold] = field(default_factory=list)
    """LR factors set by trainers, by ascending step; of several for one step the last applies."""
    world_holds: list[messages.LrHold] = field(default_factory=list)
    """LR factors of the world's settings, which are multiplied with the others; by ascending step."""
    world_factor: float = 1.0
    top_step: int = 0
    """The highest step reported so far."""

    def new_number(self) -> int:
        """A number for a pserver. It was not used before, or so long ago that nobody speaks of that pserver any
        more."""
        used = self.servers.keys() | self.grid.holders()
        self.numbers += 1
        while self.numbers in used or self.numbers > messages.MOST_NUMBER:
            self.numbers = self.numbers + 1 if self.numbers < messages.MOST_NUMBER else 1
        return self.numbers

    @property
    def lr(self) -> tuple[messages.LrHold, ...]:
        """The effective LR factors by step: both kinds multiplied."""
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
        """True if buckets have replicas."""
        return self.training.replication is not Replication.NONE

    @property
    def lagging(self) -> bool:
        """True if pushes are acknowledged before replicas have them."""
        return self.training.replication is Replication.ASYNC

    @property
    def whole(self) -> bool:
        """True if every bucket has an owner that serves it or is about to."""
        return self.stage == "placed" and messages.RESTORE not in self.grid.giver

    def sites(self) -> list[Site]:
        """The pservers as targets for buckets."""
        able = sorted(one.number for one in self.servers.values() if not one.draining)[: self.training.servers[1]]
        return [Site(one.number, one.machine or one.host, one.number in able) for one in self.servers.values()]

    def named(self, name: str) -> Pserver | None:
        """The live pserver with this key name."""
        return next((one for one in self.servers.values() if one.name == name), None)

    def members(self) -> tuple[messages.TrainerMember, ...]:
        """The trainers of the membership epoch."""
        return self.people.members()

    def motion(self) -> int:
        """Most buckets in motion per pserver."""
        loads = [one.load for one in self.servers.values() if one.load is not None]
        least, most = self.limits.motion
        total = sum(load.bytes for load in loads) / (2 if self.copies else 1)
        each = total / self.grid.buckets if loads else self.limits.motion_bytes / least
        return most if each * most <= self.limits.motion_bytes else max(least, int(self.limits.motion_bytes / each))

    def reach(self, step: int) -> None:
        """Note a reported step."""
        self.top_step = max(self.top_step, step)


def unwritten(tables: Iterable[TableSpec], servers: Iterable[Pserver]) -> str:
    """Why these pservers could not write what these tables evict, and what to do about it; empty if they can."""
    exporting = [one.name for one in tables if one.eviction.export and one.eviction.any]
    without = [one.label for one in servers if not one.saves]
    if not exporting or not without:
        return ""
    what = f"table{'s' if len(exporting) > 1 else ''} {listed(exporting)}"
    none = f"pserver{'s' if len(without) > 1 else ''} {listed(without)} {'have' if len(without) > 1 else 'has'} none"
    return (
        f"{what}: Eviction(export=True) writes evicted rows to the checkpoint directory, and {none}: they would be "
        "lost. Start every launcher of the job with --checkpoint-dir, or define the table with export=False"
    )


def listed(names: Iterable[str]) -> str:
    """Join names: ``a``, ``a and b``, ``a, b and c``."""
    items = list(names)
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 2 else items)
