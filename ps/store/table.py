"""One table of a store: its rows in all shards, admission, eviction, and the keys evicted since a mark."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ps.hashing import SHARDS, buckets_of
from ps.rows import Rows, ShardChange, concat, no_rows
from ps.spec import Admission, TableSpec
from ps.store.admission import Pending, admitted
from ps.store.eviction import oldest
from ps.store.kernels import Kernels
from ps.store.rules import TableLayout
from ps.store.shard_table import SEEN, ShardTable, Slots
from ps.store.slabs import HUGE, LARGE

REMEMBERED = 1 << 14
"""Evicted keys per shard that are kept for the next incremental checkpoint; beyond that, their buckets are written in
full."""
ROOM = 16
"""A full shard evicts one row in this many at once, so that it need not do so for every new key."""
Keys = NDArray[np.int64]


class Table:
    """The rows of one table. All methods with a shard argument require that shard's lock."""

    def __init__(self, spec: TableSpec, kernels: Kernels, forget: Callable[[NDArray[np.uint16]], None]) -> None:
        self.spec = spec
        self._forget = forget
        self.telling = False
        """True if evicted keys must be reported to replicas."""
        self.layout = TableLayout.of(spec)
        self.shard_tables = kernels.shard_tables(self.layout)
        self.most = 0
        """This store's share of the hard row cap; 0: none."""
        self.mine: NDArray[np.uint8] | None = None
        """By bucket: 0 for replicas, whose rows are only evicted by their owner. None: there are no replicas."""
        self.counting = threading.Lock()
        """Held while rows are added under a cap."""
        self._pending: dict[int, Pending] = {}
        self._gone: list[list[tuple[int, Keys]]] = [[] for _ in range(SHARDS)]
        self._unreported: list[list[Keys]] = [[] for _ in range(SHARDS)]
        self._evicted: list[Rows] = []

    @property
    def rows(self) -> int:
        """Number of rows; approximate while other threads add some."""
        return sum(shard_table.rows for shard_table in self.shard_tables.all)

    def bytes(self) -> int:
        """Memory in use, in bytes."""
        return sum(shard_table.bytes() for shard_table in self.shard_tables.all) + sum(
            one.bytes() for one in list(self._pending.values())
        )

    def leap(self) -> int:
        """Upper bound of the memory taken at once beyond the added rows: pages that shards start."""
        large = self.rows * self.layout.row_bytes >= SHARDS * LARGE // 2
        return SHARDS * (HUGE if large else mmap.PAGESIZE)

    @property
    def open(self) -> bool:
        """True if every key gets a row at its first occurrence."""
        return self.spec.admission == Admission()

    def none(self) -> Rows:
        """Empty ``Rows`` of this table."""
        return no_rows(self.layout.dim, self.layout.slots)

    def youngest(self, shard: int) -> int:
        """What the row that was used last has in ``SEEN``; 0 without rows."""
        shard_table = self.shard_tables[shard]
        return int(shard_table.meta[shard_table.live(), SEEN].max()) if shard_table.rows else 0

    # --- new rows ----------------------------------------------------------------------------------------------------

    def invited(self, shard: int, keys: Keys, times: NDArray[np.uint32] | None) -> NDArray[np.bool_]:
        """Count unknown keys of a pull and return a mask of those that get a row."""
        if self.open:
            return np.ones(len(keys), np.bool_)
        if shard not in self._pending:
            self._pending[shard] = Pending()
        unique, inverse = np.unique(keys, return_inverse=True)
        counts = np.bincount(inverse, times, len(unique)).astype(np.int64)
        return admitted(self.spec.admission, self._pending[shard], unique, counts)[inverse]

    def add(self, shard: int, keys: Keys, mark: int, step: int, using: Slots, before: Callable[[Slots], None]) -> Slots:
        """The slots of new rows for keys that have none, or -1 where the row cap leaves no room. Keys may repeat.

        ``using``: slots that this request has found, which are not evicted.
        """
        shard_table = self.shard_tables[shard]
        if not self.most:
            return shard_table.insert(keys, mark, step)
        with self.counting:
            unique, inverse = np.unique(keys, return_inverse=True)
            over = self.rows + len(unique) - self.most
            if over > 0:
                over -= self._make_room(shard_table, over, mark, step, using, before)
            fits = len(unique) - max(0, over)
            slots = np.full(len(unique), -1, np.int64)
            if fits > 0:
                slots[:fits] = shard_table.insert(unique[:fits], mark, step)
            return slots[inverse]

    def _make_room(
        self, shard_table: ShardTable, wanted: int, mark: int, step: int, using: Slots, before: Callable[[Slots], None]
    ) -> int:
        slots = np.setdiff1d(self.own(shard_table.number), using)
        idle = slots[shard_table.meta[slots, SEEN] < step]
        going = oldest(shard_table, idle, max(wanted, shard_table.rows // ROOM))
        rows = self.remove(shard_table.number, going, mark, before)
        unreported = self._unreported[shard_table.number]
        if not self.telling:
            unreported.clear()
        elif len(rows):
            unreported.append(rows.keys)
        if self.spec.eviction.export:
            self._evicted.append(rows)
        return len(going)

    # --- rows that go ------------------------------------------------------------------------------------------------

    def own(self, shard: int) -> Slots:
        """The slots of rows that may be evicted here."""
        shard_table = self.shard_tables[shard]
        return shard_table.live() if self.mine is None else shard_table.within(self.mine != 0)

    def remove(self, shard: int, slots: Slots, mark: int, before: Callable[[Slots], None]) -> Rows:
        """Evict these rows; return their content. The caller reports them to replicas, if there are any."""
        shard_table = self.shard_tables[shard]
        before(slots)
        rows = shard_table.gather(slots)
        shard_table.remove(slots)
        if len(rows) and mark:  # before the first mark no checkpoint can bring them back
            self._gone[shard].append((mark, rows.keys))
            self._few_gone(shard)
        return rows

    def made_room(self) -> Rows:
        """Rows evicted since the last call to make room, if they are to be exported."""
        with self.counting:
            found, self._evicted = self._evicted, []
        return concat([self.none(), *found])

    def unreported(self, shard: int) -> Keys:
        """Keys evicted to make room since the last call, to be reported to replicas of this shard. Some may have a row
        again."""
        found, self._unreported[shard] = self._unreported[shard], []
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def report(self, piece: ShardChange, keys: Keys) -> None:
        """Add evicted keys to a piece for replicas. Those that have a row again, from a later pull or from another
        pserver that owned the bucket meanwhile, get this row: the replica must end up with the same ones."""
        name, shard_table = self.spec.name, self.shard_tables[piece.shard]
        piece.removed[name] = keys = np.unique(keys)
        piece.buckets = np.union1d(piece.buckets, buckets_of(keys))
        slots = shard_table.find(keys)
        if (slots >= 0).any():
            rows = shard_table.gather(slots[slots >= 0])
            piece.rows[name] = concat([piece.rows[name], rows]) if name in piece.rows else rows

    def gone(self, shard: int, since: int, before: int) -> Keys:
        """Keys evicted from mark ``since`` to before mark ``before``; earlier ones are discarded."""
        self._gone[shard] = [one for one in self._gone[shard] if one[0] >= since]
        found = [keys for mark, keys in self._gone[shard] if mark < before]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _few_gone(self, shard: int) -> None:
        if sum(len(keys) for _, keys in self._gone[shard]) > REMEMBERED:
            self._forget(np.unique(buckets_of(np.concatenate([keys for _, keys in self._gone[shard]]))))
            self._gone[shard] = []
