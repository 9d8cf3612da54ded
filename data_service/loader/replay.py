"""What a trainer's last push was made of, told ahead of it, and who trains on it again when the trainer is gone.

A trainer that dies in mid-push may have changed some rows with its last batches and others not. Before each push it
says what the push is made of, and what it had used before that the Master may not have in the store. Whoever is given
its shards reads that: used records are skipped; the last push is made once more of the very same records, under its old
number, by the worker that has the first of its shards. Pservers leave out the rows that have it already.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from data_service.manifest import ShardRef
from data_service.protocol.messages import Given
from edl.errors import DataError

_T = TypeVar("_T")
Acks = tuple[tuple[int, int, bool], ...]
"""Shard, count of its records used so far, whether that is all of it."""


@dataclass(frozen=True, slots=True)
class RecordRange:
    """A range of a shard's records, in the shard's order of the epoch."""

    ref: ShardRef
    begin: int
    upto: int
    complete: bool = False
    """The shard ends here."""


Batch = tuple[RecordRange, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """The push of a lost trainer that a batch replays, perhaps together with other batches."""

    trainer: int
    seq: int
    last: bool = True
    """It is the last batch of that push."""

    @property
    def push(self) -> tuple[int, int]:
        """The push's identity at the pservers."""
        return self.trainer, self.seq


@dataclass(frozen=True, slots=True)
class LostTrainer:
    """The last intent of a lost trainer, for one data set and epoch: what it used, what its last push was made of."""

    trainer: int
    seq: int
    done: Mapping[int, tuple[int, bool]] = field(default_factory=dict)
    """By shard: records used, whether that is all of it."""
    batches: tuple[Batch, ...] = ()
    """Of its last push."""

    @property
    def home(self) -> int:
        """The shard whose holder makes the last push once more."""
        return next((piece.ref.index for batch in self.batches for piece in batch), -1)

    def span(self, shard: int) -> tuple[int, int, bool] | None:
        """The records of a shard in the last push: first, end, whether that is the shard's end."""
        found = [piece for batch in self.batches for piece in batch if piece.ref.index == shard]
        return (found[0].begin, found[-1].upto, found[-1].complete) if found else None


@dataclass(slots=True)
class ReplayPlan:
    """What to do with newly leased shards that lost trainers may have held."""

    leases: list[Given] = field(default_factory=list)
    """To be read on."""
    acks: list[tuple[int, int, bool]] = field(default_factory=list)
    """Used already: to be told to the Master."""
    redos: list[LostTrainer] = field(default_factory=list)
    """To be trained on once more, before ``leases``."""


def encode(dataset: str, epoch: int, done: Acks, batches: Iterable[Batch]) -> str:
    """The text of what a trainer says. Each file and each shard is named once: many batches are made of the same few
    shards, and pservers take no text of any length."""
    files: dict[str, int] = {}
    shards: dict[ShardRef, int] = {}
    pieces = [
        [[shards.setdefault(one.ref, len(shards)), one.begin, one.upto, int(one.complete)] for one in batch]
        for batch in batches
    ]
    rows = [
        [one.index, files.setdefault(one.file, len(files)), one.begin, one.end, one.records, one.size_bytes]
        for one in shards
    ]
    said = {"set": dataset, "epoch": epoch, "done": done, "files": list(files), "shards": rows, "batches": pieces}
    return json.dumps(said, separators=(",", ":"))


def decode(text: str, dataset: str, epoch: int, trainer: int, seq: int) -> LostTrainer | None:
    """The inverse; None if it is about something else. Raises ``DataError``."""
    if not text:
        return None
    try:
        said: dict[str, Any] = json.loads(text)
        if (said["set"], said["epoch"]) != (dataset, epoch):
            return None
        files = [str(file) for file in said["files"]]
        refs = [
            ShardRef(int(index), _entry(files, file), int(begin), int(end), int(records), int(size))
            for index, file, begin, end, records, size in said["shards"]
        ]
        batches = tuple(
            tuple(
                RecordRange(_entry(refs, ref), int(begin), int(upto), bool(complete))
                for ref, begin, upto, complete in one
            )
            for one in said["batches"]
        )
        done = {int(shard): (int(upto), bool(complete)) for shard, upto, complete in said["done"]}
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise DataError(f"data set {dataset}: the last intent of trainer {trainer} cannot be read: {error!r}") from None
    return LostTrainer(trainer, seq, done, batches)


def _entry(entries: Sequence[_T], number: object) -> _T:
    """Raises ``ValueError`` for what is no index, and for one that would count from the end."""
    if type(number) is not int or not 0 <= number < len(entries):
        raise ValueError(f"it names entry {number!r} of {len(entries)}")
    return entries[number]


def plan(leases: Iterable[Given], ended: Sequence[LostTrainer]) -> ReplayPlan:
    """Plan where to go on in shards that lost trainers may have held."""
    found = ReplayPlan()
    for given in leases:
        shard, upto, complete = given.shard.index, given.upto, False
        for one in ended:
            done = one.done.get(shard, (0, False))
            if done > (upto, complete):
                upto, complete = done
        again = []
        for one in sorted((one for one in ended if one.span(shard)), key=lambda one: one.span(shard) or ()):
            begin, end, last = one.span(shard) or (0, 0, False)
            if begin <= upto < end:
                # A count in its midst is of its own acknowledgements, of which some came through: it has been applied.
                if one.home == shard and begin == upto:
                    again.append(one)
                upto, complete = end, last
        found.redos += again
        if upto > given.upto or complete:
            if not again:
                found.acks.append((shard, upto, complete))
            elif again[0].span(shard) and (skipped := (again[0].span(shard) or (0,))[0]) > given.upto:
                found.acks.append((shard, skipped, False))
        if not complete:
            found.leases.append(Given(given.shard, upto))
    return found
