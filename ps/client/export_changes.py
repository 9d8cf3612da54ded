"""Incremental exports: the rows that differ between two checkpoints, and exports opened on top of one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edl.errors import CheckpointError, PsError
from ps.checkpoint.directory import CheckpointDirectory
from ps.client.export import ARROW, Export, Exported, locate, missing_rows, wanted_tables, write
from ps.hashing import SHARDS
from ps.rows import Rows, concat
from ps.spec import BUCKETS, TableSpec

Keys = NDArray[np.int64]


def export_changes(
    since: str, run: str, out: str | Path, *, format: str = ARROW, dtype: str = "f4", tables: Sequence[str] = ()
) -> Exported:
    """Export the rows of a checkpoint whose weights differ from those in an older one, ``since``, and the keys whose
    rows are gone. Arguments as for ``export_checkpoint``; both may be checkpoints of the same job or not. Reads both,
    one 64th at a time. Raises as ``export_checkpoint`` does, and ``PsError`` if a table differs."""
    (before, old), (after, new) = locate(since), locate(run)
    known = {spec.name: spec for spec in before.chain(old)[0].manifest.tables}
    manifest = after.chain(new)[0].manifest
    wanted = wanted_tables({spec.name: spec for spec in manifest.tables}, tables)
    for spec in wanted:
        if spec.name in known and (spec.dim, spec.rows) != (known[spec.name].dim, known[spec.name].rows):
            difference = spec.difference(known[spec.name])
            raise PsError(f"table {spec.name} differs: {difference} (here: {new}, there: {old}). Export all of it")
    gone: dict[str, list[Keys]] = {spec.name: [] for spec in wanted}

    def rows(spec: TableSpec) -> Iterator[Rows]:
        for shard in range(SHARDS):
            mine = np.zeros(BUCKETS, np.uint8)
            mine.reshape(SHARDS, -1)[shard] = 1
            held = _rows(before, old, spec.name, mine) if spec.name in known else None
            now = _rows(after, new, spec.name, mine)
            lost, changed = _difference(held, now)
            gone[spec.name].append(lost)
            if changed is not None and len(changed):
                yield changed

    return write(
        out, wanted, rows, format=format, dtype=dtype, source=new, step=manifest.step, since=old,
        gone=lambda spec: np.sort(np.concatenate(gone[spec.name])),
    )  # fmt: skip


def _rows(directory: CheckpointDirectory, run: str, table: str, mine: NDArray[np.uint8]) -> Rows | None:
    found = [one.rows[table] for one in directory.read(run, mine, tables=(table,)) if table in one.rows]
    return concat(found) if found else None


def _difference(before: Rows | None, after: Rows | None) -> tuple[Keys, Rows | None]:
    """The keys that are gone, and the rows that are new or have other weights, bit by bit."""
    if before is None or after is None or not len(before):
        return (np.zeros(0, np.int64) if before is None else before.keys), after
    lost = before.keys[~np.isin(before.keys, after.keys)]
    order = np.argsort(before.keys)
    held = order[np.minimum(np.searchsorted(before.keys, after.keys, sorter=order), len(before) - 1)]
    same = before.keys[held] == after.keys
    same &= (before.weights[held].view(np.uint32) == after.weights.view(np.uint32)).all(axis=1)
    return lost, after.take(~same)


class LayeredExport:
    """A complete export with incremental ones on top, looked up as one. Thread-safe."""

    def __init__(self, folders: Sequence[str | Path]) -> None:
        """``folders``: the complete export, then the incremental ones, oldest first. Raises ``CheckpointError`` if one
        is incomplete, or does not begin where the one before it ends."""
        layers = [Export(Path(one)) for one in folders]
        if not layers or layers[0].since:
            raise CheckpointError("the first of several exports must be a complete one")
        for folder, below, above in zip(folders[1:], layers, layers[1:], strict=False):
            if above.since != below.source:
                begins = f"has the changes since {above.since}" if above.since else "is complete"
                raise CheckpointError(f"{folder} {begins}, not since {below.source}. Give all exports in their order")
        self.layers = layers
        self.source, self.step = layers[-1].source, layers[-1].step

    def lookup(self, table: str, keys: ArrayLike, missing: str = "zeros") -> NDArray[np.float32]:
        """As ``Export.lookup``: the newest layer that has a key, or says that it is gone, decides."""
        newest = self.layers[-1]
        asked = newest.checked_keys(table, keys)
        unique, inverse = np.unique(asked.reshape(-1), return_inverse=True)
        found = np.zeros((len(unique), newest.dim(table)), np.float32)
        open_, there = np.ones(len(unique), np.bool_), np.zeros(len(unique), np.bool_)
        for layer in reversed(self.layers):
            if table not in layer.tables:
                continue
            where = np.flatnonzero(open_)
            some = np.zeros((len(where), found.shape[1]), np.float32)
            hit = layer.read(table, unique[where], some)
            found[where[hit]], there[where[hit]] = some[hit], True
            open_[where] = ~(hit | np.isin(unique[where], layer.gone(table)))
        missing_rows(newest.tables[table], unique, found, ~there, missing)
        return found[inverse].reshape(*asked.shape, found.shape[1])
