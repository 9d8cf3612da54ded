"""A process of its own that fills a store, and prints what the store says of its memory and what the kernel says.

    python tests/support/ps_memory.py <kernels> <tables> <rows of each> <dim> <rule> <keys in a pull> [<most bytes>]

One line of JSON: ``said``, what ``RowStore.bytes`` gives; ``kernel``, by how much the process's anonymous memory in
``/proc/self/smaps_rollup`` has grown meanwhile; ``rows``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from ps.spec import Initial, InitMethod, Optimizer, TableSpec, UpdateRule
from ps.store.slabs import settled
from ps.store.store import RowStore


def anonymous() -> int:
    """This process's memory that is no file's, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024


def main(kernels: str, tables: int, rows: int, dim: int, rule: str, batch: int, most: int) -> None:
    """Measure the memory of a process with these tables."""
    store = RowStore(kernels=kernels, most_bytes=most)
    store.warm()
    spec = TableSpec("warm", dim, Optimizer(UpdateRule(rule)), Initial(InitMethod.UNIFORM))
    store.define(spec)
    out = np.empty((batch, dim), np.float32)
    out[:] = 0
    some = np.arange(batch, dtype=np.int64)
    for _ in range(2):
        store.pull("warm", some, out, step=1, insert=False)
    names = [f"t{number}" for number in range(tables)]
    for name in names:
        store.define(TableSpec(name, dim, spec.optimizer, spec.initial))
    before, said = anonymous(), store.bytes()
    for begin in range(0, rows, batch):
        keys = some[: min(batch, rows - begin)] + begin
        for name in names:
            store.pull(name, keys * 977, out[: len(keys)], step=1)
    settled()  # pages that the thread was asked for
    found = {"said": store.bytes() - said, "kernel": anonymous() - before, "rows": sum(map(store.rows, names))}
    print(json.dumps(found))


if __name__ == "__main__":
    tables, rows, dim = map(int, sys.argv[2:5])
    main(sys.argv[1], tables, rows, dim, sys.argv[5], int(sys.argv[6]), int((*sys.argv, "0")[7]))
