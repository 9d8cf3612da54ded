"""Measures how well and how fast records are shuffled: each setting of edl's loader compared with torch's DataLoader.

    python -m benchmarks.data shuffle --rows 1000000 --shards 64 --runs 5

Quality, of batches of ``--batch`` records, is relative to a global shuffle of the same records (1 is equally good):
"spread" is the standard deviation of the positions in the data set that a batch's records come from; "sources" is the
effective number of shards that they come from (one over the sum of squared shares). Speed: records per second, and
records per second of CPU time of the process. Contenders take turns; figures are medians of the runs, with lowest and
highest. torch's loader fetches a whole batch at once (``__getitems__``), and once record by record, as for data sets
without it.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, default_collate

import edl.torch as edl
from benchmarks.common import report
from benchmarks.data.loader import FLOATS, IDS, Records

Batches = Iterator[dict[str, torch.Tensor]]
SINGLE_SHARE = 20
"""Record by record only one in this many is fetched: all of them would take minutes and give the same result."""


def write_input(path: Path, rows: int, shard: int) -> None:
    """Write records of 264 bytes; the label is the record's number."""
    draw = np.random.default_rng(0)

    def packed(values: Any) -> pa.Array:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])

    table = pa.table(
        {
            "label": np.arange(rows, dtype=np.float32),
            "dense": packed(draw.random((rows, FLOATS), np.float32)),
            "ids": packed(draw.integers(0, 1 << 20, (rows, IDS))),
        }
    )
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, shard)


class Singly(Records):
    """The same records for a loader that fetches one at a time."""

    __getitems__ = None  # type: ignore[assignment]

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: column[row] for name, column in self.columns.items()}

    def __len__(self) -> int:
        return super().__len__() // SINGLE_SHARE


def own(path: Path, batch: int, shard: int, mixed: int | None) -> Batches:
    """edl's loader, without a launcher."""
    data = edl.Data("benchmark", str(path), batch_size=batch, shard_records=shard, shuffle_shards=mixed)
    yield from data
    data.close()


def peer(records: Records, batch: int) -> Batches:
    """torch's loader."""
    collate = default_collate if isinstance(records, Singly) else (lambda found: found)
    yield from DataLoader(records, batch, shuffle=True, collate_fn=collate)


def quality(batches: list[Any], rows: int, shard: int) -> tuple[float, float]:
    """Spread and sources of whole batches, relative to a global shuffle."""
    order = np.random.default_rng(1).permutation(rows)
    size = len(batches[0])
    best = [_measures(order[first : first + size], rows, shard) for first in range(0, rows - size + 1, size)]
    found = [_measures(batch, rows, shard) for batch in batches if len(batch) == size]
    (spread, sources), (best_spread, best_sources) = np.mean(found, axis=0), np.mean(best, axis=0)
    return float(spread / best_spread), float(sources / best_sources)


def _measures(places: Any, rows: int, shard: int) -> tuple[float, float]:
    shares = np.bincount(places.astype(np.int64) // shard) / len(places)
    return float(np.std(places / rows)), float(1 / np.square(shares).sum())


def measure(begin: Callable[[], Batches]) -> tuple[float, float, list[Any]]:
    """Records per second, records per CPU second, and the origin of the records of each batch."""
    places = []
    began_s, cpu_s = time.perf_counter(), time.process_time()
    for batch in begin():
        places.append(batch["label"].numpy())
    elapsed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    seen = sum(len(one) for one in places)
    return seen / elapsed_s, seen / cpu_s, places


@click.command("shuffle")
@click.option("--rows", default=1_000_000, show_default=True, help="Records of the file; at most 16 M.")
@click.option("--shards", default=64, show_default=True, help="Shards of the file.")
@click.option("--batch", default=1024, show_default=True, help="Records of a batch.")
@click.option("--runs", default=5, show_default=True, help="Runs of each setting; they take turns.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all runs.")
def main(rows: int, shards: int, batch: int, runs: int, json_path: Path | None) -> None:
    """Quality and speed of shuffling, side by side."""
    torch.set_num_threads(1)
    shard = -(-rows // shards)
    results: dict[str, list[tuple[float, float]]] = {}
    qualities: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory(prefix="edl-shuffle-") as folder:
        path = Path(folder) / "records.arrow"
        write_input(path, rows, shard)
        whole, singly = Records(path), Singly(path)
        contenders: dict[str, Callable[[], Batches]] = {
            "edl, default": lambda: own(path, batch, shard, None),
            "edl, shuffle_shards=1": lambda: own(path, batch, shard, 1),
            "edl, shuffle_shards=4": lambda: own(path, batch, shard, 4),
            f"edl, shuffle_shards={shards}": lambda: own(path, batch, shard, shards),
            "torch, __getitems__": lambda: peer(whole, batch),
            "torch, __getitem__": lambda: peer(singly, batch),
        }
        for run in range(runs):
            for name, begin in contenders.items():
                rate, cpu_rate, places = measure(begin)
                results.setdefault(name, []).append((rate, cpu_rate))
                if run == 0 and len(places) > SINGLE_SHARE:
                    qualities[name] = quality(places, rows // (SINGLE_SHARE if "item__" in name else 1), shard)
            report.progress(f"run {run + 1} of {runs}, load {report.load_average():.1f}")
    table = Table(title=f"{rows:,} records of 264 bytes, {shards} shards, batches of {batch}")
    for heading in ("loader", "spread", "sources", "records/s", "min - max", "records/CPU s", "min - max"):
        table.add_column(heading, justify="left" if heading == "loader" else "right", no_wrap=True)
    for name, runs_of in results.items():
        cells = [f"{one:.2f}" for one in qualities.get(name, ())] or ["", ""]
        for values in zip(*runs_of, strict=True):
            cells += [f"{statistics.median(values):,.0f}", f"{min(values):,.0f} - {max(values):,.0f}"]
        table.add_row(name, *cells)
    Console(width=130).print(table)
    if json_path is not None:
        settings = {"rows": rows, "shards": shards, "batch": batch, "machine": report.machine()}
        found = {"settings": settings, "quality": qualities, "records_per_s_and_cpu_s": results}
        json_path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
