"""Agreement of all ranks on their next steps: each offers what it has ready, and all compute the same plan. Pure.

Offers are exchanged every few steps. From them every rank knows how many samples each rank contributes to each of the
next steps, and which records are then consumed by all ranks together. So it knows the whole position at each commit
without further communication.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass

from edl.errors import DataError, SettingError


class Tail(enum.Enum):
    """The behaviour of ranks that have run out of data while others have some."""

    PAD = "pad"
    """They repeat samples, which count like all others."""
    DROP = "drop"
    """The epoch ends for all; remaining data of the others are skipped."""
    JOIN = "join"
    """They take part with padding that does not count."""


class Supply(enum.Enum):
    """Whether a rank may get more data, beyond the steps that it has ready."""

    MORE = "more"
    DRY = "dry"
    """Nothing at present; shards held by other ranks may be returned."""
    FINISHED = "finished"
    """Every shard of the epoch is done or quarantined, according to the Master."""


@dataclass(frozen=True, slots=True)
class ShardProgress:
    """Progress in a shard, in the shard's own order."""

    shard: int
    upto: int
    complete: bool
    """True if the shard ends here."""


@dataclass(frozen=True, slots=True)
class StepOffer:
    """One prepared step of one rank."""

    samples: int
    taken: tuple[ShardProgress, ...]
    """Progress of each of its shards after the step."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The offer of one rank."""

    ready: tuple[StepOffer, ...]
    supply: Supply
    spare: int = 0
    """Samples that it could repeat as padding; 0 before its first step."""
    micros: int = 1
    """Micro-batches per step."""
    pattern: str = ""
    """Location of a record, as a template for a rank that has never had one."""
    version: int = 0
    """Number of segments of the epoch's file list, as known to this rank; all that it has ready is from these."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of all ranks."""

    samples: tuple[int, ...]
    """Samples by rank."""
    own: tuple[bool, ...]
    """By rank: True for new records, False for a repetition or padding."""
    taken: tuple[ShardProgress, ...]
    """Progress of the shards of all ranks, in order of rank."""


@dataclass(frozen=True, slots=True)
class Window:
    """The next steps, the same on all ranks."""

    steps: tuple[PlannedStep, ...]
    over: bool
    """True if the epoch ends after these steps."""
    pattern: str = ""
    version: int = 0
    """Number of segments of the epoch's file list from these steps on, as known to any rank."""


def tail_named(name: str) -> Tail:
    """The rule with this name. Raises ``SettingError``."""
    try:
        return Tail(name)
    except ValueError:
        raise SettingError("tail", name, f"must be one of {', '.join(one.value for one in Tail)}") from None


def plan(offers: Sequence[Offer], tail: Tail) -> Window:
    """Plan steps from the offers of all ranks, given in order of rank.

    The number of steps is that of the rank with the fewest, not counting ranks with none. No steps and not ``over``: no
    rank has anything at present. Raises ``DataError`` if the ranks use different numbers of micro-batches.
    """
    micros = {offer.micros for offer in offers}
    if len(micros) > 1:
        raise DataError(f"the workers use different numbers of micro-batches per step: {sorted(micros)}")
    pattern = next((offer.pattern for offer in offers if offer.pattern), "")
    version = max(offer.version for offer in offers)
    lengths = [len(offer.ready) for offer in offers if offer.ready]
    if not lengths:
        finished = any(offer.supply is Supply.FINISHED for offer in offers)
        dropped = tail is Tail.DROP and all(offer.supply is not Supply.MORE for offer in offers)
        return Window((), finished or dropped, pattern, version)
    if tail is Tail.DROP and len(lengths) < len(offers):
        return Window((), True, pattern, version)
    return Window(tuple(_step(offers, index, tail) for index in range(min(lengths))), False, pattern, version)


def _step(offers: Sequence[Offer], index: int, tail: Tail) -> PlannedStep:
    own = tuple(bool(offer.ready) for offer in offers)
    samples = tuple(
        offer.ready[index].samples if offer.ready else offer.spare if tail is Tail.PAD else 0 for offer in offers
    )
    taken = tuple(segment for offer in offers if offer.ready for segment in offer.ready[index].taken)
    return PlannedStep(samples, own, taken)


def encode(offer: Offer) -> bytes:
    """Encode as compact JSON: supply, spare, micro-batches, pattern, version, then each step as a list of integers."""
    steps = [
        [ready.samples, *(number for one in ready.taken for number in (one.shard, 2 * one.upto + one.complete))]
        for ready in offer.ready
    ]
    fields = [offer.supply.value, offer.spare, offer.micros, offer.pattern, offer.version, steps]
    return json.dumps(fields, separators=(",", ":")).encode()


def decode(data: bytes) -> Offer:
    """The inverse of ``encode``. Raises ``DataError``."""
    try:
        supply, spare, micros, pattern, version, steps = json.loads(data)
        ready = tuple(
            StepOffer(
                int(numbers[0]),
                tuple(
                    ShardProgress(int(shard), int(coded) // 2, bool(int(coded) % 2))
                    for shard, coded in zip(numbers[1::2], numbers[2::2], strict=True)
                ),
            )
            for numbers in steps
        )
        return Offer(ready, Supply(supply), int(spare), int(micros), str(pattern), int(version))
    except (ValueError, TypeError, IndexError) as error:
        raise DataError(
            f"another worker sent {data[:80]!r}…, which is not an offer of data. Do all workers run the same loop?"
        ) from error
