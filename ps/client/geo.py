"""Mode geo: a trainer updates its own copies of rows, and every few steps adds its changes to the pservers' rows.

The local rows follow the table's optimizer, whose state stays here. At an exchange, the difference to the fetched
values is divided by the number of trainers and added; then all rows used since the last exchange are fetched again.
Others are invalidated, so a row in use is never older than one exchange. Invalidated rows keep their slot and optimizer
state: a trainer ends up holding every row it has ever used twice, its own copy and the fetched one. (After Paddle's
geo-SGD, with averages instead of sums.)
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps.client.arguments import as_keys, as_rows
from ps.client.core import Core
from ps.client.read import RowReader
from ps.client.write import RowWriter
from ps.rows import RowOp, TablePush, TrainerPush
from ps.spec import Admission, Eviction, Optimizer, TableSpec, UpdateRule, WeightFormat
from ps.store.store import RowStore

Keys = NDArray[np.int64]
Weights = NDArray[np.float32]


@dataclass(slots=True)
class _Table:
    spec: TableSpec
    known: Keys
    """Sorted keys of the valid rows: those fetched by or since the last exchange."""
    touched: list[Keys] = field(default_factory=list)


class Geo:
    """The local rows of one client in mode geo."""

    def __init__(self, core: Core, reader: RowReader, writer: RowWriter, every: int) -> None:
        self._core, self._reader, self._writer, self._every = core, reader, writer, every
        self._mine, self._base = RowStore(), RowStore()
        self._tables: dict[str, _Table] = {}
        self._factor: dict[str, float] = {}
        self._lock = threading.RLock()

    def pull(self, table: str, keys: Keys, out: Weights) -> None:
        """Copy local rows to ``out``, fetching those that are missing or invalid."""
        with self._lock:
            found = self._table(table)
            unknown = np.setdiff1d(keys, found.known)
            if len(unknown):
                self._fetch(found, unknown)
                found.known = np.union1d(found.known, unknown)
            self._mine.pull(table, keys, out, step=self._core.step)

    def push(self, values: Mapping[str, tuple[Any, Any]]) -> None:
        """Apply a step's gradients to the local rows; exchange every ``every`` steps."""
        core = self._core
        parts, lr = [], {}
        with self._lock:
            for table, (given, rows) in values.items():
                found, keys = self._table(table), as_keys(table, given)
                grads = as_rows(found.spec, keys.shape, rows)
                flat = keys.reshape(-1)
                self.pull(table, flat, np.empty_like(grads))  # fetches rows that were never pulled
                parts.append(TablePush(table, flat, grads, RowOp.GRAD))
                lr[table] = found.spec.optimizer.lr * self._factor.get(table, self._factor.get("", 1.0))
            pushed = self._mine.push([TrainerPush(0, 0, parts)], step=core.step, lr=lr)
            core.tally.add(damaged=pushed.damaged)
            for part in parts:
                self._tables[part.table].touched.append(part.keys)
            if (core.step + 1) % self._every == 0:
                self.exchange()
            self._writer.end_step()

    def exchange(self, tables: Iterable[str] | None = None) -> None:
        """Add this trainer's changes to the pservers' rows and fetch the results. ``tables``: only of these."""
        with self._lock:
            share = np.float32(1.0 / max(1, len(self._core.session.joined.members)))
            changes, used = {}, {}
            wanted = self._tables.keys() if tables is None else self._tables.keys() & set(tables)
            exchanged = {name: found for name, found in self._tables.items() if name in wanted}
            for name, found in exchanged.items():
                if found.touched:
                    keys = np.unique(np.concatenate(found.touched))
                    changes[name] = (
                        keys,
                        (self._rows(self._mine, found, keys) - self._rows(self._base, found, keys)) * share,
                    )
                    used[name] = keys
            if changes:
                self._writer.push(changes, RowOp.ADD)
            for name, found in exchanged.items():
                # Valid only after they have been fetched; otherwise a failure here would add the same change twice.
                found.touched, found.known = [], found.known[:0]
                if name in used:
                    self._fetch(found, used[name])
                    found.known = used[name]

    def forget(self, tables: Iterable[str]) -> None:
        """Invalidate local rows after values were assigned on the pservers."""
        with self._lock:
            for name in tables:
                if name in self._tables:
                    self._tables[name].known = self._tables[name].known[:0]

    def set_lr(self, factor: float, table: str) -> None:
        """Scale this trainer's own LR, effective at once."""
        if not table:
            self._factor.clear()
        self._factor[table] = factor

    def _table(self, name: str) -> _Table:
        if name not in self._tables:
            spec = self._core.spec(name)
            self._mine.define(replace(spec, admission=Admission(), eviction=Eviction(), weights=WeightFormat.F4))
            self._base.define(TableSpec(name, spec.dim, Optimizer(UpdateRule.ADD)))
            self._tables[name] = _Table(spec, np.zeros(0, np.int64))
        return self._tables[name]

    def _fetch(self, found: _Table, keys: Keys) -> None:
        name = found.spec.name
        united, rows = self._reader.fetch({name: keys}, True)[0][name]
        part = TablePush(name, united.keys, rows, RowOp.ASSIGN)
        for store in (self._mine, self._base):
            store.push([TrainerPush(0, 0, [part])], step=self._core.step)

    def _rows(self, store: RowStore, found: _Table, keys: Keys) -> Weights:
        out = np.empty((len(keys), found.spec.dim), np.float32)
        store.pull(found.spec.name, keys, out, step=self._core.step, insert=False)
        return out
