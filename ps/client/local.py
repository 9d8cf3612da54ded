"""Tables in the process of a script that runs without a launcher, with the same arithmetic as on the pservers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edl.errors import PsError, SettingError
from edl.job_records import Mode, Training
from ps.client.arguments import as_keys, as_out, as_rows, as_step
from ps.client.core import Tally
from ps.client.dedup import DistinctKeys, unite
from ps.client.member_count import MemberCount
from ps.client.push_intents import Records
from ps.hashing import SHARDS
from ps.rows import Rows, TablePush, TrainerPush
from ps.spec import BUCKETS, TableSpec
from ps.store.store import RowStore

ME = 1


class LocalClient:
    """The interface of ``ps.client.client.PsClient`` on top of a store in this process. Not thread-safe."""

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        self.store = RowStore()
        self.training = Training(mode=Mode.ASYNC)
        self.restored = ""
        self.step = self.number = self.epoch = 0
        self._tally = Tally()
        self._specs: dict[str, TableSpec] = {}
        self.tables: Mapping[str, TableSpec] = MappingProxyType(self._specs)
        self._factors: list[tuple[int, str, float]] = []
        self._seq = 0
        for spec in tables:
            self.define(spec)

    def define(self, spec: TableSpec) -> None:
        """Define another table. Raises ``PsError`` if one of this name is defined differently."""
        self.store.define(spec)
        self._specs[spec.name] = spec

    @property
    def statistics(self) -> dict[str, int]:
        """Counters since the start, by name; those about pservers stay 0."""
        return self._tally.shown()

    @property
    def members(self) -> Sequence[object]:
        """Always empty: there is no membership."""
        return ()

    def watch_members(self) -> MemberCount:
        """Counts none."""
        return MemberCount()

    def begin(self) -> None:
        """Does nothing: there are no other trainers."""

    def rest(self) -> None:
        """Does nothing: no trainer waits for this one."""

    def on_checkpoint(self, *, value: Any = None, name_data: Any = None, settle: Any = None) -> None:
        """Does nothing: there are no checkpoints."""

    def boundary(self) -> None:
        """Does nothing: there are no checkpoints to stop for."""

    def leave(self) -> None:
        """Does nothing: the parameters are lost with the process."""

    def pull(
        self, table: str, keys: Any, out: NDArray[Any] | None = None, *, insert: bool = True
    ) -> NDArray[np.float32]:
        """Pull rows: float32 of shape ``(*keys.shape, dim)``, into ``out`` if given."""
        spec, given = self._spec(table), as_keys(table, keys)
        rows = as_out(spec, given.shape, out)
        self._tally.add(pulls=1, keys=given.size, distinct=len(np.unique(given)))
        self._fill(spec, given, rows, insert=insert)
        return rows

    def _fill(self, spec: TableSpec, keys: NDArray[np.int64], rows: NDArray[np.float32], *, insert: bool) -> None:
        self.store.pull(spec.name, keys.reshape(-1), rows.reshape(-1, spec.dim), step=self.step, insert=insert)

    def pull_many(self, keys: Mapping[str, Any], *, insert: bool = True) -> dict[str, NDArray[np.float32]]:
        """Pull rows of several tables."""
        return {table: self.pull(table, some, insert=insert) for table, some in keys.items()}

    def pull_distinct(
        self, wanted: Mapping[str, Any], *, insert: bool = True
    ) -> dict[str, tuple[DistinctKeys, NDArray[np.float32]]]:
        """Pull the rows of the distinct keys of several tables."""
        found = {}
        for table, some in wanted.items():
            spec, keys = self._spec(table), as_keys(table, some)
            united = unite(keys.reshape(-1), np.zeros(BUCKETS, np.int16), 1)
            rows = np.empty((len(united.keys), spec.dim), np.float32)
            self.store.pull(table, united.keys, rows, step=self.step, insert=insert, counts=united.counts)
            self._tally.add(pulls=1, keys=keys.size, distinct=len(united.keys))
            found[table] = united, rows
        return found

    def read(self, table: str, keys: Any) -> NDArray[np.float32]:
        """Read rows without side effects; a key without a row yields its initial weights."""
        return self.pull(table, keys, insert=False)

    def scan(self, table: str) -> Iterator[Rows]:
        """Iterate over all rows with their state."""
        self._spec(table)
        everywhere = np.ones(BUCKETS, np.bool_)
        shards = self.store.tables[table].shard_tables
        for shard in range(SHARDS):
            slots = shards[shard].within(everywhere)
            if len(slots):
                yield shards[shard].gather(slots)

    def prefetch(self, table: str, keys: Any) -> None:
        """Does nothing: all rows are local."""

    def fence(self, trainer: int) -> tuple[int, str]:
        """Always ``(-1, "")``: there are no other trainers."""
        return -1, ""

    def push(
        self, grads: Mapping[str, tuple[Any, Any]], *, op: str = "grad", wait: bool = True,
        records: Records | None = None,
    ) -> None:  # fmt: skip
        """Apply, per table, one row for each key (``(*keys.shape, dim)``). ``op="grad"`` ends the step. Raises
        ``PsError``."""
        parts = [
            TablePush(table, *self._flat(table, keys, values, op), op=op) for table, (keys, values) in grads.items()
        ]
        self._seq += 1
        pushed = self.store.push([TrainerPush(ME, self._seq, parts)], step=self.step, lr=self._lr())
        self._tally.add(pushes=1, damaged=pushed.damaged)
        if op == "grad":
            self.step += 1

    def push_and_pull(
        self, grads: Mapping[str, tuple[Any, Any]], tables: Sequence[str], *, records: Records | None = None
    ) -> dict[str, NDArray[np.float32]]:
        """Push gradients, which ends the step, and return the updated rows of those of these tables that were pushed,
        ``(keys, dim)`` in the order of their keys."""
        self.push(grads, records=records)
        found = {}
        for table in (one for one in tables if one in grads):
            spec, keys = self._spec(table), as_keys(table, grads[table][0]).reshape(-1)
            found[table] = np.empty((len(keys), spec.dim), np.float32)
            self._fill(spec, keys, found[table], insert=False)
        return found

    def begin_push(
        self, grads: Mapping[str, tuple[Any, Any]], tables: Sequence[str], *, records: Records | None = None
    ) -> Callable[[], dict[str, NDArray[np.float32]]]:
        """``push_and_pull``, at once; the returned function gives its result."""
        rows = self.push_and_pull(grads, tables, records=records)
        return lambda: rows

    def first(self, table: str, keys: Any, values: Any) -> None:
        """Set the weights of keys that have no row yet; existing rows are left alone."""
        self.push({table: (keys, values)}, op="first")

    def assign(self, table: str, keys: Any, values: Any) -> None:
        """Overwrite the weights of rows; the optimizer's state is kept."""
        self.push({table: (keys, values)}, op="assign")

    def flush(self) -> None:
        """Does nothing: no push is on its way."""

    def set_lr(self, factor: float, table: str = "", step: int = 0) -> None:
        """Scale the LR of a table, or of all tables, by ``factor`` from ``step`` on (0: at once). Raises
        ``SettingError`` unless ``factor`` is finite and at least 0."""
        if not (factor >= 0 and np.isfinite(factor)):
            raise SettingError("factor", f"{factor:g}", "must be 0 or more, and finite")
        if table:
            self._spec(table)
        self._factors.append((max(as_step(step), self.step), table, factor))
        self._factors.sort(key=lambda one: one[0])  # stable: of several calls for one step the last wins

    def save(self) -> str:
        """Always raises ``PsError``: local tables have no checkpoints."""
        raise PsError("checkpoints need a launcher; without one the tables are local to this process")

    def _lr(self) -> dict[str, float]:
        found = {name: spec.optimizer.lr for name, spec in self._specs.items()}
        for step, table, factor in self._factors:
            if step <= self.step:
                found |= {name: self._specs[name].optimizer.lr * factor for name in found if table in ("", name)}
        return found

    def _spec(self, table: str) -> TableSpec:
        if table not in self._specs:
            raise PsError(f"there is no table {table}; the defined tables are: {', '.join(self._specs) or 'none'}")
        return self._specs[table]

    def _flat(self, table: str, keys: Any, values: Any, op: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        spec, given = self._spec(table), as_keys(table, keys)
        return given.reshape(-1), as_rows(spec, given.shape, values, "gradients" if op == "grad" else "values")
