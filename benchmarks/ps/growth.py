"""Measures the longest call while a table grows, and the memory of its rows.

python -m benchmarks.ps growth
python -m benchmarks.ps memory

A call is long because it does much work, which shows in its CPU time, or because the machine ran something else. The
latter is also measured separately: after each series of calls, idle loops run for the same CPU time as the calls.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.common import report
from ps.spec import Optimizer, TableSpec, UpdateRule
from ps.store.store import RowStore

GOAL_S, GOAL_MEMORY = 0.050, 1.3


STRETCH = 50
"""Calls between two checks of the machine."""


@dataclass(frozen=True, slots=True)
class Call:
    """One pull of new keys, in seconds, and the other costs of its thread."""

    rows: int
    wall: float
    cpu: float
    system: float
    faults: int
    switches: int
    """How often the thread was preempted."""


def resident() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def pulled(store: RowStore, keys: NDArray[np.int64], out: NDArray[np.float32]) -> Call:
    """Pull keys that are new."""
    before, start, cpu = resource.getrusage(resource.RUSAGE_THREAD), time.perf_counter(), time.thread_time()
    store.pull("t", keys, out[: len(keys)], step=1)
    wall, cpu = time.perf_counter() - start, time.thread_time() - cpu
    after = resource.getrusage(resource.RUSAGE_THREAD)
    faults, switches = after.ru_minflt - before.ru_minflt, after.ru_nivcsw - before.ru_nivcsw
    return Call(store.rows("t"), wall, cpu, after.ru_stime - before.ru_stime, faults, switches)


def idled(cpu: float) -> float:
    """Wall-clock seconds of an idle loop that takes this much CPU time."""
    start, end = time.perf_counter(), time.thread_time() + cpu
    while time.thread_time() < end:
        pass
    return time.perf_counter() - start


def grown(
    rows: int, batch: int, dim: int, rule: UpdateRule, watch: bool = False
) -> tuple[RowStore, list[Call], list[float], int]:
    """A store with that many keys; each pull; an idle loop after each (``watch``); memory before."""
    store = RowStore()
    store.warm()
    store.define(TableSpec("t", dim, Optimizer(rule)))
    keys = np.random.default_rng(1).integers(-(1 << 62), 1 << 62, rows)
    out = np.ones((batch, dim), np.float32)
    before = resident()
    calls: list[Call] = []
    idle: list[float] = []
    for begin in range(0, rows, batch):
        calls.append(pulled(store, keys[begin : begin + batch], out))
        if watch and len(calls) % STRETCH == 0:
            idle += [idled(call.cpu) for call in calls[-STRETCH:]]
    return store, calls, idle, before


@click.command("growth")
@click.option("--begin", default=1_000_000, show_default=True, help="Rows before calls are timed.")
@click.option("--rows", default=20_000_000, show_default=True)
@click.option("--batch", default=20_000, show_default=True, help="New keys in a call.")
@click.option("--dim", default=16, show_default=True)
def main(begin: int, rows: int, batch: int, dim: int) -> None:
    """The longest pull of new keys while a table grows (Adagrad)."""
    first, load = begin // batch, report.load_average()
    store, calls, idle, _ = grown(rows, batch, dim, UpdateRule.ADAGRAD, watch=True)
    calls, idle = calls[first:], idle[first:]
    load = max(load, report.load_average())
    table = Table(title=f"{begin:,} to {store.rows('t'):,} rows, dim {dim}, load {load:.1f}")
    for heading in ("one pull of new keys", "median", "99 %", "99.9 %", "longest", "over", "goal"):
        table.add_column(heading, justify="right")
    named = {
        "wall ms": [call.wall for call in calls],
        "CPU ms": [call.cpu for call in calls],
        "nothing, wall ms": idle,
    }
    for name, seconds in named.items():
        times = np.array(seconds)
        shown = (np.median(times), np.quantile(times, 0.99), np.quantile(times, 0.999), times.max())
        over = f"{np.count_nonzero(times > GOAL_S)}"
        table.add_row(name, *(f"{1000 * one:.1f}" for one in shown), over, f"{1000 * GOAL_S:.0f}")
    console = Console(width=150)
    console.print(table)
    console.print(longest(calls))


def longest(calls: list[Call]) -> Table:
    """Explain the longest calls: those with much CPU time are caused by the store, the others by the machine."""
    table = Table(title="the longest calls")
    for heading in ("at rows", "wall ms", "CPU ms", "of it system", "page faults", "switched away"):
        table.add_column(heading, justify="right")
    by_wall = sorted(calls, key=lambda call: -call.wall)[:5]
    by_cpu = sorted(calls, key=lambda call: -call.cpu)[:5]
    for call in by_wall + [one for one in by_cpu if one not in by_wall]:
        times = (f"{1000 * one:.1f}" for one in (call.wall, call.cpu, call.system))
        table.add_row(f"{call.rows:,}", *times, f"{call.faults:,}", f"{call.switches}")
    return table


@click.command("memory")
@click.option("--rows", default=20_000_000, show_default=True)
@click.option("--dim", default=16, show_default=True)
@click.option("--rules", default="adagrad", show_default=True, help="One at a time, several in turn.")
def memory(rows: int, dim: int, rules: str) -> None:
    """Bytes per row compared with weights, state and key alone."""
    table = Table(title=f"{rows:,} rows, dim {dim}")
    for heading in ("rule", "raw B", "store B", "ratio", "resident B", "ratio", "goal"):
        table.add_column(heading, justify="right")
    for name in rules.split(","):
        store, _, _, before = grown(rows, 100_000, dim, UpdateRule(name))
        raw = 4 * (dim + store.tables["t"].layout.slots) + 8
        held, lives = store.bytes() / store.rows("t"), (resident() - before) / store.rows("t")
        numbers = (f"{held:.1f}", f"{held / raw:.2f}", f"{lives:.1f}", f"{lives / raw:.2f}", f"{GOAL_MEMORY:.2f}")
        table.add_row(name, f"{raw}", *numbers)
        del store
    Console(width=150).print(table)
