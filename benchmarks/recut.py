"""Bytes that a re-cut moves between nodes, against the least possible.

    python -m benchmarks.recut --pairs 3000

Pure: no process is started. Pairs of worlds are drawn at random, and edl's planner (``byte_ranges``) chooses what each
worker of the new world reads. The least is counted here element by element, in NumPy: what the workers of a node need
together, minus what the memory of that node holds.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import click
import numpy as np

from benchmarks.common import report
from edl.checkpoint.reading.assembly import Box, Spread, StoredArray
from edl.checkpoint.reading.saved_parts import ReadRequest, byte_ranges
from edl.wire.snapshot import Entry

WORKERS = 2
"""Of each node."""
SHAPES = {"column": (24, 18), "row": (18, 24), "norm": (30,)}
"""Tensors of a layer, by the way in which tensor parallelism cuts them; the sizes are uneven for most worlds."""
BYTES = 4
STATE = BYTES * sum(math.prod(shape) for shape in SHAPES.values())
WAY = (2, 4, 3, 1, 4)
Cuts = dict[str, tuple[tuple[int, int], ...]]
"""For each tensor, in order: a dimension of the mesh, and the dimension of the tensor that it cuts."""


@dataclass(frozen=True)
class Mesh:
    """Sizes of its dimensions, and how they cut the tensors."""

    sizes: tuple[int, ...]
    cuts: Cuts
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)

    def box(self, rank: int, tensor: str) -> Box:
        """The part of a tensor that a rank holds."""
        begin, end = [0] * len(self.shapes[tensor]), list(self.shapes[tensor])
        place = np.unravel_index(rank, self.sizes)
        for at, dim in self.cuts[tensor]:
            each = -(-(end[dim] - begin[dim]) // self.sizes[at])
            first = min(begin[dim] + int(place[at]) * each, end[dim])
            begin[dim], end[dim] = first, min(first + each, end[dim])
        return Box(tuple(begin), tuple(b - a for a, b in zip(begin, end, strict=True)))


def fsdp(nodes: int) -> Mesh:
    return Mesh((nodes * WORKERS,), dict.fromkeys(SHAPES, ((0, 0),)))


def hsdp_within(nodes: int) -> Mesh:
    """Each node is a replica."""
    return Mesh((nodes, WORKERS), dict.fromkeys(SHAPES, ((1, 0),)))


def hsdp_across(nodes: int) -> Mesh:
    """The workers of a node are replicas of one another."""
    return Mesh((nodes, WORKERS), dict.fromkeys(SHAPES, ((0, 0),)))


def tensor_parallel(nodes: int) -> Mesh:
    """Two workers of a node share each matrix, and FSDP2 cuts the halves: the tensor-parallel dimension cuts first."""
    cuts = {"column": ((1, 0), (0, 0)), "row": ((1, 1), (0, 0)), "norm": ((0, 0),)}
    return Mesh((nodes, WORKERS), cuts)


def by_columns(nodes: int) -> Mesh:
    """FSDP2 with a ``shard_placement_fn`` that divides the last dimension."""
    cuts: Cuts = {name: ((0, len(shape) - 1),) for name, shape in SHAPES.items()}
    return Mesh((nodes * WORKERS,), cuts)


LAYOUTS: dict[str, Callable[[int], Mesh]] = {
    "FSDP2": fsdp,
    "HSDP, a replica on each node": hsdp_within,
    "HSDP, the replicas of a shard on one node": hsdp_across,
    "tensor parallel 2 x FSDP2": tensor_parallel,
    "FSDP2 by columns": by_columns,
}


@dataclass(frozen=True)
class Change:
    """One change of the world. Nodes are named by numbers; ranks follow their order, ``WORKERS`` each."""

    old: tuple[int, ...]
    new: tuple[int, ...]

    @classmethod
    def draw(cls, rng: random.Random, most: int) -> Change:
        """Any nodes of the old world stay, at least one. The parts of the others can still be read."""
        old = tuple(range(rng.randint(1, most)))
        stay = tuple(sorted(rng.sample(old, rng.randint(1, len(old)))))
        size = rng.randint(1, most)
        new = stay[:size] + tuple(range(len(old), len(old) + max(0, size - len(stay))))
        return cls(old, new)


@dataclass
class Moved:
    """Bytes of one or more changes. ``read``: by the plan, from other nodes. ``each``: the least if every worker reads
    for itself. ``least``: if a node receives each element once."""

    read: int = 0
    each: int = 0
    least: int = 0
    changes: int = 0
    over: list[float] = field(default_factory=list)

    def add(self, read: int, each: int, least: int) -> None:
        self.read += read
        self.each += each
        self.least += least
        self.changes += 1
        if least:
            self.over.append(read / least)


def holders(nodes: Sequence[int], copies: bool) -> dict[int, set[int]]:
    """By node, the ranks whose parts are in its memory: of its workers, and with ``copies`` of the node before it."""
    found: dict[int, set[int]] = {}
    for place, node in enumerate(nodes):
        own = set(range(place * WORKERS, (place + 1) * WORKERS))
        before = (place - 1) % len(nodes)
        found[node] = own | (set(range(before * WORKERS, (before + 1) * WORKERS)) if copies else set())
    return found


def measure(layout: Callable[[int], Mesh], change: Change, copies: bool) -> tuple[int, int, int]:
    """Bytes of one change: read by the plan, least of each worker, least of each node."""
    old, new = layout(len(change.old)), layout(len(change.new))
    held = holders(change.old, copies)
    read = each = least = 0
    for name, shape in SHAPES.items():
        boxes = [old.box(rank, name) for rank in range(len(change.old) * WORKERS)]
        pieces = tuple((box, _stored(rank, box)) for rank, box in enumerate(boxes) if box.volume)
        spread = Spread(name, "F32", shape, pieces)
        for place, node in enumerate(change.new):
            here = held.get(node, set())
            has = _cells(shape, [boxes[rank] for rank in here])
            together = np.zeros(shape, dtype=bool)
            for rank in range(place * WORKERS, (place + 1) * WORKERS):
                box = new.box(rank, name)
                lacks = _cells(shape, [box]) & ~has
                each += int(lacks.sum()) * BYTES
                together |= lacks
                request, _ = ReadRequest.part_of(spread, box)
                ranges = byte_ranges(request, lambda shard: int(shard not in here))  # noqa: B023 - used at once
                read += sum(one.size for stored, one in ranges if stored.shard not in here)
            least += int(together.sum()) * BYTES
    return read, each, least


def least(old: Mesh, new: Mesh, held: Mapping[int, set[int]], after: Sequence[int]) -> int:
    """The fewest elements that nodes have to receive. ``held``: by node, the old ranks whose parts are in its memory;
    ``after``: the node of each new rank."""
    total = 0
    for name, shape in new.shapes.items():
        for node in sorted(set(after)):
            has = _cells(shape, [old.box(rank, name) for rank in held.get(node, ())])
            needs = _cells(shape, [new.box(rank, name) for rank, at in enumerate(after) if at == node])
            total += int((needs & ~has).sum())
    return total


def _stored(rank: int, box: Box) -> StoredArray:
    return StoredArray(rank, "x", Entry("F32", box.shape, 0, box.volume * BYTES))


def _cells(shape: tuple[int, ...], boxes: Sequence[Box]) -> np.ndarray:
    found = np.zeros(shape, dtype=bool)
    for box in boxes:
        found[tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))] = True
    return found


def along(way: Sequence[int]) -> list[Change]:
    """The changes between worlds of these numbers of nodes: the first nodes stay, newcomers have no state."""
    changes, nodes, named = [], tuple(range(way[0])), way[0]
    for size in way[1:]:
        fresh = max(0, size - len(nodes))
        after = nodes[:size] + tuple(range(named, named + fresh))
        named += fresh
        changes.append(Change(nodes, after))
        nodes = after
    return changes


def show(title: str, rows: dict[str, Moved]) -> None:
    """Print a table."""
    heads = ("read / least", "median", "largest", "each worker / least", "least / state")
    click.echo(f"\n{title}\n{'':<44}{''.join(f'{head:>21}' for head in heads)}")
    for name, moved in rows.items():
        if not moved.least:
            click.echo(f"{name:<44}{f'{moved.read} / 0':>21}")
            continue
        shown = (
            moved.read / moved.least,
            statistics.median(moved.over),
            max(moved.over),
            moved.each / moved.least,
            moved.least / (moved.changes * STATE),
        )
        click.echo(f"{name:<44}{''.join(f'{value:>21.3f}' for value in shown)}")


@click.command()
@click.option("--pairs", default=3000, show_default=True, help="Random pairs of worlds for each layout.")
@click.option("--nodes", default=8, show_default=True, help="Most nodes of a world.")
@click.option("--seed", default=0, show_default=True)
def main(pairs: int, nodes: int, seed: int) -> None:
    """Compare the bytes that the plan reads from other nodes with the least possible."""
    click.echo(f"{report.machine()}")
    for copies in (True, False):
        drawn, story = {name: Moved() for name in LAYOUTS}, {name: Moved() for name in LAYOUTS}
        for name, layout in LAYOUTS.items():
            rng = random.Random(seed)
            for _ in range(pairs):
                drawn[name].add(*measure(layout, Change.draw(rng, nodes), copies))
            for change in along(WAY):
                story[name].add(*measure(layout, change, copies))
        holds = "each node also holds the copy of another one" if copies else "no copies"
        show(f"{pairs} random pairs of 1 to {nodes} nodes x {WORKERS} workers, {holds}", drawn)
        show(f"{' -> '.join(map(str, WAY))} nodes, {holds}", story)


if __name__ == "__main__":
    main()
