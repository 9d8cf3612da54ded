"""The trainers of a job: their numbers, and which of them are members of the current epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from edl.master.service import Caller
from edl.types import NodeId
from edl.wire import json_messages
from edl.wire.records import World
from ps.protocol.messages import TrainerMember

REVOKED = 256
"""Number of lost trainers that stay listed as revoked for the pservers (more if more trainers were alive at once).
Pushes of older ones are no longer in flight."""


@dataclass(frozen=True, slots=True)
class TrainerEntry:
    """A process that has joined the job."""

    number: int
    node: str
    slot: int
    nonce: str
    incarnation: str = ""
    """Incarnation of its node when it joined."""
    begun: bool = False
    """True if it is a member of the epoch."""
    step: int = 0
    """The step with which it became a member."""

    @property
    def caller(self) -> Caller:
        """The address of its messages."""
        return Caller(NodeId(self.node), self.slot)

    @property
    def name(self) -> str:
        """Name for messages: ``node/slot``."""
        return f"{self.node}/{self.slot}"


@dataclass(frozen=True, slots=True)
class _MembershipRecord:
    numbers: int
    epoch: int
    trainers: tuple[TrainerEntry, ...]
    revoked: tuple[int, ...]


class Membership:
    """All live trainers. Numbers are never reused."""

    def __init__(self) -> None:
        self.trainers: dict[int, TrainerEntry] = {}
        self.numbers = 0
        self.epoch = 0
        self.revoked: tuple[int, ...] = ()
        self._named = REVOKED
        """Most trainers that stay listed as revoked."""
        self._at: dict[Caller, int] = {}
        self._members: tuple[int, tuple[TrainerMember, ...]] = (-1, ())
        """Cached members and their epoch."""

    def members(self) -> tuple[TrainerMember, ...]:
        """The members in order of number; the same object while the epoch does not change."""
        if self._members[0] != self.epoch:
            found = (TrainerMember(one.number, one.name, one.step) for one in self.trainers.values() if one.begun)
            self._members = self.epoch, tuple(sorted(found, key=lambda one: one.number))
        return self._members[1]

    def at(self, caller: Caller) -> TrainerEntry | None:
        """The trainer in a slot, if any."""
        return self.trainers.get(self._at.get(caller, 0))

    def join(self, caller: Caller, nonce: str, incarnation: str) -> tuple[TrainerEntry, TrainerEntry | None]:
        """Register the process in this slot; also returns the one that it replaces, if any."""
        old = self.at(caller)
        if old is not None and old.nonce == nonce:
            return old, None
        self.lose([old.number] if old is not None else [])
        self.numbers += 1
        trainer = TrainerEntry(self.numbers, str(caller.node), caller.slot, nonce, incarnation)
        self.trainers[trainer.number] = trainer
        self._named = max(self._named, len(self.trainers))
        self._at[caller] = trainer.number
        return trainer, old

    def begin(self, number: int, step: int) -> bool:
        """Make a trainer a member. Returns False if it already is."""
        trainer = self.trainers[number]
        if trainer.begun:
            return False
        self.trainers[number] = replace(trainer, begun=True, step=step)
        self.epoch += 1
        return True

    def leave(self, number: int) -> bool:
        """End a trainer's membership; it may begin again. Returns False if it is not a member."""
        trainer = self.trainers[number]
        if not trainer.begun:
            return False
        self.trainers[number] = replace(trainer, begun=False)
        self.epoch += 1
        return True

    def lose(self, numbers: Iterable[int]) -> list[TrainerEntry]:
        """Remove lost trainers; returns those that were known."""
        gone = [self.trainers.pop(number) for number in numbers if number in self.trainers]
        for one in gone:
            del self._at[one.caller]
        if any(one.begun for one in gone):
            self.epoch += 1
        self.revoked = (*self.revoked, *(one.number for one in gone))[-self._named :]
        return gone

    def follow(self, world: World) -> list[TrainerEntry]:
        """Remove the trainers whose slot is not in the new world; returns them."""
        return self.lose([one.number for one in self.trainers.values() if not has_place(world, one)])

    def encode(self) -> bytes:
        """Encode the persistent state."""
        kept = _MembershipRecord(self.numbers, self.epoch, tuple(self.trainers.values()), self.revoked)
        return json_messages.encode(kept)

    def decode(self, text: bytes) -> None:
        """Restore the state encoded by ``encode``."""
        kept = json_messages.decode(_MembershipRecord, text)
        self.numbers, self.epoch, self.revoked = kept.numbers, kept.epoch, kept.revoked
        self.trainers = {one.number: one for one in kept.trainers}
        self._named = max(REVOKED, len(kept.trainers), len(kept.revoked))
        self._at = {one.caller: one.number for one in kept.trainers}
        self._members = (-1, ())


def has_place(world: World, trainer: TrainerEntry) -> bool:
    """True if the slot is in the world and its node has not restarted since the trainer joined."""
    member = world.member(NodeId(trainer.node))
    if member is None or trainer.slot not in member.used:
        return False
    return not trainer.incarnation or trainer.incarnation == str(member.incarnation)
