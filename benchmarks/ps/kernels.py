"""Measures the store's pull and push against the same work in C++, on one thread, and two threads against one.

    python -m benchmarks.ps kernels

``reference.cpp`` (a flat table that keeps the counters of its rows and refuses damaged gradients; without shards,
locks, push numbers or growth) is compiled here by ``g++`` for this processor. Batches alternate between the two, so
that other load of the machine affects both; times on one thread are CPU time. Every batch has different keys. The
reference asks for large pages, as the store does; it also runs without them ("small pages"), like a C++ program that
does not ask for them.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.common import report
from ps.rows import TablePush, TrainerPush
from ps.spec import Initial, InitMethod, Optimizer, TableSpec, UpdateRule
from ps.store.slabs import settled
from ps.store.store import RowStore

GOALS = {"pull": 0.75, "push": 0.85}
RATE, EPS = 0.1, 1e-8
Keys = NDArray[np.int64]


class Reference:
    """The C++ table."""

    def __init__(self, folder: Path, dim: int, keys: Keys, batch: int, huge: bool) -> None:
        library = folder / "reference.so"
        if not library.exists():
            source = Path(__file__).with_name("reference.cpp")
            # Without the last flag every square root is calculated separately, because it might have to set errno.
            flags = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno"]
            subprocess.run(["g++", *flags, "-o", str(library), str(source)], check=True)
        self._calls = ctypes.CDLL(str(library))
        address, number, real, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_uint32
        self._calls.table_make.restype = address
        self._calls.table_make.argtypes = [number, number, address, number, ctypes.c_int]
        self._calls.table_pull.argtypes = [address, number, address, address, small]
        self._calls.table_push.argtypes = [address, number, address, address, real, real, small]
        self._calls.table_free.argtypes = [address]
        self._table = self._calls.table_make(dim, len(keys), keys.ctypes.data, batch, int(huge))

    def pull(self, keys: Keys, out: NDArray[np.float32]) -> None:
        self._calls.table_pull(self._table, len(keys), keys.ctypes.data, out.ctypes.data, 2)

    def push(self, keys: Keys, grads: NDArray[np.float32]) -> None:
        self._calls.table_push(self._table, len(keys), keys.ctypes.data, grads.ctypes.data, RATE, EPS, 2)

    def close(self) -> None:
        self._calls.table_free(self._table)


class Ours:
    """A store with one table of the same keys."""

    def __init__(self, dim: int, keys: Keys, batch: int) -> None:
        self.store = RowStore()
        self.store.warm()
        self.store.define(
            TableSpec("t", dim, Optimizer(UpdateRule.ADAGRAD, lr=RATE, eps=EPS), Initial(InitMethod.ZEROS))
        )
        self._seqs: dict[int, int] = {}
        out = np.empty((batch, dim), np.float32)
        for begin in range(0, len(keys), batch):
            some = keys[begin : begin + batch]
            self.store.pull("t", some, out[: len(some)], step=1)
        settled()  # the kernel joins pages in the background

    def pull(self, keys: Keys, out: NDArray[np.float32]) -> None:
        self.store.pull("t", keys, out, step=2)

    def push(self, keys: Keys, grads: NDArray[np.float32], trainer: int = 1) -> None:
        self._seqs[trainer] = self._seqs.get(trainer, 0) + 1
        self.store.push([TrainerPush(trainer, self._seqs[trainer], [TablePush("t", keys, grads)])], step=2)


def batches(kind: str, keys: Keys, size: int, count: int, generator: np.random.Generator) -> list[Keys]:
    """Uniform: any key; zipf: a fifth of the keys are distinct."""
    if kind == "uniform":
        return [keys[generator.integers(0, len(keys), size)] for _ in range(count)]
    return [keys[(generator.zipf(1.2, size) - 1) % len(keys)] for _ in range(count)]


def compared(work: list[Keys], *ways: Callable[[Keys], None]) -> list[list[float]]:
    """CPU seconds of each batch by contender; each contender goes first equally often."""
    spent: list[list[float]] = [[] for _ in ways]
    for number, keys in enumerate(work):
        for turn in range(len(ways)):
            which = (number + turn) % len(ways)
            start = time.thread_time()
            ways[which](keys)
            spent[which].append(time.thread_time() - start)
    return spent


def scaling(work: list[Keys], one: Callable[[int, Keys], None], rounds: int) -> list[float]:
    """The rate of two threads relative to one, in wall-clock time, run by run."""

    def crew(count: int) -> float:
        def run(number: int) -> None:
            for keys in work:
                one(number, keys)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return count / (time.perf_counter() - start)

    return [crew(2) / crew(1) for _ in range(rounds)]


def measure(table: Table, folder: Path, dim: int, rows: int, size: int, count: int) -> None:
    """All measurements of one dimension."""
    generator = np.random.default_rng(dim)
    keys = generator.permutation(rows).astype(np.int64) * 977 + 13
    ours, theirs, small = Ours(dim, keys, size), *(Reference(folder, dim, keys, size, huge) for huge in (True, False))
    outs = [np.empty((size, dim), np.float32) for _ in range(2)]
    grads = generator.standard_normal((size, dim)).astype(np.float32)
    calls: dict[str, tuple[list[Callable[[Keys], None]], Callable[[int, Keys], None]]] = {
        "pull": (
            [
                lambda k: ours.pull(k, outs[0]),
                lambda k: theirs.pull(k, outs[1]),
                lambda k: small.pull(k, outs[1]),
            ],
            lambda number, k: ours.pull(k, outs[number]),
        ),
        "push": (
            [lambda k: ours.push(k, grads), lambda k: theirs.push(k, grads), lambda k: small.push(k, grads)],
            lambda number, k: ours.push(k, grads, 10 + number),
        ),
    }
    for kind in ("uniform", "zipf"):
        for name, (ways, threaded) in calls.items():
            work = batches(kind, keys, size, count, generator)
            spent = compared(work, *ways)
            if (name, kind) == ("push", "uniform"):  # later, two threads have pushed to ours
                for way in calls["pull"][0][:2]:
                    way(work[0])
                assert np.allclose(outs[0], outs[1], rtol=1e-3, atol=1e-4), "they did not do the same"
            ratios = [[b / a for a, b in zip(spent[0], other, strict=True)] for other in spent[1:]]
            quarters = [statistics.quantiles(some, n=4) for some in ratios]
            twice = scaling(work[: max(4, count // 3)], threaded, 3)
            table.add_row(
                f"{name} dim {dim} {kind}",
                *(f"{size / statistics.median(one) / 1e6:.1f}" for one in spent),
                *(f"{middle:.2f} ({low:.2f} - {high:.2f})" for low, middle, high in quarters),
                f"{GOALS[name]:.2f}",
                f"{statistics.median(twice):.2f} ({min(twice):.2f} - {max(twice):.2f})",
            )
            report.progress(f"{name} dim {dim} {kind}: {quarters[0][1]:.2f} of C++")
    theirs.close()
    small.close()


@click.command("kernels")
@click.option("--rows", default=5_000_000, show_default=True)
@click.option("--batch", default=100_000, show_default=True, help="Keys in a call.")
@click.option("--batches", "count", default=30, show_default=True, help="Of each kind.")
@click.option("--dims", default="16,64", show_default=True)
def main(rows: int, batch: int, count: int, dims: str) -> None:
    """Store.pull and Store.push (Adagrad) against C++, and two threads against one."""
    table = Table(title=f"{rows:,} rows, batches of {batch:,} keys, load {report.load_average():.1f}")
    rates = ("ours M/s", "C++ M/s", "small pages")
    for heading in ("what", *rates, "ratio (quartiles)", "to small pages", "goal", "2 threads / 1"):
        table.add_column(heading, justify="left" if heading == "what" else "right", no_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        for dim in map(int, dims.split(",")):
            measure(table, Path(folder), dim, rows, batch, count)
    Console(width=170).print(table)
