"""Measures remote readers on one host: the cost of a shard, how readers add up, and the cost of a takeover.

    python -m benchmarks.data.remote [--records=200000] [--readers=1,2] [--secret]

Reader processes and the trainer share this machine's cores, so this shows cost, not the speed of a cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import ipc

from data_service.formats import FormatReader, open_reader
from data_service.manifest import Manifest, ShardRef
from data_service.remote.client import Pool, RemoteReader
from data_service.scan import scan

SECRET = "benchmark"  # noqa: S105 - of readers on this host that live for seconds
SHARDS = 16
HEAVY = "benchmarks.data.remote:heavy"


def heavy(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A decoder that costs far more than reading its bytes: about 40 ns of arithmetic outside Python per value."""
    columns = []
    for column in batch.columns:
        values = column.to_numpy(zero_copy_only=False).astype(np.float64)
        for _ in range(10):
            values = np.tanh(values)
        columns.append(pa.array(values.astype(np.float32)))
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def write(folder: Path, records: int) -> dict[str, Path]:
    """Write the same records as Arrow IPC, Parquet and CSV: 1 label, 13 floats, 26 integers."""
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {"label": rng.integers(0, 2, records)}
    columns |= {f"f{n}": rng.random(records, np.float32) for n in range(13)}
    columns |= {f"c{n}": rng.integers(0, 1 << 40, records) for n in range(26)}
    table = pa.table(columns)
    paths = {name: folder / f"data.{name}" for name in ("ipc", "parquet", "csv")}
    with ipc.new_file(paths["ipc"], table.schema) as writer:
        writer.write_table(table, max_chunksize=records // SHARDS)
    pq.write_table(table, paths["parquet"], row_group_size=records // SHARDS)
    import pyarrow.csv

    pyarrow.csv.write_csv(table, paths["csv"])
    return paths


@contextlib.contextmanager
def readers(count: int, authority: str) -> Iterator[tuple[Pool, list[subprocess.Popen[str]]]]:
    """Reader processes and a pool of connections to them; over TLS, unless ``authority`` is empty."""
    processes, addresses = [], []
    for number in range(count):
        process = subprocess.Popen(
            [sys.executable, "-m", "data_service", "reader", f"--function={HEAVY}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"secret": SECRET, "authority": authority}) + "\n")
        process.stdin.flush()
        addresses.append([f"r{number}", "127.0.0.1", json.loads(process.stdout.readline())["port"], SECRET])
        processes.append(process)
    pool = Pool()
    pool.update(addresses, authority)
    try:
        yield pool, processes
    finally:
        pool.close()
        for process in processes:
            process.kill()
            process.communicate()


def read_all(reader: FormatReader, refs: Sequence[ShardRef], epochs: int) -> tuple[float, float, int]:
    """Wall-clock seconds, CPU seconds of this process, and bytes of all shards, with every value touched."""
    wall, cpu, size = time.perf_counter(), time.process_time(), 0
    for _ in range(epochs):
        for number, ref in enumerate(refs):
            if isinstance(reader, RemoteReader):
                reader.expect(refs[number:])
            table = reader.read(ref)
            size += table.nbytes
            for column in table.columns:
                for chunk in column.chunks:
                    chunk.to_numpy(zero_copy_only=False).sum()
    return time.perf_counter() - wall, time.process_time() - cpu, size


def shards(manifest: Manifest) -> list[ShardRef]:
    return [manifest.ref(index) for index in range(len(manifest))]


def cpu_of(processes: Sequence[subprocess.Popen[str]]) -> float:
    times = [psutil.Process(process.pid).cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def compare(paths: dict[str, Path], records: int, counts: Sequence[int], epochs: int, authority: str) -> None:
    print(f"{'format':9}{'readers':>8}{'M rec/s':>9}{'GB/s':>7}{'trainer CPU s/GB':>18}{'reader CPU s/GB':>17}")
    for name, path in paths.items():
        manifest = scan(str(path), shard_records=records // SHARDS, shard_bytes=path.stat().st_size // SHARDS)
        refs = shards(manifest)

        def show(label: str, wall: float, cpu: float, size: int, theirs: float, kind: str = name) -> None:
            rate, gigabytes = records * epochs / wall / 1e6, size / 1e9
            print(
                f"{kind:9}{label:>8}{rate:9.2f}{gigabytes / wall:7.2f}{cpu / gigabytes:18.2f}{theirs / gigabytes:17.2f}"
            )

        here = open_reader(manifest.format)
        read_all(here, refs, 1)
        show("here", *read_all(here, refs, epochs), 0.0)
        for count in counts:
            with readers(count, authority) as (pool, processes):
                there = RemoteReader(pool, "set", manifest.format, policy="only")
                read_all(there, refs, 1)
                before = cpu_of(processes)
                measured = read_all(there, refs, epochs)
                show(str(count), *measured, cpu_of(processes) - before)


def decoding(path: Path, records: int, counts: Sequence[int], authority: str) -> None:
    refs = shards(scan(str(path), shard_records=records // SHARDS))
    name = HEAVY
    print("\nan expensive decode, Arrow IPC: M records/s and CPU seconds of the trainer for a million records")
    with readers(1, authority) as (pool, _):
        pool.update([])
        alone = RemoteReader(pool, "set", "ipc", local=open_reader("ipc"), policy="prefer", decode=name, ahead=1)
        wall, cpu, _size = read_all(alone, refs, 1)
        print(f"  here      {records / wall / 1e6:6.2f}  {cpu / records * 1e6:6.2f}")
    for count in counts:
        with readers(count, authority) as (pool, _):
            there = RemoteReader(pool, "set", "ipc", policy="only", decode=name)
            read_all(there, refs[:2], 1)
            wall, cpu, _size = read_all(there, refs, 1)
            print(
                f"  {count} reader{'s' if count > 1 else ' '} {records / wall / 1e6:6.2f}  {cpu / records * 1e6:6.2f}"
            )


def latency(path: Path, records: int, authority: str) -> None:
    ref = shards(scan(str(path), shard_records=records // SHARDS))[0]
    small = ShardRef(0, ref.file, 0, 100, 100)
    with readers(1, authority) as (pool, _):
        there = RemoteReader(pool, "set", "ipc", policy="only")
        there.read(small)
        times = []
        for _ in range(200):
            began = time.perf_counter()
            there.read(small)
            times.append((time.perf_counter() - began) * 1e3)
    print(f"\na shard of 100 records: p50 {np.percentile(times, 50):.2f} ms, p99 {np.percentile(times, 99):.2f} ms")


def takeover(path: Path, records: int, authority: str) -> None:
    ref = ShardRef(0, str(path), 0, records, records)
    times = []
    for _ in range(5):
        with readers(2, authority) as (pool, processes):
            stream = RemoteReader(pool, "set", "ipc", policy="only").batches(ref)
            got = next(stream).num_rows
            (busy,) = [int(name[1:]) for name, link in pool._links.items() if link.streams]
            processes[busy].kill()
            processes[busy].wait()
            longest, last = 0.0, time.perf_counter()
            for batch in stream:
                got += batch.num_rows
                longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
            assert got == records
            times.append(longest * 1e3)
    print(f"SIGKILL in the middle of a stream: longest wait for a batch {min(times):.0f} to {max(times):.0f} ms")


@click.command("remote")
@click.option("--records", default=200_000, show_default=True)
@click.option("--epochs", default=3, show_default=True)
@click.option("--readers", "wanted", default="1,2", show_default=True, help="Numbers of readers to compare.")
@click.option("--secret", is_flag=True, help="As in a job with a secret: over TLS.")
def main(records: int, epochs: int, wanted: str, secret: bool) -> None:
    """Compare local reading with reading through remote readers."""
    counts, authority = [int(count) for count in wanted.split(",")], SECRET if secret else ""
    print(f"{os.cpu_count()} cores, {records} records of {8 + 13 * 4 + 26 * 8} bytes in {SHARDS} shards")
    with tempfile.TemporaryDirectory() as folder:
        paths = write(Path(folder), records)
        compare(paths, records, counts, epochs, authority)
        decoding(paths["ipc"], records, counts, authority)
        latency(paths["ipc"], records, authority)
        takeover(paths["ipc"], records, authority)


if __name__ == "__main__":
    main()
