"""Rows for tests of checkpoints: made up, compared, and a stand-in for what a pserver holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edl.job_records import Training
from ps.checkpoint.directory import CheckpointDirectory
from ps.checkpoint.reader import Loaded
from ps.checkpoint.writer import SHARD_BUCKETS, Taken
from ps.hashing import buckets_of
from ps.protocol.messages import CheckpointOrder, Orders, PlacementMap
from ps.rows import Rows
from ps.spec import BUCKETS, Optimizer, TableSpec, UpdateRule

USER = TableSpec("user", 4, Optimizer(UpdateRule.ADAM))
DENSE = TableSpec("wide/../net.0".replace("/../", "-"), 3, Optimizer(UpdateRule.SGD), dense=True, rows=50)
TABLES = (USER, DENSE)
SLOTS = {"user": 8, DENSE.name: 0}


def rows_of(spec: TableSpec, keys: NDArray[np.int64], seed: int = 0) -> Rows:
    """Rows of these keys, other ones for each seed."""
    draw = np.random.default_rng(seed)
    count = len(keys)
    numbers = [draw.integers(0, 1000, count).astype(np.uint32) for _ in range(3)]
    weights = draw.standard_normal((count, spec.dim)).astype(np.float32)
    state = draw.standard_normal((count, SLOTS[spec.name])).astype(np.float32)
    return Rows(keys, weights, state, *numbers)


class Held:
    """Rows of all tables on one pserver, by table and key, as bytes."""

    def __init__(self, rows: Mapping[str, Rows] | None = None) -> None:
        self.rows: dict[str, dict[int, bytes]] = {}
        self.arrays = dict(rows or {})
        for table, some in self.arrays.items():
            self.put(table, some)

    def put(self, table: str, rows: Rows) -> None:
        """Add or replace rows."""
        held = self.rows.setdefault(table, {})
        for place, key in enumerate(rows.keys.tolist()):
            one = rows.take(slice(place, place + 1))
            numbers = (one.frequency, one.updates, one.seen)
            held[key] = b"".join(array.tobytes() for array in (one.weights, one.state, *numbers))

    def load(self, piece: Loaded) -> None:
        """Add the rows of a restored piece."""
        for table, rows in piece.rows.items():
            assert set(buckets_of(rows.keys).tolist()) <= set(piece.buckets)
            assert not self.rows.get(table, {}).keys() & set(rows.keys.tolist()), "no row twice"
            self.put(table, rows)


def union(several: list[Held]) -> dict[str, dict[int, bytes]]:
    """All rows of all; none may be held by two."""
    found: dict[str, dict[int, bytes]] = {}
    for held in several:
        for table, rows in held.rows.items():
            assert not found.get(table, {}).keys() & rows.keys()
            found.setdefault(table, {}).update(rows)
    return found


def taken(
    rows: Mapping[str, Rows], gone: Mapping[str, NDArray[np.int64]] | None = None, whole: frozenset[int] = frozenset()
) -> Iterator[Taken]:
    """Rows as a store would give them, shard by shard, not in the order of their buckets."""
    for shard in range(BUCKETS // SHARD_BUCKETS):
        first = shard * SHARD_BUCKETS

        def mine(keys: NDArray[np.int64], shard: int = shard) -> NDArray[np.bool_]:
            return np.asarray(buckets_of(keys) // SHARD_BUCKETS == shard)

        yield Taken(
            shard,
            {table: some.take(mine(some.keys)) for table, some in rows.items()},
            {table: keys[mine(keys)] for table, keys in (gone or {}).items()},
            frozenset(one for one in whole if first <= one < first + SHARD_BUCKETS),
        )


def split(parts: int, seed: int = 0) -> list[NDArray[np.uint8]]:
    """Which buckets each of several pservers owns."""
    owner = np.random.default_rng(seed).integers(0, parts, BUCKETS)
    return [(owner == one).astype(np.uint8) for one in range(parts)]


def orders(history: int = 1, tables: tuple[TableSpec, ...] = TABLES) -> Orders:
    """The orders of the pserver that completes a checkpoint."""
    return Orders(1, 1, PlacementMap(history=history), 1, (), Training(), tables)


def finish(
    checkpoint_storages: list[CheckpointDirectory],
    number: int,
    told: list[str],
    extra: str = "",
    history: int = 1,
    tables: tuple[TableSpec, ...] = TABLES,
) -> str:
    """Complete a checkpoint from the pservers' reports."""
    checkpoint = CheckpointOrder(number, "complete", extra=extra, parts=tuple(told))
    return checkpoint_storages[0].complete(checkpoint, orders(history, tables))


def files_below(folder: Path) -> list[str]:
    """Relative paths of all files in the folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
