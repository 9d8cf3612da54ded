"""Measures end to end how fast batches of shuffled records become torch tensors, with edl's loader and two others.

    python -m benchmarks.data loader --rows 1000000 --runs 5

All three read the same file of records (a label, 13 floats, 26 ids of 64 bits: 264 bytes) in one process without a
launcher, in batches of the same size, shuffled, from the page cache. The consumer adds up one column, so that each
batch is really loaded. "torch DataLoader" is map-style over the same file in memory, fetched batch by batch
(`__getitems__`), in this process and with worker processes. "pyarrow.dataset" does not shuffle: its batches come in
storage order. Contenders take turns; figures are medians of the runs.
"""

from __future__ import annotations

import gc
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
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

import edl.torch as edl
from benchmarks.common import report

FLOATS, IDS, SHARD = 13, 26, 65536
OWN = "edl, IPC"
Batches = Iterator[dict[str, torch.Tensor]]


def write_inputs(folder: Path, rows: int) -> dict[str, Path]:
    """Write the same records as Arrow IPC and as Parquet."""
    draw = np.random.default_rng(0)

    def packed(values: Any) -> pa.Array:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])

    table = pa.table(
        {
            "label": draw.integers(0, 2, rows).astype(np.float32),
            "dense": packed(draw.random((rows, FLOATS), np.float32)),
            "ids": packed(draw.integers(0, 1 << 20, (rows, IDS))),
        }
    )
    paths = {"ipc": folder / "records.arrow", "parquet": folder / "records.parquet"}
    with pa.OSFile(str(paths["ipc"]), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, SHARD)
    pq.write_table(table, paths["parquet"], row_group_size=SHARD)
    return paths


def own(path: Path, batch: int, **options: Any) -> Batches:
    """edl's loader, without a launcher."""
    data = edl.Data("benchmark", str(path), batch_size=batch, shard_records=SHARD, **options)
    yield from data
    data.close()


class Records(Dataset[dict[str, torch.Tensor]]):
    """Map-style data set over the file, which it reads into memory."""

    def __init__(self, path: Path) -> None:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all().combine_chunks()
        self.columns = {name: _array(table.column(name).chunk(0)) for name in table.column_names}

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __getitems__(self, rows: list[int]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(column[rows]) for name, column in self.columns.items()}


def peer(records: Records, batch: int, workers: int) -> Batches:
    """torch's loader in its fastest form: a whole batch is fetched at once, and no collation is needed."""
    yield from DataLoader(records, batch, shuffle=True, num_workers=workers, collate_fn=lambda found: found)


def dataset(path: Path, batch: int, kind: str) -> Batches:
    """pyarrow's own batches, unshuffled."""
    for found in pads.dataset(path, format=kind).to_batches(batch_size=batch):
        yield {name: torch.from_numpy(_array(found.column(name)).copy()) for name in found.schema.names}


def _array(column: Any) -> Any:
    if pa.types.is_fixed_size_list(column.type):
        return column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)
    return column.to_numpy(zero_copy_only=False)


def measure(begin: Callable[[], Batches], rows: int) -> tuple[float, float]:
    """Records per second, and per second of CPU time; checks that each record has been received."""
    gc.collect()
    began_s, cpu_s, seen, total = time.perf_counter(), time.process_time(), 0, 0.0
    for batch in begin():
        seen += len(batch["label"])
        total += float(batch["label"].sum())
    elapsed_s = time.perf_counter() - began_s
    assert seen == rows, f"{seen} of {rows} records"
    return rows / elapsed_s, (time.process_time() - cpu_s) / elapsed_s


def show(results: dict[str, list[tuple[float, float]]], title: str) -> None:
    """Print the table."""
    table = Table(title=title)
    for heading in ("loader", "records/s, median", "min - max", "CPU", f"ratio to {OWN}"):
        table.add_column(heading, justify="left" if heading == "loader" else "right", no_wrap=True)
    base = statistics.median(rate for rate, _ in results[OWN])
    for name, runs in results.items():
        rates = [rate for rate, _ in runs]
        median = statistics.median(rates)
        spread = f"{min(rates):,.0f} - {max(rates):,.0f}"
        cpu = f"{statistics.median(cpu for _, cpu in runs):.2f}"
        table.add_row(name, f"{median:,.0f}", spread, cpu, f"{median / base:.2f}")
    Console(width=120).print(table)


@click.command("loader")
@click.option("--rows", default=1_000_000, show_default=True, help="Records of the file.")
@click.option("--batch", default=1024, show_default=True, help="Records of a batch.")
@click.option("--runs", default=5, show_default=True, help="Runs of each loader; they take turns.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all runs.")
def main(rows: int, batch: int, runs: int, json_path: Path | None) -> None:
    """Samples per second, end to end, compared with torch's DataLoader and pyarrow.dataset."""
    torch.set_num_threads(1)
    results: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="edl-loader-") as folder:
        paths = write_inputs(Path(folder), rows)
        records = Records(paths["ipc"])  # before the time is measured: the others read the file, this one is in memory
        contenders: dict[str, Callable[[], Batches]] = {
            OWN: lambda: own(paths["ipc"], batch),
            "edl, IPC, one shard at a time": lambda: own(paths["ipc"], batch, shuffle_shards=1),
            "edl, IPC, in order": lambda: own(paths["ipc"], batch, shuffle=False),
            "edl, Parquet": lambda: own(paths["parquet"], batch),
            "torch DataLoader, IPC, in process": lambda: peer(records, batch, 0),
            "torch DataLoader, IPC, 2 workers": lambda: peer(records, batch, 2),
            "pyarrow.dataset, IPC, in order": lambda: dataset(paths["ipc"], batch, "ipc"),
            "pyarrow.dataset, Parquet, in order": lambda: dataset(paths["parquet"], batch, "parquet"),
        }
        for run in range(runs):
            for name, begin in contenders.items():
                results.setdefault(name, []).append(measure(begin, rows))
            report.progress(f"run {run + 1} of {runs}, load {report.load_average():.1f}")
    show(results, f"{rows:,} records of 264 bytes, batches of {batch}")
    if json_path is not None:
        settings = {"rows": rows, "batch": batch, "machine": report.machine()}
        json_path.write_text(json.dumps({"settings": settings, "records_per_s_and_cpu": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
