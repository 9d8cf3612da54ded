"""Common base of the line formats: shards begin after a newline, and lines are read in blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from data_service.formats.file_reader import CHANGED, FileReader, FileSplit, OpenFile, checked_range, file_errors, short
from data_service.formats.options import packing_of
from data_service.manifest import ShardRef
from edl.errors import DataError, SettingError

HEAD_BYTES = 1 << 20
BLOCK_BYTES = 16 << 20
LINE_LIMIT_BYTES = 1 << 30
SEARCH_BYTES = 64 << 10
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class LineFile:
    """An open file of lines."""

    size: int
    first: int
    """Offset of the first record, after the header; in a compressed file, counted uncompressed."""
    packing: str
    names: tuple[str, ...] = ()
    """Names of the columns, if lines do not contain them."""
    delimiter: str = ""


class LineReader(FileReader[LineFile]):
    """Reads files of lines. Shards are byte ranges. A compressed or otherwise unsplittable file is one shard."""

    unlike = "Set the column's type (types), or fix the file"

    def pieces(self, ref: ShardRef) -> Iterator[pa.Table]:
        """The records of a shard, one table per block of lines."""
        with file_errors(ref.file, shard=ref):
            opened = self.open_files.get(ref.file)
            file = opened.handle
            checked_range(ref, file.size, "bytes")
            blocks = self._unpacked(ref.file, file) if file.packing else self._blocks(ref, file)
            for block in blocks:
                yield self._conforming(self._parsed(block, opened, ref.file), opened.schema, ref.file)

    def found(self, file: str) -> pa.Schema:
        """All columns as they appear in the first lines; null if a column has no value there. Raises ``DataError``."""
        with file_errors(file):
            return self._enter(file)[1]

    def _read(self, opened: OpenFile[LineFile], ref: ShardRef) -> pa.Table:
        tables = list(self.pieces(ref))
        return pa.concat_tables(tables) if tables else opened.schema.empty_table()

    def _enter(self, file: str) -> tuple[LineFile, pa.Schema]:
        size, packing = self.storage.size(file), packing_of(file)
        head = b""
        wanted = HEAD_BYTES
        while True:
            head = self._head(file, packing, wanted)
            whole = len(head) < wanted
            end = len(head) if whole else self.edge(head)
            if end > 0 or whole:
                break
            if wanted >= LINE_LIMIT_BYTES:
                raise DataError(
                    f"{file}: its first line is longer than {LINE_LIMIT_BYTES:,} bytes. Is it {self.format}?"
                )
            wanted *= 8
        first = len(BOM) if head.startswith(BOM) else 0
        names, begin = self.header(file, head[:end], first)
        opened = LineFile(size, begin, packing, names, self.delimiter(file))
        return opened, self.inferred(file, head[begin:end], opened)

    def _split(self, file: str, size_bytes: int, shard_records: int, shard_bytes: int) -> Iterable[FileSplit]:
        opened = self.open_files.get(file).handle
        if opened.packing or not self.can_split:
            yield FileSplit(0, size_bytes, -1)
            return
        begin, length = opened.first, size_bytes - opened.first
        parts = max(1, -(-length // shard_bytes))
        for part in range(1, parts + 1):
            edge = opened.first + length * part // parts
            if part < parts and edge <= begin:
                continue  # a line that is longer than a shard
            end = size_bytes if part == parts else self._line_after(file, edge)
            if end > begin:
                yield FileSplit(begin, end, -1)
                begin = end

    def _agreed(self, file: str, schema: pa.Schema) -> pa.Schema:
        return super()._agreed(file, _texts_for_nulls(schema))

    # --- overridden by each format -----------------------------------------------------------------------------------

    can_split: bool = True

    def edge(self, data: bytes) -> int:
        """End offset of the last complete line; 0 if there is none."""
        return data.rfind(b"\n") + 1

    def header(self, file: str, head: bytes, first: int) -> tuple[tuple[str, ...], int]:
        """Column names, and the offset of the first record."""
        return (), first

    def delimiter(self, file: str) -> str:
        """The delimiter between values; empty if the format has none."""
        return ""

    def checked_edge(self, file: str, line: bytes) -> None:
        """Raise ``DataError`` if this is not a complete line, as required at the edge of two shards."""

    @abstractmethod
    def inferred(self, file: str, head: bytes, opened: LineFile) -> pa.Schema:
        """All columns, with the given types or those of the first lines."""

    @abstractmethod
    def parsed(self, data: bytes, opened: OpenFile[LineFile]) -> pa.Table:
        """Parse complete lines, at least one byte."""

    # --- reading -----------------------------------------------------------------------------------------------------

    def _parsed(self, data: bytes, opened: OpenFile[LineFile], file: str) -> pa.Table:
        if not data.strip(b" \t\r\n" if self.format != "text" else b""):
            return opened.schema.empty_table()
        try:
            return self.parsed(data, opened)
        except MemoryError:
            raise
        except (pa.ArrowInvalid, pa.ArrowKeyError, pa.ArrowNotImplementedError, UnicodeDecodeError) as error:
            raise DataError(f"{file}: does not fit: {short(error)}. {self.unlike}") from error

    def _blocks(self, ref: ShardRef, file: LineFile) -> Iterator[bytes]:
        """The content of a shard in blocks. Verifies that it begins and ends at line boundaries."""
        begin, rest = max(ref.begin, file.first), b""
        if ref.begin > file.first and self.storage.read(ref.file, ref.begin - 1, ref.begin) != b"\n":
            raise DataError(f"{ref.file}: no line begins at byte {ref.begin}. {CHANGED}")
        while begin < ref.end:
            data = self.storage.read(ref.file, begin, min(ref.end, begin + BLOCK_BYTES))
            if not data:
                raise DataError(f"{ref.file}: ends at byte {begin}. {CHANGED}")
            begin += len(data)
            rest += data
            if begin >= ref.end:
                break
            edge = self.edge(rest)
            if edge:
                yield rest[:edge]
                rest = rest[edge:]
        if rest and ref.end < file.size and not rest.endswith(b"\n"):
            raise DataError(f"{ref.file}: no line ends at byte {ref.end}. {CHANGED}")
        if rest:
            yield rest

    def _unpacked(self, name: str, file: LineFile) -> Iterator[bytes]:
        rest, skip = b"", file.first
        with self.storage.open(name) as source, pa.CompressedInputStream(source, file.packing) as stream:
            while data := stream.read(BLOCK_BYTES):
                rest += data
                if skip:
                    if len(rest) < skip:
                        continue
                    rest, skip = rest[skip:], 0
                edge = self.edge(rest)
                if edge:
                    yield rest[:edge]
                    rest = rest[edge:]
        if rest:
            yield rest

    def _head(self, file: str, packing: str, length: int) -> bytes:
        if not packing:
            return self.storage.read(file, 0, length)
        parts, left = [], length
        with self.storage.open(file) as source, pa.CompressedInputStream(source, packing) as stream:
            while left and (part := stream.read(left)):
                parts.append(part)
                left -= len(part)
        return b"".join(parts)

    def _line_after(self, file: str, offset: int) -> int:
        """Offset of the first line that begins at or after ``offset``; the end of the file if there is none."""
        search = offset - 1
        while data := self.storage.read(file, search, search + SEARCH_BYTES):
            found = data.find(b"\n")
            if found >= 0:
                edge = search + found + 1
                rest = data[found + 1 :]
                self.checked_edge(file, rest[: rest.find(b"\n") + 1])
                return edge
            search += len(data)
        return search


def column_types(types: dict[str, str]) -> dict[str, pa.DataType]:
    """Types by their pyarrow names. Raises ``SettingError`` for unknown ones."""
    found = {}
    for column, name in types.items():
        try:
            found[column] = pa.type_for_alias(name)
        except ValueError:
            advice = "For example int64, float32, string, bool, date32, timestamp[ms]"
            raise SettingError("types", f"{column}:{name}", "is not a pyarrow type", advice) from None
    return found


def with_types(schema: pa.Schema, types: dict[str, pa.DataType]) -> pa.Schema:
    """The schema with some types replaced."""
    return pa.schema((field.name, types.get(field.name, field.type)) for field in schema)


def _texts_for_nulls(schema: pa.Schema) -> pa.Schema:
    """Treat a column without values as text."""
    return with_types(schema, {field.name: pa.string() for field in schema if pa.types.is_null(field.type)})


def merged_types(schemas: list[pa.Schema]) -> dict[str, pa.DataType]:
    """Common types for the columns of several files: integers and floats become float, otherwise differing types
    text."""
    found: dict[str, pa.DataType] = {}
    for field in (field for schema in schemas for field in schema):
        before = found.get(field.name, pa.null())
        if pa.types.is_null(before) or before == field.type:
            found[field.name] = field.type
        elif not pa.types.is_null(field.type):
            numbers = all(pa.types.is_integer(one) or pa.types.is_floating(one) for one in (before, field.type))
            found[field.name] = pa.float64() if numbers else pa.string()
    return {name: pa.string() if pa.types.is_null(kind) else kind for name, kind in found.items()}
