"""Measures the readers: mapped Arrow IPC against Parquet, read by edl and by pyarrow.dataset.

    python -m benchmarks.data readers --rows 1000000 --runs 7

Each run reads the same records shard by shard, in the layout of a click log (a label, 13 floats, 26 ids of 64 bits: 264
bytes per record), on one thread, from the page cache. "Handed over" ends when the arrays exist; "touched" when each
value has been read once. CPU seconds are those of the whole process; contenders take turns.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from benchmarks.common import report
from data_service.convert.conversion import convert
from data_service.convert.recipe import Pack, Recipe
from data_service.formats import open_reader
from data_service.formats.arrays import to_numpy
from data_service.scan import scan

FLOATS, IDS, BATCH = 13, 26, 65536
RECORD_BYTES = 4 + 4 * FLOATS + 8 * IDS
GOAL = 10.0
OWN = "edl, IPC mapped"
PEER = "edl, Parquet snappy"


def write_inputs(folder: Path, rows: int) -> dict[str, Path]:
    """Write the same records in each format; the fast ones are made by the converter."""
    draw = np.random.default_rng(0)
    columns: dict[str, Any] = {"label": draw.integers(0, 2, rows).astype(np.float32)}
    for index in range(FLOATS):
        columns[f"I{index + 1}"] = np.round(draw.exponential(50, rows)).astype(np.float32)
    for index in range(IDS):
        columns[f"C{index + 1}"] = (draw.random(rows) ** 3 * 4 ** (index % 10 + 1)).astype(np.int64)
    table = pa.table(columns)
    for compression in ("snappy", "none"):
        (folder / compression).mkdir()
        path = folder / compression / "part.parquet"
        pq.write_table(table, path, compression=compression, row_group_size=BATCH)
    packs = (
        Pack("dense", tuple(f"I{i + 1}" for i in range(FLOATS))),
        Pack("cat", tuple(f"C{i + 1}" for i in range(IDS))),
    )
    for compression in ("none", "lz4"):
        recipe = Recipe(packs=packs, compression=compression, shard_records=BATCH)
        convert(str(folder / "snappy"), str(folder / f"ipc-{compression}"), recipe)
    return {
        OWN: folder / "ipc-none",
        "edl, IPC lz4": folder / "ipc-lz4",
        PEER: folder / "snappy",
        "edl, Parquet uncompressed": folder / "none",
        "pyarrow.dataset, Parquet snappy": folder / "snappy",
    }


def shards_of_edl(folder: Path) -> Iterator[dict[str, Any]]:
    """Shards as a trainer gets them: columns as arrays, one shard after the other."""
    manifest = scan(str(folder))
    reader = open_reader(manifest.format)
    for index in range(len(manifest)):
        yield to_numpy(reader.read(manifest.ref(index)))
    reader.close()


def shards_of_dataset(folder: Path) -> Iterator[dict[str, Any]]:
    """Shards read by pyarrow."""
    for batch in pads.dataset(folder, format="parquet").to_batches(batch_size=BATCH, use_threads=False):
        yield to_numpy(pa.Table.from_batches([batch]))


def touch(arrays: dict[str, Any]) -> int:
    """Read each value once; the sum shows that all contenders read the same number of bytes."""
    total = 0
    for array in arrays.values():
        np.add.reduce(array.reshape(-1), dtype=array.dtype)
        total += array.nbytes
    return total


def measure(
    shards: Callable[[Path], Iterable[dict[str, Any]]], folder: Path, touched: bool, rows: int
) -> tuple[float, float]:
    """CPU and wall-clock seconds."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    size = sum(touch(arrays) if touched else sum(a.nbytes for a in arrays.values()) for arrays in shards(folder))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert size == rows * RECORD_BYTES, f"{folder}: {size} bytes instead of {rows * RECORD_BYTES}"
    return cpu, wall


def show(
    rows: int, runs: int, sizes: dict[str, int], found: dict[tuple[str, bool], list[tuple[float, float]]]
) -> float:
    """Print the table; returns by what factor the mapped files are faster than Parquet with every value touched."""
    medians = {key: statistics.median(cpu for cpu, _ in values) for key, values in found.items()}
    table = Table(title=f"{rows:,} records of {RECORD_BYTES} bytes, {runs} runs, one thread")
    for heading in ("reader", "file MB", "", "CPU s", "min - max", "wall s", "min - max", "M records/CPU s", "IPC is"):
        table.add_column(heading, justify="left" if heading in ("reader", "") else "right", no_wrap=True)
    for touched in (False, True):
        for name, size in sizes.items():
            cpus, walls = zip(*found[name, touched], strict=True)
            table.add_row(
                name,
                f"{size / 1e6:.0f}",
                "touched" if touched else "handed over",
                f"{statistics.median(cpus):.4f}",
                f"{min(cpus):.4f} - {max(cpus):.4f}",
                f"{statistics.median(walls):.4f}",
                f"{min(walls):.4f} - {max(walls):.4f}",
                f"{rows / statistics.median(cpus) / 1e6:.1f}",
                f"{medians[name, touched] / medians[OWN, touched]:.1f}x",
            )
        table.add_section()
    console = Console(width=max(Console().width, 140))
    console.print(table)
    ratio = medians[PEER, True] / medians[OWN, True]
    verdict = "reached" if ratio >= GOAL else "missed"
    console.print(
        f"CPU of Parquet snappy over CPU of mapped IPC, every value touched: {ratio:.1f} (goal {GOAL:g}: {verdict})"
    )
    return ratio


@click.command("readers")
@click.option("--rows", default=1_000_000, show_default=True, help="Records.")
@click.option("--runs", default=7, show_default=True, help="Runs of each reader.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all runs.")
def main(rows: int, runs: int, json_path: Path | None) -> None:
    """Mapped Arrow IPC against Parquet: CPU and wall seconds, handed over and with every value touched."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    before = report.load_average()
    with tempfile.TemporaryDirectory(prefix="edl-readers-") as name:
        report.progress("writing the inputs")
        folders = write_inputs(Path(name), rows)
        sizes = {key: sum(one.stat().st_size for one in path.glob("p*")) for key, path in folders.items()}
        found: dict[tuple[str, bool], list[tuple[float, float]]] = {}
        for number in range(-1, runs):  # the first one only fills the page cache
            report.progress(f"run {number + 1} of {runs}")
            for touched in (False, True):
                for key, folder in folders.items():
                    shards = shards_of_dataset if key.startswith("pyarrow") else shards_of_edl
                    taken = measure(shards, folder, touched, rows)
                    if number >= 0:
                        found.setdefault((key, touched), []).append(taken)
        ratio = show(rows, runs, sizes, found)
    if json_path is not None:
        data = {
            "machine": report.machine(),
            "load_before": before,
            "rows": rows,
            "file_bytes": sizes,
            "ratio_touched": ratio,
            "runs": [
                {
                    "reader": key,
                    "touched": touched,
                    "cpu_s": [cpu for cpu, _ in values],
                    "wall_s": [wall for _, wall in values],
                }
                for (key, touched), values in found.items()
            ],
        }
        json_path.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
