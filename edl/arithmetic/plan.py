"""Which places of an epoch's order each worker takes, step by step. Pure: places are numbers, what lies there is not
known here.

An epoch is a row of places ``0 … length - 1``, and its *position* is how many of them all workers together have
consumed. A step takes the next ``size`` of them, and cuts them into micro-batches; each is a run of neighbouring places
that is dealt out to the workers. So the position says all there is to know between two micro-batches, whatever the
number of workers was before or is afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PAD, DROP, EXACT = TAILS = ("pad", "drop", "exact")
"""What happens where the rest of an epoch does not come out even. ``pad``: places are taken again from the beginning of
the order. ``drop``: the last ones are left out. ``exact``: some workers get one less."""


def split(total: int, parts: int) -> tuple[int, ...]:
    """``total`` as so many numbers that differ by at most 1, the larger ones first."""
    least, more = divmod(total, parts)
    return (least + 1,) * more + (least,) * (parts - more)


def up(number: int, by: int) -> int:
    """``number / by``, rounded up."""
    return -(-number // by)


def tail_end(length: int, position: int, parts: int, tail: str) -> int:
    """Where the rest of an epoch ends when it is dealt out to so many: behind the last place, before it, or at it."""
    rest = max(0, length - position)
    if tail == EXACT:
        return position + rest
    return position + (rest // parts if tail == DROP else up(rest, parts)) * parts


def dealt(begin: int, end: int, part: int, parts: int, blocks: bool) -> range:
    """One part's places of ``begin … end - 1``: each so many-th, or a block of neighbours (``blocks``). The sizes of
    the parts are those of ``split``."""
    if not blocks:
        return range(begin + part, end, parts)
    least, more = divmod(end - begin, parts)
    first = begin + part * least + min(part, more)
    return range(first, first + least + (part < more))


def stream(length: int, position: int, part: int, parts: int, tail: str) -> range:
    """One worker's places of the rest of an epoch, without steps."""
    return range(position + part, tail_end(length, position, parts, tail), parts)


@dataclass(frozen=True, slots=True)
class Micro:
    """One micro-batch of one worker."""

    places: range
    """Where it lies in the order; places beyond the end begin again at 0. Never empty."""
    real: bool
    """Not a stand-in, which repeats what another worker has."""
    index: int
    """Its number in the step."""
    count: int
    """Micro-batches of the step, the same for all workers."""
    begin: int
    end: int
    """The step's places, of all workers together."""
    position: int
    """What the epoch's position is when all workers have taken it. Stays where it was in the middle of a step of
    logical ranks, which is consumed as a whole."""
    logical: int = -1
    """Logical rank that it belongs to; -1 where there are none, and for stand-ins in place of one."""

    @property
    def last(self) -> bool:
        """The step ends with it."""
        return self.index == self.count - 1


@dataclass(frozen=True, slots=True)
class Course:
    """How an epoch is consumed by one world."""

    length: int
    """Places of the epoch."""
    size: int
    """Places of a full step, over all workers."""
    most: int
    """Most places of a micro-batch."""
    world: int
    tail: str = PAD
    whole: bool = False
    """The last step is left out when it is smaller than the others."""
    logical: int = 0
    """Number of logical ranks; 0 for none. Their places depend on it, the position and ``size`` only."""
    blocks: bool = False
    """See ``dealt``."""

    @property
    def _parts(self) -> int:
        return self.logical or self.world

    def end(self, position: int) -> int:
        """Where the step ends that begins at this position; ``position`` itself if there is none."""
        if position + self.size <= self.length:
            return position + self.size
        if position >= self.length:
            return position
        end = min(position + self.size, tail_end(self.length, position, self._parts, self.tail))
        return position if self.whole and end < position + self.size else end

    def after(self, end: int) -> int:
        """The position after a step with this end: that of the epoch's end if nothing more comes."""
        return end if end < self.length and self.end(end) > end else self.length

    def micros(self, position: int, rank: int) -> Iterator[Micro]:
        """The rest of the epoch as one worker takes it."""
        while (end := self.end(position)) > position:
            yield from self.step(position, rank)
            position = self.after(end)

    def step(self, begin: int, rank: int) -> Iterator[Micro]:
        """One worker's micro-batches of the step that begins at this position."""
        end = self.end(begin)
        if end > begin:
            yield from (self._logical if self.logical else self._plain)(begin, end, self.after(end), rank)

    def count(self, position: int = 0) -> int:
        """Micro-batches that each worker takes of the rest of the epoch."""
        if position >= self.length:
            return 0
        full, rest = divmod(self.length - position, self.size)
        begin = position + full * self.size
        return full * self._micros(self.size) + (self._micros(self.end(begin) - begin) if rest else 0)

    def _micros(self, places: int) -> int:
        """Micro-batches of a step of so many places."""
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
        """One of the micro-batches of a logical rank."""
        places = dealt(begin, end, logical, self.logical, self.blocks)
        mine = dealt(0, len(places), piece, pieces, blocks=True)
        return places[mine.start : mine.stop]
