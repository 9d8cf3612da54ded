"""Conversion of tables to arrays, without copying where values are contiguous. Errors name the column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_service.formats.ragged import RaggedColumn
from edl.errors import UnsupportedData

Array: TypeAlias = NDArray[Any]


def to_numpy(table: pa.Table, fill: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Convert each column to an array with one row per record.

    Numbers keep their type; fixed-size lists and binaries have one more dimension; dates and timestamps become
    ``datetime64``; text and bytes become objects; lists of varying length become a ``RaggedColumn``. ``fill``:
    replacements for nulls, by column. Without one, null is NaN in float columns, NaT in dates and None in text, and an
    error elsewhere, because an integer array would silently become a float array. In list columns the replacement
    applies to nulls among the values; null lists become empty. Raises ``UnsupportedData`` for nested lists of varying
    length, structs, maps, decimals, and nulls that need ``fill``.

    Contiguous numbers, as in a shard of an IPC file, are not copied; such arrays are read-only.
    """
    return {name: _array(name, table.column(name), (fill or {}).get(name)) for name in table.column_names}


def take(table: pa.Table, indices: Array, fill: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The records at these indices, in this order, in new writable arrays. Only these records are accessed."""
    found: dict[str, Any] = {}
    chosen = np.asarray(indices, np.int64)
    for name in table.column_names:
        column = table.column(name)
        if column.num_chunks == 1 and is_plain(column.type) and not column.null_count:
            found[name] = _array(name, column, None).take(chosen, axis=0)
        else:
            found[name] = _writable(_array(name, column.take(pa.array(chosen)), (fill or {}).get(name)))
    return found


def from_numpy(array: Array) -> pa.Array:
    """The inverse: all dimensions but the first become fixed-size lists."""
    if array.ndim <= 1:
        return pa.array(array)
    values = pa.array(np.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return values


def _array(name: str, column: pa.ChunkedArray, fill: Any) -> Any:
    if isinstance(column.type, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if is_ragged(column.type):
        if is_ragged(column.type.value_type):
            raise unsupported(name, column.type)
        return _ragged(name, column, fill)
    if fill is not None:
        column = filled(name, column, fill)
    chunks = [_chunk(name, chunk) for chunk in column.chunks]
    if len(chunks) == 1:
        return chunks[0]
    return np.concatenate(chunks) if chunks else _chunk(name, pa.array([], column.type))


def _chunk(name: str, chunk: pa.Array) -> Array:
    kind = chunk.type
    if pa.types.is_fixed_size_list(kind):
        _no_nulls(name, chunk)
        values = _chunk(name, chunk.flatten())
        return values.reshape(len(chunk), kind.list_size, *values.shape[1:])
    if pa.types.is_fixed_size_binary(kind):
        _no_nulls(name, chunk)
        width = kind.byte_width
        data = np.frombuffer(chunk.buffers()[1] or b"", np.uint8)
        return data[chunk.offset * width : (chunk.offset + len(chunk)) * width].reshape(len(chunk), width)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        _no_nulls(name, chunk)
        return np.asarray(chunk.to_numpy(zero_copy_only=False))
    if pa.types.is_floating(kind) or _is_time(kind):
        return np.asarray(chunk.to_numpy(zero_copy_only=False))
    if _is_text(kind):
        return np.asarray(chunk.to_numpy(zero_copy_only=False), dtype=object)
    raise unsupported(name, kind)


def _ragged(name: str, column: pa.ChunkedArray, fill: Any) -> RaggedColumn:
    """Convert lists of varying length: all values concatenated, and the offsets of the lists."""
    if column.null_count and fill is None:
        _no_nulls(name, column.combine_chunks())
    values, ends, total = [], [np.zeros(1, np.int64)], 0
    for chunk in column.chunks:
        lengths = np.asarray(pc.fill_null(pc.list_value_length(chunk), 0).to_numpy(zero_copy_only=False), np.int64)
        # ``flatten`` skips the values behind null lists.
        values.append(_array(name, pa.chunked_array([chunk.flatten()]), fill))
        ends.append(total + np.cumsum(lengths))
        total += int(lengths.sum())
    if not values:
        values.append(_array(name, pa.chunked_array([pa.array([], column.type.value_type)]), None))
    return RaggedColumn(np.concatenate(values) if len(values) > 1 else values[0], np.concatenate(ends))


def is_ragged(kind: pa.DataType) -> bool:
    """True for lists of varying length."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def unsupported(name: str, kind: pa.DataType) -> UnsupportedData:
    """The error for a column type that has no array equivalent."""
    advice = "Leave it out (columns=…), convert it to numbers or lists of numbers, or use a function (decode=…)"
    return UnsupportedData(f"column {name} has type {kind}, which cannot be converted to an array. {advice}")


def check_types(schema: pa.Schema, file: str) -> None:
    """Raise ``UnsupportedData`` for a column that cannot be converted, before anything is read."""
    for field in schema:
        kind = field.type
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        if pa.types.is_dictionary(kind) or is_ragged(kind):
            kind = kind.value_type
        while pa.types.is_fixed_size_list(kind):
            kind = kind.value_type
        types = pa.types
        plain = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
        if not (plain or _is_text(kind) or _is_time(kind) or types.is_fixed_size_binary(kind) or types.is_null(kind)):
            raise UnsupportedData(f"{file}: {unsupported(field.name, field.type)}")


def filled(name: str, column: pa.ChunkedArray, fill: Any) -> pa.ChunkedArray:
    """Replace nulls in a column; in lists of fixed size, those among the values, and all values of null lists. Raises
    ``UnsupportedData`` if the value does not fit the type."""
    if pa.types.is_fixed_size_list(column.type):
        return pa.chunked_array([_filled_lists(name, chunk, fill) for chunk in column.chunks], column.type)
    if not column.null_count:
        return column
    try:
        return pc.fill_null(column, _scalar(fill, column.type))
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise UnsupportedData(
            f"column {name} has type {column.type}: {fill!r} cannot replace its nulls ({error})"
        ) from None


def _filled_lists(name: str, lists: pa.FixedSizeListArray, fill: Any) -> pa.FixedSizeListArray:
    size = lists.type.list_size
    values = lists.values.slice(lists.offset * size, len(lists) * size)
    if lists.null_count:  # what is behind null lists may be anything
        null = np.repeat(lists.is_null().to_numpy(zero_copy_only=False), size)
        values = values.take(pa.array(np.arange(len(values)), mask=null))
    whole = filled(name, pa.chunked_array([values]), fill)
    return pa.FixedSizeListArray.from_arrays(whole.combine_chunks(), type=lists.type)


def _scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    """The value with this type: 0 and the text ``false`` are booleans, 7 is a text."""
    try:
        return pa.scalar(value, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        if not (pa.types.is_boolean(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise
        return pa.scalar(value).cast(kind)


def _no_nulls(name: str, chunk: pa.Array) -> None:
    if chunk.null_count:
        value, text = ("b'…'", "TEXT") if pa.types.is_fixed_size_binary(chunk.type) else ("0", "0")
        advice = f"Give a replacement: fill={{{name!r}: {value}}}, or convert with --fill {name}={text}"
        raise UnsupportedData(f"column {name} is {chunk.type} and has {chunk.null_count} nulls. {advice}")


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_duration(kind))


def is_plain(kind: pa.DataType) -> bool:
    """True if the values are contiguous in memory."""
    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    types = pa.types
    numeric = types.is_integer(kind) or types.is_floating(kind) or types.is_fixed_size_binary(kind)
    return bool(numeric or types.is_timestamp(kind) or types.is_date64(kind) or types.is_duration(kind))


def _writable(array: Any) -> Any:
    return array if array.flags.writeable else array.copy()
