"""File formats: readers that turn one shard of a file into a ``pyarrow.Table``. See ``docs/data-formats.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from data_service.formats.options import FormatOptions
from data_service.manifest import FORMATS
from edl.errors import SettingError

if TYPE_CHECKING:
    import pyarrow as pa

    from data_service.formats.file_reader import FileReader
    from data_service.manifest import ShardRef


class FormatReader(Protocol):
    """The interface of readers: of files (``open_reader``) and of readers on other hosts."""

    def read(self, ref: ShardRef) -> pa.Table:
        """Read exactly the records of a shard, in file order. Thread-safe.

        All tables of a reader have the same columns and types. If the file is missing, damaged, changed since it was
        scanned, or unlike the others, raises ``DataError`` that names file, shard and what to do.
        """
        ...

    def close(self) -> None:
        """Close open files. Tables that were returned stay valid."""
        ...


Reader = FormatReader
"""The former name of ``FormatReader``."""


def open_reader(
    format: str,
    columns: Sequence[str] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    options: FormatOptions | None = None,
) -> FileReader[Any]:
    """Open a reader for files of one format (``Manifest.format``).

    ``columns``: only these, in this order; default: all, in the order of the first file. ``storage_options``: for
    fsspec, if the files are URLs. Raises ``SettingError`` for an unknown format, or if pyarrow is missing.
    """
    if format not in FORMATS:
        raise SettingError("format", format, f"no such format; available are {', '.join(FORMATS)}")
    if columns is not None and (not columns or len(set(columns)) != len(columns)):
        raise SettingError("columns", ",".join(columns), "must name at least one column, each only once")
    try:
        import numpy  # noqa: F401 - all readers need both
        import pyarrow  # noqa: F401
    except ImportError as error:
        advice = "Run: pip install 'edl[data]'"
        raise SettingError("format", format, f"needs a package that is not installed ({error})", advice) from None
    from data_service.filesystems import Storage

    given = (tuple(columns) if columns is not None else None, Storage(storage_options), (options or FormatOptions()))
    match format:
        case "ipc":
            from data_service.formats.ipc import IpcReader

            return IpcReader(*given)
        case "parquet":
            from data_service.formats.parquet import ParquetReader

            return ParquetReader(*given)
        case "csv":
            from data_service.formats.delimited import CsvReader

            return CsvReader(*given)
        case "jsonl":
            from data_service.formats.jsonl import JsonReader

            return JsonReader(*given)
        case "text":
            from data_service.formats.text import TextReader

            return TextReader(*given)
        case _:
            from data_service.formats.user import UserReader

            return UserReader(*given)
