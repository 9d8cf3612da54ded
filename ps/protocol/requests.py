"""Encoding of trainers' requests to pservers: JSON heads, and bodies of concatenated arrays.

Every array is aligned to 8 bytes; gaps are filled with zeros. ``pull`` and ``push`` encode a request, ``read_pull`` and
``read_push`` decode it into views. Rows may use a 16-bit format on the network (``ps/protocol/half_precision.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edl.errors import PsError
from ps.protocol.half_precision import WIRE_DTYPES, decode_half, encode_half
from ps.rows import OPS, TablePush
from ps.spec import TableSpec

ALIGNMENT = 8
MOST_PARTS = 4096
_GAP = bytes(ALIGNMENT)


class InvalidRequest(PsError):
    """An invalid request, which fails on any retry. ``kind`` is the reason as a keyword."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One table's part of a pull."""

    table: str
    keys: NDArray[np.int64]
    dtype: str = "f4"
    """Number format of the rows in the answer."""
    dim: int = 0
    counts: NDArray[np.uint32] | None = None
    """Number of occurrences of each key; None: one for each time that it is listed."""


def padded(size: int) -> int:
    """``size`` rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def laid_out(arrays: Sequence[Any]) -> list[Any]:
    """Arrays interleaved with padding; the arrays are not copied."""
    found: list[Any] = []
    for array in arrays:
        size = memoryview(array).nbytes
        if size:
            found.append(array)
        if size % ALIGNMENT:
            found.append(_GAP[: padded(size) - size])
    return found


def pull(parts: Sequence[Wanted]) -> tuple[list[list[Any]], list[Any]]:
    """Encode a pull: ``parts`` of the head, and the body."""
    heads = [[one.table, len(one.keys), one.dtype, int(one.counts is not None), one.dim] for one in parts]
    counts = [one.counts for one in parts if one.counts is not None]
    return heads, laid_out([one.keys for one in parts] + counts)


def push(parts: Sequence[TablePush], dtype: str | Sequence[str] = "f4") -> tuple[list[list[Any]], list[Any]]:
    """Encode a push: ``parts`` of the head, and the body. ``dtype``: of all parts, or of each."""
    dtypes = [dtype] * len(parts) if isinstance(dtype, str) else dtype
    pairs = list(zip(parts, dtypes, strict=True))
    heads = [[one.table, len(one.keys), one.op, kind, one.grads.shape[1]] for one, kind in pairs]
    rows = [one.grads if kind == "f4" else encode_half(one.grads, kind) for one, kind in pairs]
    return heads, laid_out([one.keys for one in parts] + rows)


def read_pull(head: Mapping[str, Any], body: memoryview, tables: Mapping[str, TableSpec]) -> list[Wanted]:
    """Decode a pull into views of the body. Raises ``InvalidRequest``."""
    heads = [(*_named(one, 5), one[3]) for one in _parts(head)]
    arrays = _Arrays(body)
    found = []
    keys = [arrays.take(np.int64, count) for _, count, _, _, _ in heads]
    for (table, count, dtype, dim, counted), some in zip(heads, keys, strict=True):
        _check(tables, table, dim, dtype)
        found.append(Wanted(table, some, dtype, dim, arrays.take(np.uint32, count) if counted else None))
    arrays.end()
    return found


def read_push(head: Mapping[str, Any], body: memoryview, tables: Mapping[str, TableSpec]) -> list[TablePush]:
    """Decode a push; float32 rows are views of the body. Raises ``InvalidRequest``."""
    heads = [(*_named(one, 5, 3), one[2]) for one in _parts(head)]
    arrays = _Arrays(body)
    found = []
    keys = [arrays.take(np.int64, count) for _, count, _, _, _ in heads]
    for (table, count, dtype, dim, op), some in zip(heads, keys, strict=True):
        _check(tables, table, dim, dtype)
        if op not in OPS:
            raise InvalidRequest(
                "word", f"table {table}: the operation of a push is one of {', '.join(OPS)}, not {op!r}"
            )
        rows = arrays.take(WIRE_DTYPES[dtype], count * dim).reshape(count, dim)
        if dtype != "f4":
            narrowed, rows = rows, np.empty((count, dim), np.float32)
            decode_half(narrowed, dtype, rows)
        found.append(TablePush(table, some, rows, op))
    arrays.end()
    return found


def named(head: Mapping[str, Any]) -> set[str]:
    """Names of the tables in a push's head, which may be invalid otherwise."""
    parts = head.get("parts", [])
    return {str(one[0]) for one in parts if isinstance(one, list) and one} if isinstance(parts, list) else set()


def rows_bytes(count: int, dim: int, dtype: str) -> int:
    """Padded size of encoded rows, in bytes."""
    return padded(count * dim * np.dtype(WIRE_DTYPES[dtype]).itemsize)


class _Arrays:
    """Reads consecutive arrays from a body."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0

    def take(self, dtype: Any, count: int) -> NDArray[Any]:
        size = count * np.dtype(dtype).itemsize
        begin, self._at = self._at, self._at + padded(size)
        if begin + size > self._body.nbytes:
            raise InvalidRequest("word", f"the head announces more data than the body of {self._body.nbytes} bytes has")
        return np.frombuffer(self._body, dtype, count, begin) if count else np.zeros(0, dtype)

    def end(self) -> None:
        if padded(self._body.nbytes) != self._at:
            raise InvalidRequest("word", f"the body has {self._body.nbytes} bytes, the head announces {self._at}")


def _parts(head: Mapping[str, Any]) -> list[Any]:
    parts = head.get("parts", [])
    if not isinstance(parts, list) or len(parts) > MOST_PARTS:
        raise InvalidRequest("word", f"parts of a request: a list of at most {MOST_PARTS} was expected")
    return parts


def _named(part: Any, length: int, dtype_at: int = 2) -> tuple[str, int, str, int]:
    """Table, number of keys, dtype and dim from a part's head. Raises ``InvalidRequest``."""
    if isinstance(part, list) and len(part) == length:
        table, count, dtype, dim = part[0], part[1], part[dtype_at], part[4]
        good = isinstance(table, str) and isinstance(dtype, str) and type(dim) is int
        if good and type(count) is int and 0 <= count < 1 << 40:
            return table, count, dtype, dim
    raise InvalidRequest("word", f"not the head of a part of a request: {str(part)[:80]}")


def _check(tables: Mapping[str, TableSpec], table: str, dim: int, dtype: str) -> None:
    spec = tables.get(table)
    if spec is None:
        known = ", ".join(sorted(tables)) or "none"
        raise InvalidRequest("table", f"there is no table {table[:100]!r}; the defined tables are: {known}")
    if dim != spec.dim:
        raise InvalidRequest("dim", f"table {table}: rows have {spec.dim} numbers, the request has {dim}")
    if dtype not in WIRE_DTYPES:
        allowed = ", ".join(WIRE_DTYPES)
        raise InvalidRequest(
            "dtype", f"table {table}: the number format of rows is one of {allowed}, not {dtype[:20]!r}"
        )
