"""Bugs planted in parameter servers: in the machines, and in the shells around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from ps.coordinator.checkpoints import CheckpointCoordinator
from ps.coordinator.membership import Membership, TrainerEntry
from ps.coordinator.placement import Grid
from ps.protocol.messages import NO_PSERVER
from ps.server import replicate_out
from ps.server.bucket_machine import BucketMachine
from ps.server.bucket_shell import BucketShell
from ps.server.handlers import RequestHandlers
from ps.server.replicate_out import ReplicationStream
from ps.store.store import RowStore

Patch = pytest.MonkeyPatch
Bug = Callable[[Patch], None]


def fences_nobody(patch: Patch) -> None:
    """A follower takes pieces from whoever sends them."""
    patch.setattr(BucketMachine, "refuses", lambda self, sender, version, buckets: [])


def acknowledges_alone(patch: Patch) -> None:
    """Copies that are in step are not waited for."""
    plan = BucketMachine._plan
    patch.setattr(BucketMachine, "_plan", lambda self, bucket: (plan(self, bucket)[0], ()))


def believes_broken_copies(patch: Patch) -> None:
    """A pserver does not notice that a follower has lost step."""
    patch.setattr(BucketMachine, "_lose", lambda self, todo, number, buckets: None)


def tells_nobody(patch: Patch) -> None:
    """A copy that has lost step is not told of: pushes wait for it for ever."""
    patch.setattr(BucketMachine, "_say_broken", lambda self: [])


def goes_on_with_old_copies(patch: Patch) -> None:
    """A copy that was broken off and ordered again is taken for the one before."""

    def copy(self: BucketMachine, todo: Any, bucket: int, number: int) -> None:
        follower = self._follower(number)
        if not follower.fed(bucket) and follower.up:
            follower.begun[bucket] = self._since[bucket]
            todo.copy.setdefault(number, []).append(bucket)
            follower.copying[bucket] = self._numbers + 1
            todo.touched.add(bucket)

    patch.setattr(BucketMachine, "_copy", copy)


def drops_what_came_early(patch: Patch) -> None:
    """An image that comes before its orders goes with older ones (ours, found by these histories)."""
    refuses = BucketMachine.refuses

    def forgets(self: BucketMachine, sender: int, version: int, buckets: Iterable[int]) -> list[int]:
        refused = refuses(self, sender, version, buckets)
        self._beyond.clear()
        return refused

    patch.setattr(BucketMachine, "refuses", forgets)


def forgets_early_releases(patch: Patch) -> None:
    """A release that comes before its orders is lost (ours)."""

    def released(self: BucketMachine, todo: Any, giver: int, version: int, buckets: tuple[int, ...]) -> None:
        for bucket in buckets:
            if version <= self.version and self._giver[bucket] == giver and version >= self._since[bucket]:
                self._take(todo, [bucket])

    patch.setattr(BucketMachine, "_released", released)


def believes_old_words(patch: Patch) -> None:
    """What a pserver said under older orders counts for newer ones."""
    patch.setattr(Grid, "_current", lambda self, buckets, version: iter(list(buckets)))


def promotes_any_copy(patch: Patch) -> None:
    """A copy that is being made takes over when the owner dies."""
    bury = Grid.bury

    def promotes(self: Grid, number: int) -> list[int]:
        for bucket in range(self.buckets):
            owner, backup, joining, giver = self.roles(bucket)
            if owner == number and not backup and joining not in (NO_PSERVER, number):
                self.put(bucket, owner, joining, NO_PSERVER, giver)
        return bury(self, number)

    patch.setattr(Grid, "bury", promotes)


def waits_for_the_dead(patch: Patch) -> None:
    """A trainer whose place another process has taken counts on."""

    def join(self: Membership, caller: Any, nonce: str, incarnation: str) -> tuple[TrainerEntry, None]:
        for one in self.trainers.values():
            if one.caller == caller and one.nonce == nonce:
                return one, None
        self.numbers += 1
        trainer = TrainerEntry(self.numbers, str(caller.node), caller.slot, nonce, incarnation)
        self.trainers = {trainer.number: trainer, **self.trainers}
        return trainer, None

    patch.setattr(Membership, "join", join)
    patch.setattr(Membership, "lose", lambda self, numbers: [])


def moves_while_it_marks(patch: Patch) -> None:
    """Buckets change hands while rows are marked."""
    patch.setattr(CheckpointCoordinator, "freezes", property(lambda self: False))


def marks_without_trainers(patch: Patch) -> None:
    """Rows are marked while trainers push."""
    settle = CheckpointCoordinator.settle

    def hasty(self: CheckpointCoordinator, turn: Any) -> None:
        settle(self, turn)
        if self.phase == "halt":
            self._servers = frozenset(self._state.servers)
            self._enter(turn, "mark", turn.now_s + 4.0)

    patch.setattr(CheckpointCoordinator, "settle", hasty)


def copies_rows_only(patch: Patch) -> None:
    """An image has the rows, and not what has been applied to them."""
    take = RowStore.take_image
    patch.setattr(RowStore, "take_image", lambda self, image: take(self, replace(image, seqs={})))


# --- in the shells ---------------------------------------------------------------------------------------------------


def acknowledges_early(patch: Patch) -> None:
    """A push is acknowledged before the replica has it."""
    patch.setattr(RequestHandlers, "_await_copies", lambda self, done, buckets, asked: None)


def dies_unheard(patch: Patch) -> None:
    """A stream's thread ends with an exception that nothing reads."""

    def lost(self: BucketShell, follower: int, why: str) -> None:
        raise KeyError(follower)

    patch.setattr(BucketShell, "lost", lost)
    patch.setattr(ReplicationStream, "_run", ReplicationStream._keep)


def retries_at_once(patch: Patch) -> None:
    """A stream is opened again without a pause."""
    patch.setattr(replicate_out, "_LONGEST_PAUSE_S", 0.0)
