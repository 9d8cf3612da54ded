"""Whether every rank holds the same state: fingerprints are exchanged, and a difference is named by rank and path.

A replicated state is kept by one worker of each node, so a rank that has drifted (a bad card, a collective that one
rank skipped, a restore that went wrong) spreads its numbers at the next change. Ranks compare after each restore, and
with ``--verify-state=N`` at every N-th commit.

Parameters and what optimizers hold of them must be equal bit for bit. Everything else (buffers such as those of
BatchNorm, metrics, values) may differ while a round runs; after a restore rank 0's hold for all.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edl.worker.tree import Leaves

_SHOWN = 5
"""Paths that a message names; it counts the others."""
_TEXT_BYTES = 8
"""Length of a hash of what is no array."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds: plain structure, and the arrays in it by path."""

    tree: Mapping[str, Any]
    """By name in the state, as ``tree.flatten`` returns it."""
    leaves: Leaves
    kinds: Mapping[str, str]
    """Type and shape of each array, by path: ``F32[4, 3]``."""
    strict: frozenset[str]
    """Paths of arrays, and names of whole objects, that must be equal on all ranks at every step."""

    def must_equal(self, path: str) -> bool:
        """Whether a difference at this path is a fault."""
        return path in self.strict or path.partition(".")[0] in self.strict


@dataclass(frozen=True, slots=True)
class Difference:
    """One path where ranks hold different values."""

    path: str
    ranks: tuple[int, ...]
    """Those in the minority; all ranks when no value has a majority."""
    strict: bool


class Verifier:
    """Compares what ranks hold. ``digest`` hashes arrays to 64 bits, ``exchange`` hands each rank's bytes to all."""

    def __init__(self, digest: Callable[[Sequence[Any]], int], exchange: Callable[[bytes], list[bytes]]) -> None:
        self._digest = digest
        self._exchange = exchange

    def differences(self, held: Held) -> list[Difference]:
        """Paths at which ranks differ, the same list on every rank; empty when all hold the same.

        All ranks call it. One small collective as a rule, and two more when something differs. Raises what a collective
        raises when a peer is lost.
        """
        whole = hashlib.blake2b(digest_size=_TEXT_BYTES)
        whole.update(_plain([held.tree, held.kinds]).encode())
        mine = whole.digest() + self._digest([array for _, array in held.leaves]).to_bytes(8, "big")
        if len(set(self._exchange(mine))) == 1:
            return []
        parts = [json.loads(part) for part in self._exchange(json.dumps(self._details(held)).encode())]
        return compare(parts, held.must_equal)

    def _details(self, held: Held) -> dict[str, str]:
        """A hash for each path."""
        details = {path: f"{held.kinds[path]} {self._digest([array]):016x}" for path, array in held.leaves}
        for path, text in _scalars(held.tree):
            details[path if path not in details else f"{path} (value)"] = _short(text)
        return details


def compare(parts: Sequence[Mapping[str, str]], strict: Callable[[str], bool]) -> list[Difference]:
    """What differs between the ranks' hashes by path, in order of the paths. A path that a rank lacks differs."""
    found = []
    for path in sorted(set().union(*parts)):
        values = [part.get(path, "") for part in parts]
        if len(set(values)) > 1:
            found.append(Difference(path, _minority(values), strict(path)))
    return found


def _minority(values: Sequence[str]) -> tuple[int, ...]:
    (common, count), *_ = Counter(values).most_common()
    if 2 * count <= len(values):
        return tuple(range(len(values)))
    return tuple(rank for rank, value in enumerate(values) if value != common)


def suspects(differences: Iterable[Difference]) -> frozenset[int]:
    """Ranks whose values the others do not share."""
    return frozenset(rank for difference in differences for rank in difference.ranks)


def describe(differences: Sequence[Difference], world_size: int) -> str:
    """``model.weight (rank 3 of 8), optimizer.state.0.exp_avg (rank 3 of 8) and 12 more``."""
    shown = [f"state.{one.path} ({_ranks(one.ranks, world_size)})" for one in differences[:_SHOWN]]
    more = len(differences) - _SHOWN
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _ranks(ranks: Sequence[int], world_size: int) -> str:
    if len(ranks) == world_size:
        return f"no majority among {world_size} ranks"
    some = ", ".join(map(str, ranks[:_SHOWN])) + (", …" if len(ranks) > _SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {some} of {world_size}"


def _plain(tree: Any) -> str:
    return json.dumps(tree, sort_keys=True)


def _scalars(tree: Any, path: str = "") -> Iterable[tuple[str, str]]:
    """Each value that is no array, with its path."""
    if isinstance(tree, dict) and tree and not next(iter(tree)).startswith("$"):
        for key, part in tree.items():
            yield from _scalars(part, f"{path}.{key}" if path else key)
    elif isinstance(tree, list) and len(tree) <= _SHOWN:
        for index, part in enumerate(tree):
            yield from _scalars(part, f"{path}.{index}")
    else:
        yield path, _plain(tree)


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_TEXT_BYTES).hexdigest()
