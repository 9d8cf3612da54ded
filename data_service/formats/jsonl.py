"""JSON lines: one object per line."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.json as pajson

from data_service.filesystems import Storage
from data_service.formats.file_reader import OpenFile, short
from data_service.formats.lines import LineFile, LineReader, column_types, with_types
from data_service.formats.options import FormatOptions
from edl.errors import DataError


class JsonReader(LineReader):
    """Reads JSON lines. A missing key is null. A key that does not occur in the first lines is an error unless columns
    are selected."""

    format = "jsonl"

    def __init__(self, columns: tuple[str, ...] | None, storage: Storage, options: FormatOptions) -> None:
        super().__init__(columns, storage, options)
        self._types = column_types(dict(options.types))

    def inferred(self, file: str, head: bytes, opened: LineFile) -> pa.Schema:
        """All keys of the first lines, with the types given in the options or inferred by pyarrow."""
        given = pa.schema(list(self._types.items()))
        if not head.strip():
            return given
        try:
            found = self._table(head, given, "infer").schema
        except pa.ArrowInvalid as error:
            raise DataError(f"{file}: cannot be parsed as JSON lines: {short(error)}. {self.unlike}") from error
        texts = {field.name: pa.string() for field in found if pa.types.is_timestamp(field.type)}
        return with_types(found, {**texts, **self._types})  # text that looks like a date stays text

    def parsed(self, data: bytes, opened: OpenFile[LineFile]) -> pa.Table:
        """Parse complete lines, each a JSON object."""
        return self._table(data, opened.schema, "ignore" if self.columns is not None else "error")

    def _table(self, data: bytes, schema: pa.Schema, unexpected: str) -> pa.Table:
        return pajson.read_json(
            pa.BufferReader(data),
            pajson.ReadOptions(block_size=min(len(data) + 1, (1 << 31) - 1)),
            pajson.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected),
        )
