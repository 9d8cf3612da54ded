"""The places of an epoch's order that each worker takes, step by step. Pure: only places (numbers) are known here, not
the samples.

An epoch is a sequence of places ``0 … length - 1``. Its *position* is the number of places that all workers together
have consumed. A step takes the next ``size`` places and splits them into micro-batches; each micro-batch is a run of
neighbouring places that is dealt out to the workers. Between two micro-batches the position is therefore the whole
state, and the number of workers may change there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PAD, DROP, EXACT = TAILS = ("pad", "drop", "exact")
"""How the end of an epoch is handled if it does not divide evenly. ``pad``: places from the beginning of the order are
repeated. ``drop``: the last places are skipped. ``exact``: some workers get one place less."""


def split(total: int, parts: int) -> tuple[int, ...]:
    """Split ``total`` into ``parts`` numbers that differ by at most 1, the larger ones first."""
    least, more = divmod(total, parts)
    return (least + 1,) * more + (least,) * (parts - more)


def up(number: int, by: int) -> int:
    """``number / by``, rounded up."""
    return -(-number // by)


def tail_end(length: int, position: int, parts: int, tail: str) -> int:
    """The end of the rest of an epoch when dealt out to ``parts`` workers: after the last place (``pad``), before it
    (``drop``), or at it (``exact``)."""
    rest = max(0, length - position)
    if tail == EXACT:
        return position + rest
    return position + (rest // parts if tail == DROP else up(rest, parts)) * parts


def dealt(begin: int, end: int, part: int, parts: int, blocks: bool) -> range:
    """One part's places out of ``begin … end - 1``: every ``parts``-th place, or a contiguous block (``blocks``). The
    sizes of the parts are those of ``split``."""
    if not blocks:
        return range(begin + part, end, parts)
    least, more = divmod(end - begin, parts)
    first = begin + part * least + min(part, more)
    return range(first, first + least + (part < more))


def stream(length: int, position: int, part: int, parts: int, tail: str) -> range:
    """One worker's places in the rest of an epoch that is not divided into steps."""
    return range(position + part, tail_end(length, position, parts, tail), parts)


@dataclass(frozen=True, slots=True)
class Micro:
    """One micro-batch of one worker."""

    places: range
    """Its places in the order; places beyond the end wrap around to 0. Never empty."""
    real: bool
    """False for padding, which repeats what another worker has."""
    index: int
    """Index within the step, from 0."""
    count: int
    """Micro-batches in the step, the same for all workers."""
    begin: int
    end: int
    """The step's places over all workers: ``begin … end - 1``."""
    position: int
    """The epoch's position once all workers have taken this micro-batch. With logical ranks it does not move within a
    step, since such a step is consumed as a whole."""
    logical: int = -1
    """Its logical rank; -1 without logical ranks, and for padding in place of one."""

    @property
    def last(self) -> bool:
        """Whether it is the last micro-batch of the step."""
        return self.index == self.count - 1


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """How one world consumes an epoch."""

    length: int
    """Number of places in the epoch."""
    size: int
    """Number of places in a full step, over all workers."""
    most: int
    """Maximum number of places in one worker's micro-batch."""
    world: int
    tail: str = PAD
    whole: bool = False
    """Skip the last step if it is smaller than the others."""
    logical: int = 0
    """Number of logical ranks, 0 for none. Their places depend only on this number, the position and ``size``."""
    blocks: bool = False
    """Deal contiguous blocks instead of every n-th place; see ``dealt``."""

    @property
    def _parts(self) -> int:
        return self.logical or self.world

    def end(self, position: int) -> int:
        """The end of the step that begins at ``position``; ``position`` itself if there is no such step."""
        if position + self.size <= self.length:
            return position + self.size
        if position >= self.length:
            return position
        end = min(position + self.size, tail_end(self.length, position, self._parts, self.tail))
        return position if self.whole and end < position + self.size else end

    def after(self, end: int) -> int:
        """The position after a step that ends at ``end``: the epoch's length if no further step follows."""
        return end if end < self.length and self.end(end) > end else self.length

    def micros(self, position: int, rank: int) -> Iterator[Micro]:
        """One worker's micro-batches in the rest of the epoch."""
        while (end := self.end(position)) > position:
            yield from self.step(position, rank)
            position = self.after(end)

    def step(self, begin: int, rank: int) -> Iterator[Micro]:
        """One worker's micro-batches of the step that begins at ``begin``."""
        end = self.end(begin)
        if end > begin:
            yield from (self._logical if self.logical else self._plain)(begin, end, self.after(end), rank)

    def count(self, position: int = 0) -> int:
        """The number of micro-batches that each worker takes in the rest of the epoch."""
        if position >= self.length:
            return 0
        full, rest = divmod(self.length - position, self.size)
        begin = position + full * self.size
        return full * self._micros(self.size) + (self._micros(self.end(begin) - begin) if rest else 0)

    def _micros(self, places: int) -> int:
        """The number of micro-batches in a step of ``places`` places."""
        each = up(up(places, self._parts), self.most)
        return each * up(self.logical, self.world) if self.logical else each

    def _plain(self, begin: int, end: int, after: int, rank: int) -> Iterator[Micro]:
        count = self._micros(end - begin)
        least, more = divmod(end - begin, self.world)
        first = begin
        for index, (larger, smaller) in enumerate(zip(split(least + 1, count), split(least, count), strict=True)):
            last = first + larger * more + smaller * (self.world - more)
            mine = dealt(first, last, rank, self.world, self.blocks)
            shown = mine or dealt(first, last, 0, self.world, self.blocks)
            position = after if index == count - 1 else min(last, self.length)
            yield Micro(shown, bool(mine), index, count, begin, end, position)
            first = last

    def _logical(self, begin: int, end: int, after: int, rank: int) -> Iterator[Micro]:
        count = self._micros(end - begin)
        each = up(up(end - begin, self.logical), self.most)
        hosted = split(self.logical, self.world)
        first = sum(hosted[:rank])
        for index in range(count):
            one, micro = divmod(index, each)
            real = one < hosted[rank]
            places = self._piece(begin, end, first + one, each, micro) if real else range(0)
            shown = places or self._piece(begin, end, 0, each, micro)
            position = after if index == count - 1 else begin
            yield Micro(shown, bool(places), index, count, begin, end, position, first + one if real else -1)

    def _piece(self, begin: int, end: int, logical: int, pieces: int, piece: int) -> range:
        """One micro-batch of a logical rank."""
        places = dealt(begin, end, logical, self.logical, self.blocks)
        mine = dealt(0, len(places), piece, pieces, blocks=True)
        return places[mine.start : mine.stop]
