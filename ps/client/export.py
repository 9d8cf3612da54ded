"""Export for inference: the weights of tables by key, in files that are memory-mapped when read.

    export.json                 the tables' definitions and their origin
    <table>.arrow               Arrow IPC: ``key`` (int64, ascending), ``weights`` (fixed-size float32 or float16 lists)
    <table>.safetensors         alternatively: ``keys`` (int64, ascending), ``weights``
    <table>.gone.npy            exports of changes: keys whose rows are gone (int64, ascending)

``open(folder).lookup(table, keys)`` reads them. Optimizer state is not exported.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edl.adapters.files import PlainFiles
from edl.adapters.remote_files import open_files
from edl.errors import CheckpointError, EdlError, ProtocolError, PsError, SettingError
from edl.wire.json_messages import from_plain, to_plain
from edl.wire.snapshot import Layout, Leaf, Meta, header_bytes, parse_header
from ps.checkpoint.directory import CheckpointDirectory
from ps.checkpoint.manifest import checkpoint_number
from ps.client.dense import DenseLayout
from ps.protocol.half_precision import wire_of
from ps.rows import Rows
from ps.spec import BUCKETS, TableSpec
from ps.store.kernels import plain
from ps.store.rules import TableLayout as RowLayout

if TYPE_CHECKING:
    from ps.client.client import PsClient

LIST_FILE = "export.json"
FORMAT = 1
ARROW, SAFETENSORS = "arrow", "safetensors"
DTYPES: Mapping[str, np.dtype[Any]] = {"f4": np.dtype("<f4"), "f2": np.dtype("<f2")}
BATCH_ROWS = 1 << 20
"""Rows per Arrow record batch."""
MISSING = ("zeros", "initial", "error")
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Exported:
    """Summary of a written export: folder, rows by table, total size in bytes."""

    folder: str
    rows: Mapping[str, int]
    bytes: int


# --- writing ---------------------------------------------------------------------------------------------------------


def write(
    out: str | Path,
    tables: Sequence[TableSpec],
    rows: Callable[[TableSpec], Iterable[Rows]],
    *,
    format: str = ARROW,
    dtype: str = "f4",
    source: str = "",
    step: int = 0,
    since: str = "",
    gone: Callable[[TableSpec], NDArray[np.int64]] | None = None,
) -> Exported:
    """Write an export. ``rows`` yields all rows of a table, in pieces and in any order, without repeated keys. With
    ``since``, the name of an older checkpoint, they are the changes, and ``gone`` returns the keys without a row, in
    ascending order; it is called after the table's rows were read. ``dtype``: ``f4`` or ``f2``; tables with the rule
    ``ADD`` are always written as ``f4``, so that counts stay exact. A weight that ``f2`` cannot hold is refused.

    ``out``: a folder that does not exist or is empty; after an error, what was written is gone. Holds the keys in
    memory twice, and the weights on disk twice while writing. Raises ``SettingError`` and ``CheckpointError``.
    """
    if format not in (ARROW, SAFETENSORS):
        raise SettingError("--format", format, f"must be {ARROW} or {SAFETENSORS}")
    if dtype not in DTYPES:
        raise SettingError("--dtype", dtype, f"must be {' or '.join(DTYPES)}")
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingError("output folder", str(folder), "already exists and is not an empty folder")
    with contextlib.ExitStack() as undo:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            listed: dict[str, Any] = {}
            for spec in tables:
                file, gone_file = folder / f"{spec.name}.{format}", folder / f"{spec.name}.gone.npy"
                kind = wire_of(spec, dtype)
                undo.callback(_discard, file)
                count = _write_table(file, spec, rows(spec), format, kind)
                listed[spec.name] = {
                    "file": file.name,
                    "rows": count,
                    "bytes": file.stat().st_size,
                    "dtype": kind,
                    "spec": to_plain(spec),
                }
                if gone is not None:
                    listed[spec.name]["gone"] = gone_file.name
                    undo.callback(_discard, gone_file)
                    np.save(gone_file, gone(spec))
            about = {"format": FORMAT, "kind": format, "source": source, "step": step, "tables": listed}
            if since:
                about["since"] = since
            PlainFiles(folder).write(LIST_FILE, [json.dumps(about, indent=1).encode() + b"\n"])
        except OSError as error:
            raise CheckpointError(f"cannot write the export to {folder}: {error.strerror or error}") from error
        undo.pop_all()
    size = sum(one["bytes"] for one in listed.values())
    return Exported(str(folder), {name: one["rows"] for name, one in listed.items()}, size)


def export_checkpoint(
    run: str, out: str | Path, *, format: str = ARROW, dtype: str = "f4", tables: Sequence[str] = ()
) -> Exported:
    """Export a checkpoint. ``run``: path or URL of its folder (``…/ps/<job>/checkpoint-<n>``), or of the job's folder
    (``…/ps/<job>``) for its newest usable one. ``tables``: only these; empty means all. Raises as ``write`` does."""
    directory, name = locate(run)
    manifest = directory.chain(name)[0].manifest
    wanted = wanted_tables({spec.name: spec for spec in manifest.tables}, tables)
    everything = np.ones(BUCKETS, np.uint8)

    def rows(spec: TableSpec) -> Iterator[Rows]:
        for piece in directory.read(name, everything, tables=(spec.name,)):
            if spec.name in piece.rows:
                yield piece.rows[spec.name]

    return write(out, wanted, rows, format=format, dtype=dtype, source=name, step=manifest.step)


export_cut = export_checkpoint
"""Former name of ``export_checkpoint``."""


def export_running(
    client: PsClient, out: str | Path, *, format: str = ARROW, dtype: str = "f4", tables: Sequence[str] = ()
) -> Exported:
    """Export the current content of the pservers through a client. Rows are not of one moment if training continues."""
    wanted = wanted_tables(client.tables, tables)
    return write(
        out, wanted, lambda spec: client.scan(spec.name), format=format, dtype=dtype, source="running", step=client.step
    )


def locate(run: str) -> tuple[CheckpointDirectory, str]:
    """The directory and the name of a checkpoint, given its path or URL, or that of its job's folder. Raises
    ``SettingError`` and ``CheckpointError``."""
    where, name = _split(run)
    directory = CheckpointDirectory(open_files(where), name.split("/")[1])
    if name.count("/") < 2:
        found = directory.find()
        if not found.checkpoints:
            raise CheckpointError("\n".join([f"there is no usable checkpoint in {run}", *found.refused]))
        name = found.checkpoints[0].run
    return directory, name


def wanted_tables(known: Mapping[str, TableSpec], tables: Sequence[str]) -> list[TableSpec]:
    """The definitions of these tables; of all if none is given. Raises ``SettingError``."""
    missing = [name for name in tables if name not in known]
    if missing:
        raise SettingError("--table", missing[0], f"there is no such table; there are {', '.join(sorted(known))}")
    return [known[name] for name in tables or sorted(known)]


def _split(run: str) -> tuple[str, str]:
    parts = run.rstrip("/").split("/")
    depth = 3 if checkpoint_number(parts[-1]) is not None else 2
    if len(parts) < depth or parts[-depth] != "ps":
        raise SettingError("checkpoint", run, "must end in ps/<job>/checkpoint-<number>, or in ps/<job>")
    return "/".join(parts[:-depth]) or ("/" if run.startswith("/") else "."), "/".join(parts[-depth:])


def _write_table(file: Path, spec: TableSpec, rows: Iterable[Rows], format: str, kind: str) -> int:
    dtype = DTYPES[kind]
    gathered = file.with_suffix(".unsorted")
    unfinished = file.with_suffix(".unfinished")
    try:
        keys = _gather(gathered, spec, rows, kind)
        order = np.argsort(keys, kind="stable")
        shape = (len(keys), spec.dim)
        weights: Array = np.memmap(gathered, dtype, "r", shape=shape) if len(keys) else np.empty(shape, dtype)
        if format == ARROW:
            _write_arrow(unfinished, spec, keys, weights, order)
        else:
            _write_safetensors(unfinished, spec, keys, weights, order)
        with unfinished.open("rb") as written:
            os.fsync(written.fileno())
        unfinished.replace(file)
        return len(keys)
    finally:
        for one in (gathered, unfinished):
            _discard(one)


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _gather(path: Path, spec: TableSpec, rows: Iterable[Rows], kind: str) -> NDArray[np.int64]:
    keys = []
    with path.open("wb") as file:
        for some in rows:
            keys.append(np.array(some.keys))
            file.write(_converted(spec, some, kind).data)
    return np.concatenate(keys) if keys else np.empty(0, np.int64)


def _converted(spec: TableSpec, rows: Rows, kind: str) -> Array:
    """The weights in this number format. Raises ``SettingError`` if they become infinite in it."""
    with np.errstate(over="ignore"):
        found: Array = np.ascontiguousarray(rows.weights, DTYPES[kind])
    lost = np.isinf(found) & np.isfinite(rows.weights)
    if lost.any():
        row, column = np.argwhere(lost)[0]
        value, most = rows.weights[row, column], np.finfo(np.float16).max
        what = f"a weight of table {spec.name}, key {rows.keys[row]} is {value:g}, and f2 holds numbers up to {most:g}"
        raise SettingError("--dtype", kind, f"cannot be used: {what}", "Export with f4")
    return found


def _write_arrow(path: Path, spec: TableSpec, keys: Array, weights: Array, order: Array) -> None:
    import pyarrow as pa

    kind = pa.list_(pa.float16() if weights.dtype.itemsize == 2 else pa.float32(), spec.dim)
    about = {"edl": json.dumps(to_plain(spec))}
    schema = pa.schema([pa.field("key", pa.int64(), False), pa.field("weights", kind, False)], metadata=about)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for start in range(0, len(keys), BATCH_ROWS):
            some = order[start : start + BATCH_ROWS]
            values = pa.FixedSizeListArray.from_arrays(pa.array(weights[some].reshape(-1)), type=kind)
            writer.write_batch(pa.record_batch([pa.array(keys[some]), values], schema=schema))


def _write_safetensors(path: Path, spec: TableSpec, keys: Array, weights: Array, order: Array) -> None:
    code = "F16" if weights.dtype.itemsize == 2 else "F32"
    leaves = [
        Leaf("keys", "I64", (len(keys),), keys.nbytes),
        Leaf("weights", code, (len(keys), spec.dim), len(keys) * spec.dim * weights.dtype.itemsize),
    ]
    plan = Layout(leaves).plan(Meta("", 0, 0, 0, 0, 1, "ps"), {"spec": to_plain(spec)})
    with path.open("wb") as file:
        file.write(plan.header)
        for array in (keys, weights):  # in the order of the layout: the widest elements first
            for start in range(0, len(keys), BATCH_ROWS):
                file.write(np.ascontiguousarray(array[order[start : start + BATCH_ROWS]]).data)


# --- reading ---------------------------------------------------------------------------------------------------------


def open(folder: str | Path) -> Export:
    """Open an export. Raises ``CheckpointError`` if it is missing or incomplete."""
    return Export(Path(folder))


class Export:
    """A memory-mapped export: rows are read on access. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Called by ``open``. Raises ``CheckpointError`` if the export is missing or incomplete."""
        try:
            about = json.loads((folder / LIST_FILE).read_bytes())
            if about["format"] != FORMAT:
                raise CheckpointError(f"{folder} has format {about['format']!r}, this edl supports {FORMAT}")
            listed = about["tables"]
            self.source, self.step = str(about["source"]), int(about["step"])
            self.since = str(about.get("since", ""))
            """The older checkpoint, if this export has only the changes since; else empty."""
            self.tables: Mapping[str, TableSpec] = {
                name: from_plain(TableSpec, one["spec"]) for name, one in listed.items()
            }
            self._sorted = {
                name: _Sorted(folder / one["file"], one, self.tables[name].dim) for name, one in listed.items()
            }
            self._gone = {
                name: np.load(folder / one["gone"], mmap_mode="r") for name, one in listed.items() if "gone" in one
            }
        except OSError as error:
            raise CheckpointError(f"{folder} is not a complete export: {error.strerror or error}") from error
        except (ProtocolError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder / LIST_FILE} does not have edl's format: {error!r}") from None

    def rows(self, table: str) -> int:
        """Number of rows in a table. Raises ``PsError`` if there is no such table."""
        return self._find(table).rows

    def dim(self, table: str) -> int:
        """Number of weights in a row of the table."""
        self._find(table)
        return self.tables[table].dim

    def keys(self, table: str) -> Iterator[NDArray[np.int64]]:
        """Iterate over all keys, ascending, in pieces."""
        return (keys for keys, _ in self._find(table).parts)

    def lookup(self, table: str, keys: ArrayLike, missing: str = "zeros") -> NDArray[np.float32]:
        """Weights of keys of any shape: float32 ``(*keys.shape, dim)``.

        ``missing`` decides about keys without a row: ``zeros``; ``initial``, the weights with which they would start
        training; ``error`` raises ``PsError``.
        """
        asked = self.checked_keys(table, keys)
        unique, inverse = np.unique(asked.reshape(-1), return_inverse=True)
        found = np.zeros((len(unique), self.dim(table)), np.float32)
        missing_rows(self.tables[table], unique, found, ~self.read(table, unique, found), missing)
        return found[inverse].reshape(*asked.shape, found.shape[1])

    def checked_keys(self, table: str, keys: ArrayLike) -> NDArray[np.int64]:
        """Keys as int64, in their shape. Raises ``PsError`` for others, and if there is no such table."""
        self._find(table)
        asked = np.asarray(keys)
        if not asked.size:
            return np.zeros(asked.shape, np.int64)
        if asked.dtype.kind not in "iu" or (asked.dtype == np.uint64 and asked.max() >> 63):
            raise PsError(f"table {table}: keys must be integers that fit into int64, not {asked.dtype}")
        return asked.astype(np.int64, copy=False)

    def read(self, table: str, keys: NDArray[np.int64], out: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Copy the weights of ascending keys to ``out``; return a mask of the keys that have a row here."""
        return self._find(table).read(keys, out)

    def gone(self, table: str) -> NDArray[np.int64]:
        """Keys whose rows are gone since the older checkpoint, ascending; none in a complete export."""
        self._find(table)
        return np.asarray(self._gone.get(table, ()), np.int64)

    def parameters(self, table: str = "dense") -> dict[str, NDArray[np.float32]]:
        """The arrays of a dense table by name, as they were in the module. Raises ``PsError`` if the table has no names
        (it is sparse, or from an earlier version of edl), or not all of its rows."""
        self._find(table)
        spec = self.tables[table]
        if not spec.parameters:
            raise PsError(f"table {table} of this export has no named parameters; use lookup")
        layout = DenseLayout({one.name: one.shape for one in spec.parameters}, spec.dim)
        return layout.unpack(self.lookup(table, layout.keys, missing="error"))

    def _find(self, table: str) -> _Sorted:
        found = self._sorted.get(table)
        if found is None:
            raise PsError(f"there is no table {table} in this export; there are {', '.join(sorted(self._sorted))}")
        return found


