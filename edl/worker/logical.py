"""Logical ranks: a fixed number of gradients, summed in an order that does not depend on which worker computed which.

The order is a binary tree over the logical ranks: 0+1, 2+3, …, then pairs of those, and so on; an element without a
partner moves up alone. Floating-point additions in the same order give the same bits. A worker sums the complete
subtrees within its own block as gradients come, so that it holds few at a time; the rest of the tree is computed by all
workers, from what all have sent.
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
"""Bytes received from all workers at once."""
_LARGEST_ITEM = 8


class Branches:
    """The partial sums of one worker. Arrays are NumPy's or a framework's: they can be added and sliced."""

    def __init__(self) -> None:
        self.nodes: dict[Node, list[Any]] = {}

    def add(self, rank: int, arrays: list[Any]) -> None:
        """Add the gradient of one logical rank; the arrays are kept and modified in place."""
        node = (0, rank)
        while (partner := (node[0], node[1] ^ 1)) in self.nodes:
            other = self.nodes.pop(partner)
            left, right = (other, arrays) if partner < node else (arrays, other)
            arrays = [_added(one, two) for one, two in zip(left, right, strict=True)]
            node = (node[0] + 1, node[1] // 2)
        self.nodes[node] = arrays


def tree_sum(nodes: Mapping[Node, Any], ranks: int) -> Any:
    """The total over ``ranks`` logical ranks, some of which are already summed. None if there is nothing."""
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
    """The sum of all workers' branches, with the same bits on every worker. A collective.

    ``held``: the nodes that each worker has, by rank. ``sizes``: elements of each array. ``blank(array, rows,
    columns)`` creates an array to send, of the kind of that array; ``gather`` returns those of all workers.
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
    left += right  # IEEE additions commute, but NaNs may differ: keep the order
    return left


class Part:
    """The small message that the workers exchange about a step before they add up gradients."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.used = b""
        """One byte per parameter: 1 if it has a gradient."""
        self.losses: dict[int, tuple[int, float]] = {}
        """Samples and mean loss, by logical rank."""
        self.squares: dict[int, float] = {}
        """Squared gradient norm times squared weight, by logical rank."""

    def encode(self) -> bytes:
        """Encode as JSON, which preserves every bit of a float."""
        losses = [[rank, *loss] for rank, loss in self.losses.items()]
        squares = list(self.squares.items())
        return json.dumps([self.nodes, self.used.hex(), losses, squares]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Part:
        """Parse what ``encode`` has returned."""
        part = cls()
        nodes, used, losses, squares = json.loads(data)
        part.nodes = [(int(level), int(index)) for level, index in nodes]
        part.used = bytes.fromhex(used)
        part.losses = {int(rank): (int(samples), float(loss)) for rank, samples, loss in losses}
        part.squares = {int(rank): float(square) for rank, square in squares}
        return part


class Streams:
    """The random seeds of micro-batches, which depend on the logical rank and the step."""

    def __init__(self, seed: int, first_step: int) -> None:
        self._seed = seed
        self._place = (hyper.commits(), first_step)

    def key(self, rank: int, micro: int) -> bytes:
        """A 64-byte seed for one micro-batch of a logical rank."""
        words = ":".join(str(word) for word in ("edl", self._seed, *self._place, rank, micro))
        return hashlib.blake2b(words.encode(), digest_size=64).digest()

    def step(self) -> None:
        """End a step. Steps are counted from the last commit, so that a repeated one gets the same numbers."""
        commit, steps = self._place
        self._place = (commit, steps + 1)

    def begin(self) -> None:
        """Begin a step: its number restarts at 0 after a commit."""
        commit = hyper.commits()
        if commit != self._place[0]:
            self._place = (commit, 0)


def check_blocks(parts: Sequence[Part]) -> None:
    """Raise ``StateError`` when two workers have taken the same logical rank."""
    seen: dict[int, int] = {}
    for worker, part in enumerate(parts):
        for rank in part.losses:
            if seen.setdefault(rank, worker) != worker:
                raise StateError(f"logical rank {rank} was taken by worker {seen[rank]} and by worker {worker}")


def used_by_any(parts: Sequence[Part]) -> bytes:
    """Flags for the parameters that have a gradient on any worker."""
    return bytes(max(flags) for flags in zip(*(part.used for part in parts if part.used), strict=True))
