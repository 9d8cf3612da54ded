"""Replay of a lost trainer's last push: what each trainer writes down before a push, and how others continue.

A trainer that dies during a push may have changed some rows and not others. Before each push it writes down the records
of the push, and those used earlier that may not be in the Master's store yet. The worker that gets its shards reads
that: used records are skipped, and the last push is repeated with exactly the same records under its old number, by the
worker that holds the first of its shards. Pservers skip rows that already have it.
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
"""Shard, number of records used so far, whether that is all of it."""


@dataclass(frozen=True, slots=True)
class RecordRange:
    """A range of a shard's records, in the shard's order of the epoch."""

    ref: ShardRef
    begin: int
    upto: int
    complete: bool = False
    """True if the shard ends here."""


Batch = tuple[RecordRange, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """The push of a lost trainer that a batch replays, perhaps together with other batches."""

    trainer: int
    seq: int
    last: bool = True
    """True for the last batch of that push."""

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
    """By shard: number of records used, whether that is all of it."""
    batches: tuple[Batch, ...] = ()
    """The batches of its last push."""

    @property
    def home(self) -> int:
        """The shard whose holder repeats the last push."""
        return next((piece.ref.index for batch in self.batches for piece in batch), -1)

    def span(self, shard: int) -> tuple[int, int, bool] | None:
        """The records of a shard in the last push: start, end, whether that is the shard's end. None if there are
        none."""
        found = [piece for batch in self.batches for piece in batch if piece.ref.index == shard]
        return (found[0].begin, found[-1].upto, found[-1].complete) if found else None


@dataclass(slots=True)
class ReplayPlan:
    """The plan for newly leased shards that lost trainers may have held."""

    leases: list[Given] = field(default_factory=list)
    """Leases to continue reading."""
    acks: list[tuple[int, int, bool]] = field(default_factory=list)
    """Progress to report to the Master: already used."""
    redos: list[LostTrainer] = field(default_factory=list)
    """Pushes to replay, before ``leases``."""


def encode(dataset: str, epoch: int, done: Acks, batches: Iterable[Batch]) -> str:
    """Encode an intent. Each file and shard is listed once, because many batches consist of the same few shards and
    pservers limit the length."""
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
    fields = {"set": dataset, "epoch": epoch, "done": done, "files": list(files), "shards": rows, "batches": pieces}
    return json.dumps(fields, separators=(",", ":"))


def decode(text: str, dataset: str, epoch: int, trainer: int, seq: int) -> LostTrainer | None:
    """The inverse of ``encode``; None if it concerns another data set or epoch. Raises ``DataError``."""
    if not text:
        return None
    try:
        fields: dict[str, Any] = json.loads(text)
        if (fields["set"], fields["epoch"]) != (dataset, epoch):
            return None
        files = [str(file) for file in fields["files"]]
        refs = [
            ShardRef(int(index), _entry(files, file), int(begin), int(end), int(records), int(size))
            for index, file, begin, end, records, size in fields["shards"]
        ]
        batches = tuple(
            tuple(
                RecordRange(_entry(refs, ref), int(begin), int(upto), bool(complete))
                for ref, begin, upto, complete in one
            )
            for one in fields["batches"]
        )
        done = {int(shard): (int(upto), bool(complete)) for shard, upto, complete in fields["done"]}
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise DataError(f"data set {dataset}: cannot read the last intent of trainer {trainer}: {error!r}") from None
    return LostTrainer(trainer, seq, done, batches)


def _entry(entries: Sequence[_T], number: object) -> _T:
    """An entry by index. Raises ``ValueError`` for an invalid or negative index."""
    if type(number) is not int or not 0 <= number < len(entries):
        raise ValueError(f"it names entry {number!r} of {len(entries)}")
    return entries[number]


def plan(leases: Iterable[Given], ended: Sequence[LostTrainer]) -> ReplayPlan:
    """Plan how to continue with shards that lost trainers may have held."""
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
                # Progress inside the range means that some of its own acknowledgements arrived, so the push was
                # applied.
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
