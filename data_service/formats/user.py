"""Any other format: the user's functions list and read shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from data_service.filesystems import Storage
from data_service.formats.arrays import from_numpy
from data_service.formats.file_reader import UNREACHED, FileReader, FileSplit, OpenFile, is_out_of_reach, short
from data_service.formats.lines import column_types
from data_service.formats.options import FormatOptions
from data_service.manifest import ShardRef
from edl.errors import DataError, DataFunctionError, EdlError, SettingError, UnreachableData

ADVICE = "Fix the function; for damaged data let it raise edl.errors.DataError, and the shard is skipped"


def function_error(error: Exception, what: str, advice: str = ADVICE) -> EdlError:
    """The error to raise because a function of the user, named by ``what``, has raised ``error``. Data that are damaged
    or out of reach are no defect of the function."""
    text = f"{what} failed: {type(error).__name__}: {short(error)}"
    if is_out_of_reach(error):
        return UnreachableData(f"{text}. {UNREACHED}")
    if isinstance(error, OSError):  # readers of images and Arrow report damaged content this way
        return DataError(text)
    return DataFunctionError(f"{text}. {advice}")


class UserReader(FileReader[str]):
    """Calls ``FormatOptions.read`` for each shard. Thread-safe if that function is."""

    format = "user"
    unlike = "Let the function return the same columns for all shards: a pyarrow.Table, or set the types"

    def __init__(self, columns: tuple[str, ...] | None, storage: Storage, options: FormatOptions) -> None:
        super().__init__(columns, storage, options)
        found = options.resolved()
        if found.read is None:
            raise SettingError("read", None, "is needed for the format user", "Give Options(read=function)")
        self._function: Any = found.read
        self._shards: Any = found.shards
        self._types = column_types(dict(options.types))

    def read(self, ref: ShardRef) -> pa.Table:
        """Call the user's function for a shard, and check what it returns."""
        where = f"{ref.file}, shard {ref.index} [{ref.begin}, {ref.end})"
        try:
            table = self._as_table(self._function(ref.file, ref.begin, ref.end))
        except (DataError, MemoryError):
            raise
        except Exception as error:
            name = getattr(self._function, "__name__", "the read function")
            raise function_error(error, f"{where}: {name}") from error
        if not table.num_columns and not table.num_rows:
            return self._first[1].empty_table() if self._first is not None else table
        if ref.records >= 0 and table.num_rows != ref.records:
            raise DataError(f"{where}: {table.num_rows} records were read, but {ref.records} were announced")
        return self._conforming(table, self._agreed(where, table.schema), where)

    def _conforming(self, table: pa.Table, schema: pa.Schema, file: str) -> pa.Table:
        return super()._conforming(table if self.columns is None else table.select(schema.names), schema, file)

    def schema(self, file: str) -> pa.Schema:
        """Schema of the tables read so far; files do not have one. Raises ``DataError`` before the first."""
        if self._first is None:
            raise DataError(f"{file}: its columns are unknown until a shard has been read")
        return self._first[1]

    def _as_table(self, found: Any) -> pa.Table:
        if isinstance(found, pa.RecordBatch):
            found = pa.Table.from_batches([found])
        if isinstance(found, pa.Table):
            table = found
        elif isinstance(found, Mapping):
            table = pa.table({name: from_numpy(np.asarray(value)) for name, value in found.items()})
        elif isinstance(found, list):
            table = pa.Table.from_pylist(found)
        else:
            kinds = "a pyarrow.Table, a list of dicts or a dict of arrays"
            raise TypeError(f"it returned {type(found).__name__}; it must return {kinds}")
        for name, kind in self._types.items():
            if name in table.column_names and table.column(name).type != kind:
                table = table.set_column(table.column_names.index(name), name, table.column(name).cast(kind))
        return table

    def _enter(self, file: str) -> tuple[str, pa.Schema]:
        raise NotImplementedError  # the function handles files

    def _read(self, opened: OpenFile[str], ref: ShardRef) -> pa.Table:
        raise NotImplementedError

    def _split(self, file: str, size_bytes: int, shard_records: int, shard_bytes: int) -> Iterable[FileSplit]:
        if self._shards is None:
            return [FileSplit(0, size_bytes, -1)]
        try:
            return [FileSplit(int(begin), int(end), int(records)) for begin, end, records in self._shards(file)]
        except (DataError, MemoryError):
            raise
        except Exception as error:
            name = getattr(self._shards, "__name__", "the shards function")
            raise function_error(error, f"{file}: {name}", "Fix the function") from error
