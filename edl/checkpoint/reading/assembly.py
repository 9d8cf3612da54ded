"""Merges the saved states of all workers into one structure that refers to arrays in their files. Pure.

A worker's part of a sharded tensor is saved as a dict ``{"edl_local": array, "shape": [...], "offset": [...]}``: the
array, the shape of the whole tensor, and where the array lies in it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edl.errors import CheckpointError
from edl.wire.snapshot import ELEMENT_BYTES, Entry
from edl.worker import tree

LOCAL, SHAPE, OFFSET = "edl_local", "shape", "offset"
NAMES = "edl_names"
"""In an optimizer's state: its parameters' names, by the numbers that ``state_dict()`` gives them."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array in the file of one worker."""

    shard: int
    name: str
    entry: Entry
    numpy: bool = False
    """It was a NumPy array."""


@dataclass(frozen=True, slots=True)
class Whole:
    """An array that is not sharded: each worker has saved one under this name."""

    copies: tuple[StoredArray, ...]

    @property
    def entry(self) -> Entry:
        """Its dtype and shape."""
        return self.copies[0].entry


@dataclass(frozen=True, slots=True)
class Box:
    """A box-shaped part of a tensor: offset and length in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """The intersection of two boxes; None if it is empty."""
        starts = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        ends = [min(a + n, b + m) for a, n, b, m in zip(*self._edges, *other._edges, strict=True)]
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(tuple(starts), shape) if all(length > 0 for length in shape) else None

    @property
    def _edges(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.offset, self.shape


@dataclass(frozen=True, slots=True)
class Spread:
    """A tensor that is divided into pieces."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[Box, StoredArray], ...]

    @property
    def box(self) -> Box:
        """The box of the whole tensor."""
        return Box((0,) * len(self.shape), self.shape)

    def covering(self, wanted: Box, distance: Callable[[int], int] = lambda shard: 0) -> list[tuple[Box, StoredArray]]:
        """The pieces that cover this box, each element once. Of several copies of a piece that of the shard at the
        smallest ``distance`` is taken. Raises ``Missing`` if some elements are in none of them."""
        found: dict[Box, StoredArray] = {}
        held = 0
        for box, stored in self.pieces:
            known = found.get(box)
            if known is not None:
                if distance(stored.shard) < distance(known.shard):
                    found[box] = stored
            elif (met := box.meet(wanted)) is not None:
                found[box] = stored
                held += met.volume
        if _overlap(list(found)):
            raise CheckpointError(f"damaged: pieces of {self.name} overlap")
        if held != wanted.volume:
            raise Missing(f"no worker has saved all of {self.name} at offset {wanted.offset} of shape {wanted.shape}")
        return list(found.items())


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether any two of these non-empty boxes overlap. A sweep along the dimension with the most distinct offsets:
    each box is compared only with those that have not ended there yet. These are few, and none when hundreds of workers
    have saved a slice each."""
    dims = range(len(boxes[0].offset)) if boxes else range(0)
    if len(boxes) < 2 or not dims:
        return len(boxes) > 1
    dim = max(dims, key=lambda one: len({box.offset[one] for box in boxes}))
    reaching: list[Box] = []
    for box in sorted(boxes, key=lambda one: one.offset[dim]):
        begin = box.offset[dim]
        reaching = [one for one in reaching if one.offset[dim] + one.shape[dim] > begin]
        if any(one.meet(box) is not None for one in reaching):
            return True
        reaching.append(box)
    return False


class Missing(CheckpointError):
    """A part of a tensor is in none of the files that were searched."""


def merged(parts: Sequence[Any], *, union: bool, where: str = "") -> Any:
    """Merge the workers' versions of one saved object. The first worker's version counts, except that pieces of sharded
    tensors come from all. ``union``: also take dict entries that it lacks from the others, such as layers of other
    pipeline stages. Arrays become ``Whole`` and ``Spread``. Raises ``CheckpointError``."""
    first = parts[0]
    if is_tensor_part(first):
        return _spread([part for part in parts if is_tensor_part(part)], where)
    if isinstance(first, StoredArray):
        return Whole(tuple(part for part in parts if isinstance(part, StoredArray)))
    if isinstance(first, dict):
        dicts = [part for part in parts if isinstance(part, dict) and not is_tensor_part(part)]
        keys = dict.fromkeys(key for part in (dicts if union else dicts[:1]) for key in part)
        found = (
            (key, merged([part[key] for part in dicts if key in part], union=union, where=f"{where}.{key}"))
            for key in keys
        )
        return tree.like_dict(first, found)
    if isinstance(first, (list, tuple, deque)):
        alike = [part for part in parts if type(part) is type(first) and len(part) == len(first)]
        entries = enumerate(zip(*alike, strict=True))
        return tree.like_list(first, [merged(one, union=union, where=f"{where}.{index}") for index, one in entries])
    return first


def is_tensor_part(value: object) -> bool:
    """Whether this is a worker's part of a sharded tensor."""
    return isinstance(value, Mapping) and LOCAL in value


