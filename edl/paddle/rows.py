"""How parameters are cut into rows for the ranks, and how rows of several are joined for one collective. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edl.checkpoint.reading.assembly import Box


def cut(shape: Sequence[int], rank: int, size: int) -> Box | None:
    """The rows of a tensor that belong to a rank; None if it has none.

    The first dimension of length ``n`` is cut as ``torch.chunk`` does: into parts of ``ceil(n / size)``, the last of
    which may be shorter or missing. A scalar belongs to rank 0.
    """
    if not shape:
        return Box((), ()) if rank == 0 else None
    most = -(-shape[0] // size)
    begin = min(most * rank, shape[0])
    count = min(most, shape[0] - begin)
    if not count or not math.prod(shape):
        return None
    return Box((begin, *(0 for _ in shape[1:])), (count, *shape[1:]))


def counts(shape: Sequence[int], size: int) -> tuple[int, ...]:
    """Number of elements of each rank."""
    boxes = (cut(shape, rank, size) for rank in range(size))
    return tuple(box.volume if box is not None else 0 for box in boxes)


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of one array, and their place among the joined ones."""

    rank: int
    """Rank that they belong to."""
    number: int
    """Of the array."""
    there: slice
    """In the flat array."""
    here: slice
    """Among the joined elements."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Flat arrays joined so that the rows of each rank are contiguous."""

    counts: tuple[tuple[int, ...], ...]
    """For each array, the number of elements of each rank."""

    @property
    def parts(self) -> list[int]:
        """The number of elements of each rank, of all arrays together."""
        return [sum(one) for one in zip(*self.counts, strict=True)]

    def runs(self) -> Iterator[Run]:
        """All elements, in the order in which they are joined."""
        begins = [0] * len(self.counts)
        at = 0
        for rank in range(len(self.counts[0])):
            for number, one in enumerate(self.counts):
                count, begin = one[rank], begins[number]
                if count:
                    yield Run(rank, number, slice(begin, begin + count), slice(at, at + count))
                begins[number] += count
                at += count
