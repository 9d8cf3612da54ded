"""Logical ranks: a fixed number of gradients, added up in an order that does not depend on which worker made which.

The order is a binary tree over the logical ranks: 0+1, 2+3, …, then pairs of those, and so on; where there is no
partner, what is there moves up alone. Floating-point additions in the same order have the same bits. A worker adds up
what lies whole in its own block as the gradients come, so that it holds few of them at a time; the rest of the tree is
worked out by all workers, from what all have sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from edl.errors import StateError
from edl.worker import hyper

Node = tuple[int, int]
"""Level and index: ``(2, 1)`` is the sum over the logical ranks 4 to 7."""
CHUNK_BYTES = 32 << 20
"""What comes from all workers at once."""
_LARGEST_ITEM = 8


class Branches:
    """The sums that one worker has made. Arrays are numpy's or a framework's: they can be added and cut."""

    def __init__(self) -> None:
        self.nodes: dict[Node, list[Any]] = {}

    def add(self, rank: int, arrays: list[Any]) -> None:
        """The gradient of one logical rank; it is kept, and added to in place."""
        node = (0, rank)
        while (partner := (node[0], node[1] ^ 1)) in self.nodes:
            other = self.nodes.pop(partner)
            left, right = (other, arrays) if partner < node else (arrays, other)
            arrays = [_added(one, two) for one, two in zip(left, right, strict=True)]
            node = (node[0] + 1, node[1] // 2)
        self.nodes[node] = arrays


def tree_sum(nodes: Mapping[Node, Any], ranks: int) -> Any:
    """The sum of all: of the gradients of ``ranks`` logical ranks, some added up already. None if there is nothing."""
    level = max(ranks - 1, 0).bit_length()

    def total(node: Node) -> Any:
        if node in nodes:
            return nodes[node]
        level, index = node
        if level == 0:
            return None
        left, right = total((level - 1, 2 * index)), total((level - 1, 2 * index + 1))
        return right if left is None else left if right is None else left + right

    return total((level, 0))


def sum_over_workers(
    branches: Branches,
    held: Sequence[Sequence[Node]],
    sizes: Sequence[int],
    blank: Callable[[int, int, int], Any],
    gather: Callable[[Any], Sequence[Any]],
) -> list[Any]:
    """All workers' branches, added up; every worker gets the same bits. A collective.

    ``held``: the nodes that each worker has, by rank. ``sizes``: elements of each array. ``blank(array, rows,
    columns)`` makes an array to send in, of the kind of that array; ``gather`` gives back those of all workers.
    """
    ranks = 1 + max(((index + 1 << level) - 1 for nodes in held for level, index in nodes), default=-1)
    rows = max((len(nodes) for nodes in held), default=0)
    mine = sorted(branches.nodes)
    sums = []
    for array, size in enumerate(sizes):
        whole = blank(array, 1, size)[0]
        step = max(CHUNK_BYTES // (_LARGEST_ITEM * max(rows, 1) * len(held)), 1)
        for begin in range(0, size, step):
            end = min(begin + step, size)
            sent = blank(array, rows, end - begin)
            for row, node in enumerate(mine):
                sent[row] = branches.nodes[node][array][begin:end]
            came = [sent] if len(held) == 1 else gather(sent)
            parts = {node: came[worker][row] for worker, row, node in _places(held)}
            whole[begin:end] = tree_sum(parts, ranks)
        sums.append(whole)
    return sums


def _places(held: Sequence[Sequence[Node]]) -> Iterator[tuple[int, int, Node]]:
    for worker, nodes in enumerate(held):
        for row, node in enumerate(nodes):
            yield worker, row, node


def _added(left: Any, right: Any) -> Any:
    left += right  # IEEE additions commute, but NaNs may differ: keep to the order
    return left


class Part:
    """What the workers tell each other of a step before they add up: small, and the same on all of them afterwards."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.used = b""
        """One byte for each parameter: 1 if it has a gradient."""
        self.losses: dict[int, tuple[int, float]] = {}
        """By logical rank: its samples and its mean loss."""
        self.squares: dict[int, float] = {}
        """By logical rank: the square of its gradient's norm, times the square of its weight."""

    def encode(self) -> bytes:
        """JSON keeps every bit of a float."""
        losses = [[rank, *loss] for rank, loss in self.losses.items()]
        squares = list(self.squares.items())
        return json.dumps([self.nodes, self.used.hex(), losses, squares]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Part:
        """The inverse."""
        part = cls()
        nodes, used, losses, squares = json.loads(data)
        part.nodes = [(int(level), int(index)) for level, index in nodes]
        part.used = bytes.fromhex(used)
        part.losses = {int(rank): (int(samples), float(loss)) for rank, samples, loss in losses}
        part.squares = {int(rank): float(square) for rank, square in squares}
        return part


class Streams:
    """Where the random numbers of each micro-batch begin: it depends on the logical rank and on the step."""

    def __init__(self, seed: int, first_step: int) -> None:
        self._seed = seed
        self._place = (hyper.commits(), first_step)

    def key(self, rank: int, micro: int) -> bytes:
        """64 bytes, for one micro-batch of a logical rank."""
        words = ":".join(str(word) for word in ("edl", self._seed, *self._place, rank, micro))
        return hashlib.blake2b(words.encode(), digest_size=64).digest()

    def step(self) -> None:
        """A step is over. Steps are counted from the last commit, so that one that is done again is the same."""
        commit, steps = self._place
        self._place = (commit, steps + 1)

    def begin(self) -> None:
        """A step begins."""
        commit = hyper.commits()
        if commit != self._place[0]:
            self._place = (commit, 0)


def check_blocks(parts: Sequence[Part]) -> None:
    """Raises ``StateError`` when two workers have taken the same logical rank."""
    seen: dict[int, int] = {}
    for worker, part in enumerate(parts):
        for rank in part.losses:
            if seen.setdefault(rank, worker) != worker:
                raise StateError(f"logical rank {rank} was taken by worker {seen[rank]} and by worker {worker}")


def used_by_any(parts: Sequence[Part]) -> bytes:
    """Which parameters have a gradient on some worker."""
    return bytes(max(flags) for flags in zip(*(part.used for part in parts if part.used), strict=True))
