"""Content of the stream from a bucket's owner to its replicas: pieces of pushes, images of buckets, releases.

A frame carries many items: a head that lists them, and a body of arrays, each aligned to 8 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edl.errors import ProtocolError
from ps.hashing import buckets_of
from ps.intents import Intent, home
from ps.protocol.messages import of_ranges, to_ranges
from ps.protocol.requests import laid_out, padded
from ps.rows import BucketImage, Rows, ShardChange, decode, encode, encoded_bytes, sizes


@dataclass(frozen=True, slots=True)
class ReleaseItem:
    """The sender no longer serves these buckets; everything that it applied to them precedes this item."""

    buckets: tuple[int, ...]


Content = ShardChange | BucketImage | ReleaseItem


def size_of(content: Content) -> int:
    """Approximate size in a body, in bytes."""
    if isinstance(content, ReleaseItem):
        return 0
    if isinstance(content, ShardChange):
        more = sum(keys.nbytes for keys in content.removed.values())
        more += sum(buckets.nbytes for _, _, buckets in content.pushes)
    else:
        more = 16 * len(content.seqs)
    return sizes(content.rows) + more + 64 + sum(len(one.text) for one in content.intents.values())


def head_bytes_of(content: Content) -> int:
    """Most bytes that the item takes in a head: lists of names and of numbers of up to 20 digits."""
    if isinstance(content, ReleaseItem):
        return 64 + 12 * len(content.buckets)
    names = [*content.rows, *(content.removed if isinstance(content, ShardChange) else ())]
    entries = len(content.intents) + (len(content.pushes) if isinstance(content, ShardChange) else 0)
    return 128 + sum(len(name) + 32 for name in names) + 80 * entries


def pack(items: Sequence[tuple[int, Content]]) -> tuple[list[Any], list[Any]]:
    """Encode items, each with the version of its orders, as a list for the head and the parts of the body."""
    heads: list[Any] = []
    arrays: list[Any] = []
    for version, content in items:
        if isinstance(content, ReleaseItem):
            heads.append(["release", version, to_ranges(content.buckets)])
            continue
        tables = [[table, _put(arrays, rows)] for table, rows in content.rows.items()]
        if isinstance(content, BucketImage):
            arrays += laid_out([np.array(list(content.seqs.items()), np.int64).reshape(-1)])
            encoded = _encode_intents(arrays, content.intents)
            heads.append(["image", version, content.bucket, len(content.seqs), tables, encoded])
            continue
        arrays += laid_out([content.buckets])
        gone = [[table, len(keys)] for table, keys in content.removed.items()]
        arrays += laid_out([np.ascontiguousarray(keys) for keys in content.removed.values()])
        pushes = [[trainer, seq, len(buckets)] for trainer, seq, buckets in content.pushes]
        arrays += laid_out([np.ascontiguousarray(buckets) for _, _, buckets in content.pushes])
        encoded = _encode_intents(arrays, content.intents)
        heads.append(["piece", version, content.shard, pushes, len(content.buckets), tables, gone, encoded])
    return heads, arrays


def unpack(heads: Any, body: memoryview) -> Iterator[tuple[int, Content]]:
    """The inverse of ``pack``, with views into the body. Raises ``ProtocolError``."""
    try:
        at = 0
        for head in heads:
            kind, version = head[0], int(head[1])
            if kind == "release":
                yield version, ReleaseItem(tuple(of_ranges(head[2])))
            elif kind == "image":
                rows, at = _rows(head[4], body, at)
                pairs = np.frombuffer(body, np.int64, 2 * head[3], at) if head[3] else np.zeros(0, np.int64)
                at += pairs.nbytes
                seqs = {int(one): int(seq) for one, seq in pairs.reshape(-1, 2)}
                intents, at = _decode_intents(head[5], body, at)
                yield version, BucketImage(int(head[2]), seqs, rows, intents)
            elif kind == "piece":
                piece, at = _piece(head, body, at)
                yield version, piece
            else:
                raise ProtocolError(f"unknown kind of item: {kind!r}")
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise ProtocolError(f"not items of a replication stream: {error!r}") from None


def part_of(piece: ShardChange, keep: NDArray[np.bool_]) -> ShardChange:
    """The part of a piece that belongs to the buckets in ``keep``, a mask by bucket."""
    rows = {table: one.take(keep[buckets_of(one.keys)]) for table, one in piece.rows.items()}
    removed = {table: keys[keep[buckets_of(keys)]] for table, keys in piece.removed.items()}
    buckets = piece.buckets[keep[piece.buckets]]
    pushes = tuple((trainer, seq, some[keep[some]]) for trainer, seq, some in piece.pushes)
    intents = {trainer: one for trainer, one in piece.intents.items() if keep[home(trainer)]}
    return ShardChange(piece.shard, pushes, buckets, rows, removed, intents)


def _encode_intents(arrays: list[Any], intents: Mapping[int, Intent]) -> list[Any]:
    """Encode intents; their texts go into the body because they can exceed the size of a head."""
    encoded = []
    for trainer, one in intents.items():
        text = one.text.encode()
        arrays += laid_out([np.frombuffer(text, np.uint8)])
        encoded.append([trainer, one.seq, len(text), one.fenced])
    return encoded


def _decode_intents(encoded: Any, body: memoryview, at: int) -> tuple[dict[int, Intent], int]:
    found = {}
    for trainer, seq, size, fenced in encoded:
        text = body[at : at + size]
        if len(text) != size:
            raise ValueError("an intent's text is truncated")
        found[int(trainer)] = Intent(int(seq), str(text, "utf-8"), bool(fenced))
        at += padded(size)
    return found, at


def _put(arrays: list[Any], rows: Rows) -> int:
    """Append rows to a body; return their unpadded size in bytes."""
    size = encoded_bytes(rows)
    arrays += encode(rows)
    if padded(size) != size:
        arrays.append(bytes(padded(size) - size))
    return size


def _rows(tables: Any, body: memoryview, at: int) -> tuple[dict[str, Rows], int]:
    found: dict[str, Rows] = {}
    for table, size in tables:
        found[str(table)] = decode(body[at : at + size])
        at += padded(size)
    return found, at


def _piece(head: Any, body: memoryview, at: int) -> tuple[ShardChange, int]:
    _, _, shard, pushes, touched, tables, gone, encoded = head
    rows, at = _rows(tables, body, at)
    buckets = np.frombuffer(body, np.uint16, touched, at) if touched else np.zeros(0, np.uint16)
    at += padded(2 * touched)
    removed = {}
    for table, count in gone:
        removed[str(table)] = np.frombuffer(body, np.int64, count, at) if count else np.zeros(0, np.int64)
        at += 8 * count
    numbered = []
    for trainer, seq, count in pushes:
        numbered.append((int(trainer), int(seq), np.frombuffer(body, np.uint16, count, at) if count else buckets[:0]))
        at += padded(2 * count)
    intents, at = _decode_intents(encoded, body, at)
    return ShardChange(int(shard), tuple(numbered), buckets, rows, removed, intents), at