def holds_tensor_parts(value: object) -> bool:
    """Whether it contains a part of a sharded tensor."""
    if isinstance(value, Mapping):
        return is_tensor_part(value) or any(holds_tensor_parts(part) for part in value.values())
    return isinstance(value, (list, tuple, deque)) and any(holds_tensor_parts(part) for part in value)


def _spread(parts: Sequence[Any], where: str) -> Spread:
    name = where[1:]
    pieces = [(*_place(part, name), part[LOCAL]) for part in parts]
    kinds = dict.fromkeys((stored.entry.dtype, shape) for _, shape, stored in pieces)
    (dtype, shape), *others = kinds
    if others:
        raise CheckpointError(
            f"{name} is {dtype} of shape {shape} for one worker and {others[0][0]} of shape {others[0][1]} for another"
            ": this state can only be read by a world of the size that wrote it"
        )
    return Spread(name, dtype, shape, tuple((box, stored) for box, _, stored in pieces))


def _place(part: Any, name: str) -> tuple[Box, tuple[int, ...]]:
    """The box of a piece, and the shape of the whole tensor. Raises ``CheckpointError``."""
    stored, shape, offset = part[LOCAL], part.get(SHAPE), part.get(OFFSET)
    lists = isinstance(stored, StoredArray) and isinstance(shape, list) and isinstance(offset, list)
    if lists and len(shape) == len(offset) == len(stored.entry.shape):
        edges = list(zip(offset, stored.entry.shape, shape, strict=True))
        if all(type(at) is type(whole) is int and at >= 0 and at + part <= whole for at, part, whole in edges):
            return Box(tuple(offset), stored.entry.shape), tuple(shape)
    raise CheckpointError(f"damaged: a piece of {name} at offset {offset} does not fit into shape {shape}")


def runs(outer: Box, inner: Box, whole: Box) -> Iterator[tuple[int, int]]:
    """The elements of ``inner`` in the row-major order of ``outer``: start and length of contiguous runs. No run is
    longer than one of ``whole``, so two boxes that share ``inner`` give runs of the same lengths."""
    dims = len(outer.shape)
    # Innermost dimensions that are complete in both boxes make the runs longer.
    at = dims
    while at > 0 and inner.shape[at - 1] == outer.shape[at - 1] == whole.shape[at - 1]:
        at -= 1
    row = max(at - 1, 0)  # the first dimension that may be divided is still one run
    strides = [math.prod(outer.shape[d + 1 :]) for d in range(dims)]
    length = math.prod(inner.shape[row:]) if dims else 1
    starts = [a - b for a, b in zip(inner.offset, outer.offset, strict=True)]
    base = sum(start * stride for start, stride in zip(starts[row:], strides[row:], strict=True))
    index = [0] * row
    while True:
        yield base + sum((starts[d] + index[d]) * strides[d] for d in range(row)), length
        for d in range(row - 1, -1, -1):
            index[d] += 1
            if index[d] < inner.shape[d]:
                break
            index[d] = 0
        else:
            return


def width(dtype: str) -> int:
    """Bytes per element of a safetensors type."""
    return ELEMENT_BYTES[dtype]
