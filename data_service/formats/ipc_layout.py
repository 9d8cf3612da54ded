"""Positions and record counts of the batches of an Arrow IPC file or stream, from its metadata alone.

pyarrow reports the number of records only of batches that it has read and decompressed. The layout is described at
https://arrow.apache.org/docs/format/Columnar.html (File.fbs, Message.fbs).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

MAGIC = b"ARROW1"
OLD_FEATHER = b"FEA1"
CONTINUATION = 0xFFFFFFFF
RECORD_BATCH, DICTIONARY_BATCH = 3, 2
ReadAt = Callable[[int, int], bytes]
"""Reads ``length`` bytes at ``offset``."""


class MessageKind(Enum):
    """The type of a message in a stream."""

    SCHEMA = 1
    DICTIONARY = DICTIONARY_BATCH
    BATCH = RECORD_BATCH


@dataclass(frozen=True, slots=True)
class Message:
    """A message; for record batches with the number of records and whether it is compressed."""

    kind: MessageKind
    begin: int
    end: int
    records: int = 0
    compressed: bool = False


def batches_of_file(read_at: ReadAt, size: int) -> list[Message]:
    """The record batches of an IPC file. Raises ``ValueError`` if it is incomplete."""
    tail = read_at(max(0, size - 10), 10)
    if len(tail) < 10 or tail[4:] != MAGIC:
        raise ValueError("it does not end like an Arrow file: it is truncated or was never finished")
    length = int(struct.unpack("<i", tail[:4])[0])
    if not 0 < length <= size - 10:
        raise ValueError(f"its footer has an invalid length, {length}")
    footer = _FlatTable.root(read_at(size - 10 - length, length))
    found = []
    for offset, metadata, body in footer.structs(3, "<qi4xq"):
        if not 0 < offset <= offset + metadata + body <= size:
            raise ValueError("a record batch lies outside of the file")
        message = _message(read_at, offset)
        if message is None or message.kind is not MessageKind.BATCH:
            raise ValueError(f"there is no record batch at {offset}")
        found.append(message)
    return found


def messages_of_stream(read_at: ReadAt, size: int) -> Iterator[Message]:
    """All messages of an IPC stream up to the end of stream or the end of the file. Raises ``ValueError`` if it is
    truncated."""
    offset = 0
    while offset < size:
        message = _message(read_at, offset)
        if message is None:
            return
        if message.end > size:
            raise ValueError(f"it is truncated: a message ends at {message.end}, the file at {size}")
        yield message
        offset = message.end


def _message(read_at: ReadAt, offset: int) -> Message | None:
    """The message at an offset; None at the end of the stream."""
    head = read_at(offset, 8)
    try:
        first, second = struct.unpack("<Ii", head)
    except struct.error:
        raise ValueError(f"it is truncated at {offset}") from None
    prefix, length = (8, second) if first == CONTINUATION else (4, first)  # four bytes before Arrow 0.15
    if length == 0:
        return None
    if not 0 < length < 1 << 30:
        raise ValueError(f"there is no message at {offset}")
    table = _FlatTable.root(read_at(offset + prefix, length))
    kind, body = table.number(1, "<B"), table.number(3, "<q")
    end = offset + prefix + length + body
    if body < 0 or kind not in (one.value for one in MessageKind):
        raise ValueError(f"the message at {offset} is invalid")
    if kind != RECORD_BATCH:
        return Message(MessageKind(kind), offset, end)
    batch = table.table(2)
    return Message(MessageKind.BATCH, offset, end, batch.number(0, "<q"), batch.has(3))


@dataclass(frozen=True, slots=True)
class _FlatTable:
    """A flatbuffers table at offset ``at`` of ``data``; ``number`` is a field's position in the schema, from 0."""

    data: bytes
    at: int

    @classmethod
    def root(cls, data: bytes) -> _FlatTable:
        return cls(data, _unpack("<I", data, 0)[0])

    def has(self, number: int) -> bool:
        return self._field(number) > 0

    def number(self, number: int, layout: str) -> int:
        field = self._field(number)
        return _unpack(layout, self.data, field)[0] if field else 0

    def table(self, number: int) -> _FlatTable:
        return _FlatTable(self.data, self._target(number))

    def structs(self, number: int, layout: str) -> Iterator[tuple[int, ...]]:
        if not self.has(number):
            return
        target = self._target(number)
        for index in range(_unpack("<I", self.data, target)[0]):
            yield _unpack(layout, self.data, target + 4 + index * struct.calcsize(layout))

    def _target(self, number: int) -> int:
        field = self._field(number)
        if not field:
            raise ValueError("its metadata is damaged")
        return field + _unpack("<I", self.data, field)[0]

    def _field(self, number: int) -> int:
        """Offset of a field; 0 if the table does not have it."""
        fields = self.at - _unpack("<i", self.data, self.at)[0]
        size = _unpack("<H", self.data, fields)[0]
        slot = 4 + 2 * number
        relative = _unpack("<H", self.data, fields + slot)[0] if slot + 2 <= size else 0
        return self.at + relative if relative else 0


def _unpack(layout: str, data: bytes, offset: int) -> tuple[int, ...]:
    if offset < 0:
        raise ValueError("its metadata is damaged")
    try:
        return struct.unpack_from(layout, data, offset)
    except struct.error:
        raise ValueError("its metadata is damaged") from None
