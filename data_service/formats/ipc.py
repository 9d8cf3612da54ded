"""Arrow IPC: files (including Feather) and streams. Local ones are memory-mapped; nothing is copied."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import pyarrow as pa
from pyarrow import ipc

from data_service.formats.arrays import is_plain
from data_service.formats.file_reader import DAMAGED, FileReader, FileSplit, OpenFile, checked_range, grouped
from data_service.formats.ipc_layout import (
    MAGIC,
    OLD_FEATHER,
    Message,
    MessageKind,
    ReadAt,
    batches_of_file,
    messages_of_stream,
)
from data_service.manifest import ShardRef
from edl.errors import DataError


@dataclass(frozen=True, slots=True)
class IpcFile:
    """An open file: its batches, and the cumulative number of records before each, with the total last."""

    batches: list[Message]
    offsets: list[int]
    batch: Callable[[int], pa.RecordBatch]


class IpcReader(FileReader[IpcFile]):
    """Reads Arrow IPC. A shard is one or more record batches, or a part of an uncompressed one."""

    format = "ipc"

    def _enter(self, file: str) -> tuple[IpcFile, pa.Schema]:
        source = self.storage.open(file, mapped=True)
        size = source.size()

        def read_at(offset: int, length: int) -> bytes:
            return bytes(source.read_at(length, offset))

        magic = read_at(0, min(size, 6))
        if magic[:4] == OLD_FEATHER:
            raise DataError(f"{file}: is Feather version 1. Rewrite it with pyarrow.feather.write_feather")
        try:
            return _open_file(source, read_at, self.columns) if magic == MAGIC else _open_stream(source, read_at)
        except ValueError as error:
            raise DataError(f"{file}: cannot be read: {error}. {DAMAGED}") from error

    def _read(self, opened: OpenFile[IpcFile], ref: ShardRef) -> pa.Table:
        file = opened.handle
        checked_range(ref, file.offsets[-1], "records")
        parts = []
        index = bisect_right(file.offsets, ref.begin) - 1
        while index < len(file.batches) and file.offsets[index] < ref.end:
            first = file.offsets[index]
            with opened.lock:
                batch = file.batch(index)
            if batch.num_rows != file.batches[index].records:
                raise DataError(f"{ref.file}: batch {index} contradicts its metadata. {DAMAGED}")
            batch = batch.select(opened.schema.names)
            _validate(batch)
            begin = max(0, ref.begin - first)
            parts.append(batch.slice(begin, min(batch.num_rows, ref.end - first) - begin))
            index += 1
        return pa.Table.from_batches(parts) if parts else opened.schema.empty_table()

    def _split(self, file: str, size_bytes: int, shard_records: int, shard_bytes: int) -> Iterable[FileSplit]:
        batches = self.open_files.get(file).handle.batches
        split = not any(batch.compressed for batch in batches)
        return grouped((batch.records for batch in batches), shard_records, split=split)


def _open_file(source: pa.NativeFile, read_at: ReadAt, columns: tuple[str, ...] | None) -> tuple[IpcFile, pa.Schema]:
    batches = batches_of_file(read_at, source.size())
    reader = ipc.open_file(source)
    schema = reader.schema
    whole = isinstance(source, pa.MemoryMappedFile) and not any(batch.compressed for batch in batches)
    if columns is not None and not whole:  # read only selected columns; on mapped files that would copy
        wanted = sorted(schema.get_field_index(name) for name in columns if name in schema.names)
        if wanted and -1 not in wanted:
            reader = ipc.open_file(source, options=ipc.IpcReadOptions(included_fields=wanted))
    return IpcFile(batches, _offsets(batches), reader.get_batch), schema


def _open_stream(source: pa.NativeFile, read_at: ReadAt) -> tuple[IpcFile, pa.Schema]:
    messages = list(messages_of_stream(read_at, source.size()))
    if not messages or messages[0].kind is not MessageKind.SCHEMA:
        raise ValueError("it is neither an Arrow file nor an Arrow stream")
    batches = [message for message in messages if message.kind is MessageKind.BATCH]
    dictionaries = [message for message in messages if message.kind is MessageKind.DICTIONARY]
    schema = ipc.read_schema(pa.py_buffer(read_at(0, messages[0].end)))

    def piece(message: Message) -> pa.Buffer:
        source.seek(message.begin)
        return source.read_buffer(message.end - message.begin)

    def batch(index: int) -> pa.RecordBatch:
        wanted = batches[index]
        if not dictionaries:
            return ipc.read_record_batch(piece(wanted), schema)
        needed = [messages[0], *(one for one in dictionaries if one.begin < wanted.begin), wanted]
        return ipc.open_stream(b"".join(piece(one).to_pybytes() for one in needed)).read_next_batch()

    return IpcFile(batches, _offsets(batches), batch), schema


def _validate(batch: pa.RecordBatch) -> None:
    """Validate a batch. Raises ``pa.ArrowInvalid``. Damaged offsets would read arbitrary memory; plain numbers are
    safe."""
    for column in batch.columns:
        column.validate(full=not is_plain(column.type))


def _offsets(batches: list[Message]) -> list[int]:
    return list(accumulate((batch.records for batch in batches), initial=0))
