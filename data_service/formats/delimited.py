"""CSV and similar formats with delimiters."""

from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
from numpy.typing import NDArray

from data_service.filesystems import Storage
from data_service.formats.file_reader import OpenFile, short
from data_service.formats.lines import LineFile, LineReader, column_types, with_types
from data_service.formats.options import FormatOptions
from edl.errors import DataError

NEWLINE = 10
QUOTED_NEWLINE = (
    "it contains a newline between quotes, so it cannot be split. Set quoted_newlines=True (each file "
    'is then one shard; python -m data_service convert makes files that can be split), or quote="" if quotes are '
    "ordinary characters"
)


class CsvReader(LineReader):
    """Reads CSV. The header is read once per file and is not part of any shard."""

    format = "csv"

    def __init__(self, columns: tuple[str, ...] | None, storage: Storage, options: FormatOptions) -> None:
        super().__init__(columns, storage, options)
        self.can_split = not options.quoted_newlines
        self._types = column_types(dict(options.types))
        self._quote = ord(options.quote) if options.quote else -1

    def edge(self, data: bytes) -> int:
        """See ``LineReader.edge``; a newline between quotes does not end a line."""
        if not self.options.quoted_newlines or self._quote < 0:
            return super().edge(data)
        newlines, odd = self._newlines(data)
        outside = newlines[~odd]
        return int(outside[-1]) + 1 if len(outside) else 0

    def header(self, file: str, head: bytes, first: int) -> tuple[tuple[str, ...], int]:
        """Column names from the first line (or the options), and the offset of the first record."""
        if not self.options.header:
            return self.options.names, first
        end = self._first_line(head[first:]) + first
        try:
            text = head[first:end].decode()
        except UnicodeDecodeError as error:
            advice = "Is it CSV? Set header=False if there is no header"
            raise DataError(f"{file}: its header is not UTF-8 ({error}). {advice}") from None
        dialect: dict[str, Any] = {"delimiter": self.delimiter(file), "quoting": csv.QUOTE_NONE}
        if self._quote >= 0:
            dialect |= {"quoting": csv.QUOTE_MINIMAL, "quotechar": self.options.quote}
        names = next(csv.reader(io.StringIO(text, newline=""), **dialect), [])
        if not names:
            raise DataError(f"{file}: its first line is empty but should name the columns. Set header=False and names")
        return tuple(names), end

    def delimiter(self, file: str) -> str:
        """The delimiter of the options, else the one that the file's suffix implies."""
        tabs = ".tsv" in file.lower().rpartition("/")[2]
        return self.options.delimiter or ("\t" if tabs else ",")

    def checked_edge(self, file: str, line: bytes) -> None:
        """Raise ``DataError`` if the edge of two shards is between quotes."""
        if self._quote >= 0 and line.count(self._quote) % 2:
            raise DataError(f"{file}: {QUOTED_NEWLINE}")

    def inferred(self, file: str, head: bytes, opened: LineFile) -> pa.Schema:
        """All columns, with the types given in the options or inferred by pyarrow."""
        self._check_quotes(head, file)
        if not head.strip():
            names = opened.names
            return with_types(pa.schema([(name, pa.null()) for name in names]), self._types)
        try:
            table = self._table(head, opened, None, self._types)
        except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
            raise DataError(f"{file}: cannot be parsed as CSV: {short(error)}. {self.unlike}") from error
        return with_types(table.schema, self._types)

    def parsed(self, data: bytes, opened: OpenFile[LineFile]) -> pa.Table:
        """Parse complete lines as CSV, in one block."""
        types = {field.name: field.type for field in opened.schema}
        return self._table(data, opened.handle, opened.schema.names, types)

    def _parsed(self, data: bytes, opened: OpenFile[LineFile], file: str) -> pa.Table:
        self._check_quotes(data, file)
        return super()._parsed(data, opened, file)

    def _table(self, data: bytes, file: LineFile, columns: list[str] | None, types: dict[str, pa.DataType]) -> pa.Table:
        block = min(len(data) + 2, (1 << 31) - 1)  # one block, because a line must not cross blocks
        names = list(file.names)
        return pacsv.read_csv(
            pa.BufferReader(data if data.endswith(b"\n") else data + b"\n"),
            pacsv.ReadOptions(column_names=names, autogenerate_column_names=not names, block_size=block),
            pacsv.ParseOptions(
                delimiter=file.delimiter,
                quote_char=self.options.quote or False,
                newlines_in_values=self.options.quoted_newlines,
            ),
            pacsv.ConvertOptions(column_types=types, include_columns=columns or []),
        )

    def _check_quotes(self, data: bytes, file: str) -> None:
        """Raise ``DataError`` for an unexpected newline between quotes, which would break the division into lines."""
        if self._quote < 0 or self.options.quoted_newlines or self._quote not in data:
            return
        if self._newlines(data)[1].any() or data.count(self._quote) % 2:
            raise DataError(f"{file}: {QUOTED_NEWLINE}")

    def _first_line(self, data: bytes) -> int:
        if not self.options.quoted_newlines or self._quote < 0:
            return data.find(b"\n") + 1 or len(data)
        newlines, odd = self._newlines(data)
        outside = newlines[~odd]
        return int(outside[0]) + 1 if len(outside) else len(data)

    def _newlines(self, data: bytes) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Positions of newlines, and whether each is quoted, that is, preceded by an odd number of quotes."""
        characters = np.frombuffer(data, np.uint8)
        newlines = np.flatnonzero(characters == NEWLINE)
        quotes = np.flatnonzero(characters == self._quote)
        return newlines, np.searchsorted(quotes, newlines) % 2 == 1
