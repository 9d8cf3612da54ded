"""Verifies that all ranks hold the same state: fingerprints are exchanged, and a difference is reported by rank and
path.

A replicated state is saved by one worker per node, so a rank that has drifted (a faulty device, a collective that one
rank skipped, a failed restore) spreads its values at the next change. Ranks compare after each restore, and with
``--verify-state=N`` at every N-th commit.

Parameters and the optimizer state that belongs to them must be equal bit for bit. Everything else (buffers such as
those of BatchNorm, metrics, values) may differ during a round; after a restore all have rank 0's.
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
"""Number of paths that a message names; the others are counted."""
_TEXT_BYTES = 8
"""Length in bytes of the hash of non-array data."""


@dataclass(frozen=True, slots=True)
class Held:
    """The state of one rank: the plain structure, and its arrays by path."""

    tree: Mapping[str, Any]
    """By name in the state, as returned by ``tree.flatten``."""
    leaves: Leaves
    kinds: Mapping[str, str]
    """Type and shape of each array, by path: ``F32[4, 3]``."""
    strict: frozenset[str]
    """Paths of arrays, and names of whole objects, that must be equal on all ranks at every step."""
    whole: bool = True
    """Each rank holds all of the state, so a path that one lacks is a difference. Of a sharded state a rank may hold
    one stage of a pipeline."""

    def must_equal(self, path: str) -> bool:
        """Whether a difference at this path is a fault."""
        return path in self.strict or path.partition(".")[0] in self.strict


@dataclass(frozen=True, slots=True)
class Difference:
    """One path at which ranks hold different values."""

    path: str
    ranks: tuple[int, ...]
    """The ranks in the minority; all ranks that hold it when no value has a majority."""
    strict: bool


class Verifier:
    """Compares what ranks hold. ``digest`` hashes arrays to 64 bits, ``exchange`` sends each rank's bytes to all."""

    def __init__(self, digest: Callable[[Sequence[Any]], int], exchange: Callable[[bytes], list[bytes]]) -> None:
        self._digest = digest
        self._exchange = exchange

    def differences(self, held: Held) -> list[Difference]:
        """The paths at which ranks differ, the same list on every rank; empty when all are equal.

        A collective: normally a small one, and two more when something differs. Raises the collective's error when a
        peer is lost.
        """
        whole = hashlib.blake2b(digest_size=_TEXT_BYTES)
        whole.update(_plain([held.tree, held.kinds]).encode())
        mine = whole.digest() + self._digest([array for _, array in held.leaves]).to_bytes(8, "big")
        if len(set(self._exchange(mine))) == 1:
            return []
        details = self._details(held)
        # A rank does not know which paths of other ranks' stages are strict.
        strict = [path for path in details if held.must_equal(path)]
        parts = [json.loads(part) for part in self._exchange(json.dumps([details, strict]).encode())]
        must_equal = frozenset().union(*(theirs for _, theirs in parts))
        return compare([theirs for theirs, _ in parts], must_equal.__contains__, whole=held.whole)

    def _details(self, held: Held) -> dict[str, str]:
        """A hash for each path."""
        details = {path: f"{held.kinds[path]} {self._digest([array]):016x}" for path, array in held.leaves}
        for path, text in _scalars(held.tree):
            details[path if path not in details else f"{path} (value)"] = _short(text)
        return details


def compare(
    parts: Sequence[Mapping[str, str]], strict: Callable[[str], bool], *, whole: bool = True
) -> list[Difference]:
    """The differences between the ranks' hashes, in order of the paths. A path that a rank lacks is a difference if
    each rank holds the ``whole`` state."""
    found = []
    for path in sorted(set().union(*parts)):
        values = {rank: part.get(path, "") for rank, part in enumerate(parts) if whole or path in part}
        if len(set(values.values())) > 1:
            found.append(Difference(path, _minority(values), strict(path)))
    return found


def _minority(values: Mapping[int, str]) -> tuple[int, ...]:
    (common, count), *_ = Counter(values.values()).most_common()
    if 2 * count <= len(values):
        return tuple(values)
    return tuple(rank for rank, value in values.items() if value != common)


def suspects(differences: Iterable[Difference]) -> frozenset[int]:
    """The ranks whose values the others do not share."""
    return frozenset(rank for difference in differences for rank in difference.ranks)


def describe(differences: Sequence[Difference], world_size: int) -> str:
    """Text such as ``model.weight (rank 3 of 8), optimizer.state.0.exp_avg (rank 3 of 8) and 12 more``."""
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
    """Each non-array value with its path."""
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
