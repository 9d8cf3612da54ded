"""Files of every format for tests of readers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
from pyarrow import ipc

from data_service.formats import open_reader
from data_service.formats.arrays import from_numpy
from data_service.formats.options import FormatOptions
from data_service.manifest import Manifest, ShardRef

ROWS = 1000


def numbers(rows: int = ROWS) -> pa.Table:
    """A column of each common kind."""
    ids = np.arange(rows)
    return pa.table(
        {
            "id": ids,
            "x": (ids * 0.5).astype(np.float32),
            "text": [f"zeile {i} ü" for i in range(rows)],
            "dense": from_numpy(np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)),
        }
    )


def write_ipc(path: Path, table: pa.Table, batch: int = 100, **options: Any) -> None:
    with ipc.new_file(path, table.schema, options=ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, batch)


def write_stream(path: Path, table: pa.Table, batch: int = 100) -> None:
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, batch)


def write_parquet(path: Path, table: pa.Table, batch: int = 100) -> None:
    pq.write_table(table, path, row_group_size=batch)


def write_feather(path: Path, table: pa.Table, batch: int = 100) -> None:
    feather.write_feather(table, str(path), chunksize=batch, compression="lz4")


def write_csv(path: Path, rows: int = ROWS, end: str = "\n") -> None:
    lines = ["id,x,text", *(f"{i},{i / 2},zeile {i} ü" for i in range(rows))]
    path.write_bytes(end.join(lines).encode() + end.encode())


def write_jsonl(path: Path, rows: int = ROWS) -> None:
    path.write_text("".join(json.dumps({"id": i, "x": i / 2, "text": f"zeile {i} ü"}) + "\n" for i in range(rows)))


def refs(manifest: Manifest) -> list[ShardRef]:
    return [manifest.ref(index) for index in range(len(manifest))]


def read_all(manifest: Manifest, columns: list[str] | None = None, options: FormatOptions | None = None) -> pa.Table:
    reader = open_reader(manifest.format, columns, options=options)
    tables = []
    for ref in refs(manifest):
        table = reader.read(ref)
        assert ref.records in (-1, table.num_rows)
        assert pa.concat_tables(list(reader.pieces(ref))).equals(table.combine_chunks()) or not table.num_rows
        tables.append(table)
    reader.close()
    return pa.concat_tables(tables)


WRITERS: dict[str, Callable[[Path, pa.Table], None]] = {
    "a.arrow": write_ipc,
    "a.arrows": write_stream,
    "a.feather": write_feather,
    "a.parquet": write_parquet,
}