def missing_rows(
    spec: TableSpec, keys: NDArray[np.int64], found: NDArray[np.float32], absent: NDArray[np.bool_], missing: str
) -> None:
    """Fill in the rows of keys that are ``absent``, as ``Export.lookup`` describes."""
    if missing not in MISSING:
        raise SettingError("missing", missing, f"must be one of {', '.join(MISSING)}")
    if absent.any() and missing == "error":
        first = int(keys[absent][0])
        raise PsError(f"table {spec.name}: {int(absent.sum())} of {len(keys)} keys have no row, such as {first}")
    if absent.any() and missing == "initial":
        found[absent] = plain.first(RowLayout.of(spec), keys[absent])


class _Sorted:
    """The memory-mapped file of one table, sorted by key."""

    def __init__(self, path: Path, about: Mapping[str, Any], dim: int) -> None:
        size = path.stat().st_size
        if size != about["bytes"]:
            raise CheckpointError(f"{path} has {size} bytes instead of {about['bytes']}")
        self.rows = int(about["rows"])
        dtype = DTYPES[about["dtype"]]
        try:
            load = _arrow_parts if path.suffix == ".arrow" else _safetensors_parts
            self.parts = load(path, dim, dtype) if self.rows else []
        except (ValueError, EdlError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from None
        if sum(len(keys) for keys, _ in self.parts) != self.rows:
            raise CheckpointError(f"{path} is damaged: it does not have {self.rows} rows")
        self._ends = [int(keys[-1]) for keys, _ in self.parts]

    def read(self, keys: NDArray[np.int64], out: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Copy the weights of ascending keys to ``out``; return a mask of the keys that exist."""
        there = np.zeros(len(keys), np.bool_)
        begin = 0
        for end_key, (held, weights) in zip(self._ends, self.parts, strict=True):
            if begin == len(keys):
                break
            end = int(np.searchsorted(keys, end_key, "right"))
            if end > begin:
                place = np.searchsorted(held, keys[begin:end])
                hit = held[place] == keys[begin:end]
                out[begin:end][hit] = weights[place[hit]]
                there[begin:end] = hit
            begin = end
        return there


def _arrow_parts(path: Path, dim: int, dtype: np.dtype[Any]) -> list[tuple[Array, Array]]:
    import pyarrow as pa

    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    found = []
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number)
        values = batch.column(1).flatten().to_numpy(zero_copy_only=True)
        if values.dtype != dtype:
            raise ValueError(f"its weights are {values.dtype}, not {dtype}")
        found.append((batch.column(0).to_numpy(zero_copy_only=True), values.reshape(-1, dim)))
    return found


def _safetensors_parts(path: Path, dim: int, dtype: np.dtype[Any]) -> list[tuple[Array, Array]]:
    data = np.memmap(path, np.uint8, "r")
    snapshot = parse_header(bytes(data[: header_bytes(bytes(data[:8]))]), len(data))
    keys, weights = snapshot.entries["keys"], snapshot.entries["weights"]
    return [
        (
            data[keys.offset :][: keys.size].view(np.int64),
            data[weights.offset :][: weights.size].view(dtype).reshape(-1, dim),
        )
    ]
