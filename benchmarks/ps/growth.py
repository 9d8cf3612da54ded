"""The longest call while a table grows, and the memory its rows take.

python -m benchmarks.ps growth
python -m benchmarks.ps memory
"""

from __future__ import annotations

import time
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import report
from ps.spec import Optimizer, Rule, TableSpec
from ps.store import Store

GOAL_S, GOAL_MEMORY = 0.050, 1.3


def resident() -> int:
    """This process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def grown(rows: int, batch: int, dim: int, rule: Rule) -> tuple[Store, list[tuple[float, float]], int]:
    """A store that has taken in so many keys; wall and CPU seconds of each pull; memory before."""
    store = Store()
    store.warm()
    store.define(TableSpec("t", dim, Optimizer(rule)))
    keys = np.random.default_rng(1).integers(-(1 << 62), 1 << 62, rows)
    out = np.ones((batch, dim), np.float32)
    before, spent = resident(), []
    for begin in range(0, rows, batch):
        some = keys[begin : begin + batch]
        start, cpu = time.perf_counter(), time.thread_time()
        store.pull("t", some, out[: len(some)], step=1)
        spent.append((time.perf_counter() - start, time.thread_time() - cpu))
    return store, spent, before


@click.command("growth")
@click.option("--begin", default=1_000_000, show_default=True, help="Rows before calls are timed.")
@click.option("--rows", default=20_000_000, show_default=True)
@click.option("--batch", default=20_000, show_default=True, help="New keys in a call.")
@click.option("--dim", default=16, show_default=True)
def main(begin: int, rows: int, batch: int, dim: int) -> None:
    """The longest pull of new keys while a table grows (Adagrad)."""
    store, spent, _ = grown(rows, batch, dim, Rule.ADAGRAD)
    table = Table(title=f"{begin:,} to {store.rows('t'):,} rows, dim {dim}, load {report.load_average():.1f}")
    for heading in ("one pull of new keys", "median", "99 %", "99.9 %", "longest", "goal"):
        table.add_column(heading, justify="right")
    for which, name in enumerate(("wall", "CPU")):
        times = np.array([one[which] for one in spent[begin // batch :]])
        shown = (np.median(times), np.quantile(times, 0.99), np.quantile(times, 0.999), times.max())
        table.add_row(f"{name} ms", *(f"{1000 * one:.1f}" for one in shown), f"{1000 * GOAL_S:.0f}")
    Console(width=150).print(table)


@click.command("memory")
@click.option("--rows", default=20_000_000, show_default=True)
@click.option("--dim", default=16, show_default=True)
@click.option("--rules", default="adagrad", show_default=True, help="One at a time, several in turn.")
def memory(rows: int, dim: int, rules: str) -> None:
    """Bytes a row against weights, state and key alone."""
    table = Table(title=f"{rows:,} rows, dim {dim}")
    for heading in ("rule", "raw B", "store B", "ratio", "resident B", "ratio", "goal"):
        table.add_column(heading, justify="right")
    for name in rules.split(","):
        store, _, before = grown(rows, 100_000, dim, Rule(name))
        raw = 4 * (dim + store.tables["t"].layout.slots) + 8
        held, lives = store.bytes() / store.rows("t"), (resident() - before) / store.rows("t")
        numbers = (f"{held:.1f}", f"{held / raw:.2f}", f"{lives:.1f}", f"{lives / raw:.2f}", f"{GOAL_MEMORY:.2f}")
        table.add_row(name, f"{raw}", *numbers)
        del store
    Console(width=150).print(table)
