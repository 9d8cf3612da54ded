"""Start a new job from the weights of another one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edl.errors import PsError
from ps.client import export
from ps.client.frontend import part
from ps.rows import RowOp
from ps.spec import Initial, InitMethod, Optimizer, TableSpec, UpdateRule

MARK = TableSpec("edl.warm-start", 1, Optimizer(UpdateRule.ADD), Initial(InitMethod.ZEROS))
"""Its only row says that the job has its weights, so that a trainer that is restarted does not set them again."""
AT_ONCE = 1 << 16
"""Rows per push."""


def warm_start(source: str | Path, tables: str | Sequence[str] = ()) -> dict[str, int]:
    """Set the weights of tables to those of an export (``python -m ps export``); return the number of rows by table.

    ``tables``: only these; empty means all that the export and this script have in common, except those of ``Auc``.
    Optimizers start anew. Keys that already have a row keep it, except in dense tables. Does nothing, and returns
    nothing, in a job that has done it before, or was restored from a checkpoint after that. Call it in one trainer,
    before it trains. Raises ``PsError`` if a table differs, before anything is set.
    """
    model = export.open(source)
    part.declare(MARK)
    client = part.client
    if model.since:
        raise PsError(f"{source} has only the changes since {model.since}. Start from a complete export")
    # The other job's own mark does not say that this one has its weights.
    common = (model.tables.keys() & client.tables.keys()) - {MARK.name} - part.results
    wanted = [tables] if isinstance(tables, str) else list(tables) or sorted(common)
    for name in wanted:
        _check(name, model.tables.get(name), client.tables.get(name), str(source))
    if client.pull(MARK.name, np.zeros(1, np.int64), insert=False)[0, 0]:
        return {}
    found = {}
    for name in wanted:
        op = RowOp.ASSIGN if client.tables[name].dense else RowOp.FIRST
        for keys in model.keys(name):
            for begin in range(0, len(keys), AT_ONCE):
                some = np.array(keys[begin : begin + AT_ONCE])
                client.push({name: (some, model.lookup(name, some, missing="error"))}, op=op)
        found[name] = model.rows(name)
    client.push({MARK.name: (np.zeros(1, np.int64), np.ones((1, 1), np.float32))}, op=RowOp.ASSIGN)
    part.refresh()
    return found


def _check(name: str, theirs: TableSpec | None, mine: TableSpec | None, source: str) -> None:
    if theirs is None or mine is None:
        raise PsError(f"table {name}: {'the script' if theirs else f'the export {source}'} has no such table")
    if theirs.dim != mine.dim or theirs.rows != mine.rows:
        shapes = f"{mine.rows or 'any'} rows of {mine.dim} here, {theirs.rows or 'any'} of {theirs.dim} in {source}"
        raise PsError(f"table {name}: {shapes}. Leave it out of tables")
    if theirs.parameters and mine.parameters and theirs.parameters != mine.parameters:
        raise PsError(f"table {name}: its parameters have other names or shapes in {source}. Leave it out of tables")
