"""Text: each line is a record in the column ``text``, without its newline. Empty lines count."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from data_service.formats.file_reader import OpenFile
from data_service.formats.lines import LineFile, LineReader

SCHEMA = pa.schema([("text", pa.string())])


class TextReader(LineReader):
    """Reads UTF-8 text. Lines end with a newline, with or without a carriage return before it."""

    format = "text"
    unlike = "It must be UTF-8: convert it, or read it with your own functions (format user)"

    def inferred(self, file: str, head: bytes, opened: LineFile) -> pa.Schema:
        """One column of strings, named ``text``."""
        return SCHEMA

    def parsed(self, data: bytes, opened: OpenFile[LineFile]) -> pa.Table:
        """Split lines into records; their newlines are removed."""
        whole = pa.array([data.removesuffix(b"\n")], pa.large_binary())
        try:
            lines = pc.split_pattern(whole.cast(pa.large_string()), "\n").values
        except pa.ArrowInvalid:
            data.decode()  # raises with the position of the invalid byte
            raise
        if b"\r" in data:
            carriage = pc.ends_with(lines, "\r")
            lines = pc.if_else(carriage, pc.utf8_slice_codeunits(lines, 0, -1), lines)
        return pa.table([lines.cast(pa.string())], schema=SCHEMA)
