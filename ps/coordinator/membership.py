"""The trainers: who has which number, and who counts in the membership epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from edl.master.service import Caller
from edl.types import NodeId
from edl.wire import json_messages
from edl.wire.messages import World
from ps.protocol.messages import Member

REVOKED = 256
"""So many trainers that are gone are named to pservers, or as many as there were at a time: no push of an older one is
under way any more, or has to be made again."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """A process that has joined."""

    number: int
    node: str
    slot: int
    nonce: str
    incarnation: str = ""
    """Of its node, when it joined."""
    begun: bool = False
    """It counts in the epoch."""
    step: int = 0
    """With which it began to."""

    @property
    def caller(self) -> Caller:
        """Where words reach it."""
        return Caller(NodeId(self.node), self.slot)

    @property
    def name(self) -> str:
        """``node/slot``."""
        return f"{self.node}/{self.slot}"


@dataclass(frozen=True, slots=True)
class _Kept:
    numbers: int
    epoch: int
    trainers: tuple[Trainer, ...]
    revoked: tuple[int, ...]


class Membership:
    """All trainers that live. Numbers are never used again."""

    def __init__(self) -> None:
        self.trainers: dict[int, Trainer] = {}
        self.numbers = 0
        self.epoch = 0
        self.revoked: tuple[int, ...] = ()
        self._named = REVOKED
        """So many are revoked at most."""
        self._at: dict[Caller, int] = {}
        self._members: tuple[int, tuple[Member, ...]] = (-1, ())
        """Of which epoch, and who."""

    def members(self) -> tuple[Member, ...]:
        """Those that count, by their numbers; the same object as long as the epoch is the same."""
        if self._members[0] != self.epoch:
            found = (Member(one.number, one.name, one.step) for one in self.trainers.values() if one.begun)
            self._members = self.epoch, tuple(sorted(found, key=lambda one: one.number))
        return self._members[1]

    def at(self, caller: Caller) -> Trainer | None:
        """Who sits in a slot."""
        return self.trainers.get(self._at.get(caller, 0))

    def join(self, caller: Caller, nonce: str, incarnation: str) -> tuple[Trainer, Trainer | None]:
        """The process in this slot, and the one whose place it takes, if that is another."""
        old = self.at(caller)
        if old is not None and old.nonce == nonce:
            return old, None
        self.lose([old.number] if old is not None else [])
        self.numbers += 1
        trainer = Trainer(self.numbers, str(caller.node), caller.slot, nonce, incarnation)
        self.trainers[trainer.number] = trainer
        self._named = max(self._named, len(self.trainers))
        self._at[caller] = trainer.number
        return trainer, old

    def begin(self, number: int, step: int) -> bool:
        """Count it from now on. False: it did."""
        trainer = self.trainers[number]
        if trainer.begun:
            return False
        self.trainers[number] = replace(trainer, begun=True, step=step)
        self.epoch += 1
        return True

    def leave(self, number: int) -> bool:
        """Count it no more; it may begin again. False: it did not."""
        trainer = self.trainers[number]
        if not trainer.begun:
            return False
        self.trainers[number] = replace(trainer, begun=False)
        self.epoch += 1
        return True

    def lose(self, numbers: Iterable[int]) -> list[Trainer]:
        """These processes are gone; returns those that were there."""
        gone = [self.trainers.pop(number) for number in numbers if number in self.trainers]
        for one in gone:
            del self._at[one.caller]
        if any(one.begun for one in gone):
            self.epoch += 1
        self.revoked = (*self.revoked, *(one.number for one in gone))[-self._named :]
        return gone

    def follow(self, world: World) -> list[Trainer]:
        """A world has begun: those whose place is not in it are gone; the others train on."""
        return self.lose([one.number for one in self.trainers.values() if not has_place(world, one)])

    def encode(self) -> bytes:
        """What is kept."""
        kept = _Kept(self.numbers, self.epoch, tuple(self.trainers.values()), self.revoked)
        return json_messages.encode(kept)

    def decode(self, text: bytes) -> None:
        """Take up what was kept."""
        kept = json_messages.decode(_Kept, text)
        self.numbers, self.epoch, self.revoked = kept.numbers, kept.epoch, kept.revoked
        self.trainers = {one.number: one for one in kept.trainers}
        self._named = max(REVOKED, len(kept.trainers), len(kept.revoked))
        self._at = {one.caller: one.number for one in kept.trainers}
        self._members = (-1, ())


def has_place(world: World, trainer: Trainer) -> bool:
    """The slot is in the world, and its node has not begun anew since the trainer joined."""
    member = world.member(NodeId(trainer.node))
    if member is None or trainer.slot not in member.used:
        return False
    return not trainer.incarnation or trainer.incarnation == str(member.incarnation)
