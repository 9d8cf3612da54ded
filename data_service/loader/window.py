"""What all ranks hand out in their next steps: each says what it has ready, and all come to the same plan. Pure.

A rank's offer is exchanged with all others every few steps. From the offers every rank knows, for each coming step,
how many samples each rank contributes and which records are then consumed by all ranks together, and so the whole
position at each commit, without asking anybody.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass

from edl.errors import DataError, SettingError


class Tail(enum.Enum):
    """What ranks do that have nothing while others still have."""

    PAD = "pad"
    """They repeat samples that they had, which count like all others."""
    DROP = "drop"
    """The epoch ends for all, and what the others have left is not trained on."""
    JOIN = "join"
    """They take part with padding that does not count."""


class Supply(enum.Enum):
    """What a rank may still get beyond what it has ready."""

    MORE = "more"
    DRY = "dry"
    """Nothing right now; other ranks hold what may come back."""
    FINISHED = "finished"
    """The Master says: every shard of the epoch is done, or given up."""


@dataclass(frozen=True, slots=True)
class ShardProgress:
    """Records of a shard, in the shard's own order, up to here."""

    shard: int
    upto: int
    complete: bool
    """The shard ends here."""


@dataclass(frozen=True, slots=True)
class StepOffer:
    """One step of one rank, decoded and ready."""

    samples: int
    taken: tuple[ShardProgress, ...]
    """How far each shard it takes from is consumed after it."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank says."""

    ready: tuple[StepOffer, ...]
    supply: Supply
    spare: int = 0
    """Samples of the step that it would repeat; 0 if it has had none."""
    micros: int = 1
    """Micro-batches of each of its steps."""
    pattern: str = ""
    """Where a record can be found, for a rank that has never had one and needs something of the right form."""
    version: int = 0
    """Segments of the list of files that it knows this epoch to consist of; all that it has ready is from those."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of all ranks."""

    samples: tuple[int, ...]
    """What each rank contributes."""
    own: tuple[bool, ...]
    """Whether it is something new, and not a repetition or padding, by rank."""
    taken: tuple[ShardProgress, ...]
    """By all ranks, in the order of the ranks."""


@dataclass(frozen=True, slots=True)
class Window:
    """The next steps, the same on all ranks."""

    steps: tuple[PlannedStep, ...]
    over: bool
    """The epoch ends after them."""
    pattern: str = ""
    version: int = 0
    """Segments of the list of files that the epoch consists of from these steps on, as far as any rank knows."""


def tail_named(name: str) -> Tail:
    """The rule of this name. Raises ``SettingError``."""
    try:
        return Tail(name)
    except ValueError:
        raise SettingError("tail", name, f"must be one of {', '.join(one.value for one in Tail)}") from None


def plan(offers: Sequence[Offer], tail: Tail) -> Window:
    """The steps that follow from what all ranks offer, in the order of the ranks.

    As many as the ranks have that have any. No steps and not over: nobody has anything right now. Raises ``DataError``
    when the ranks split their steps differently.
    """
    micros = {offer.micros for offer in offers}
    if len(micros) > 1:
        raise DataError(f"the workers cut their steps into different numbers of micro-batches: {sorted(micros)}")
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
    """Compact JSON: supply, spare, micro-batches, pattern, version, then each step as one list of whole numbers."""
    steps = [
        [ready.samples, *(number for one in ready.taken for number in (one.shard, 2 * one.upto + one.complete))]
        for ready in offer.ready
    ]
    fields = [offer.supply.value, offer.spare, offer.micros, offer.pattern, offer.version, steps]
    return json.dumps(fields, separators=(",", ":")).encode()


def decode(data: bytes) -> Offer:
    """The inverse. Raises ``DataError`` for anything else."""
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
            f"another worker offered {data[:80]!r}…, which is no offer of data: do all workers run the same loop?"
        ) from error
