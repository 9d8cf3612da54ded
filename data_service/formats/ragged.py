"""Columns of lists of varying length: all values concatenated, and the offset of each record's list."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from edl.errors import SettingError


class Ragged(NamedTuple):
    """A list column of a batch: the list of record ``i`` is ``values[offsets[i]:offsets[i + 1]]``, as for
    ``torch.nn.EmbeddingBag`` with ``include_last_offset``."""

    values: Any
    offsets: Any
    """64-bit, one more than records; the first is 0."""


class _Flags(NamedTuple):
    writeable: bool


class RaggedColumn:
    """The part of the array interface needed to slice, gather and concatenate records."""

    __slots__ = ("offsets", "values")

    def __init__(self, values: Any, offsets: Any) -> None:
        self.values = values
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        """Size of values and offsets in bytes, as of an array: without the texts that objects hold."""
        return int(self.values.nbytes + self.offsets.nbytes)

    @property
    def flags(self) -> _Flags:
        """Tells whether the values are writable."""
        return _Flags(bool(self.values.flags.writeable))

    def __getitem__(self, records: slice) -> RaggedColumn:
        begin, end, _ = records.indices(len(self))
        offsets = self.offsets[begin : max(begin, end) + 1]
        return RaggedColumn(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, records: Any, axis: int = 0) -> RaggedColumn:
        """Select records in any order, in new arrays."""
        begins = self.offsets[:-1][records]
        lengths = self.offsets[1:][records] - begins
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        # Index of each value: the start of its list plus its position within the list.
        places = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], lengths)
        return RaggedColumn(self.values.take(places, axis=0), offsets)

    def copy(self) -> RaggedColumn:
        """A copy whose values and offsets are writable."""
        return RaggedColumn(self.values.copy(), self.offsets.copy())

    def public(self, pad: Any = None) -> Any:
        """The form given to scripts: ``Ragged``, or with ``pad`` an array as wide as the longest list, filled with
        ``pad``."""
        if pad is None:
            return Ragged(self.values, self.offsets)
        lengths = np.diff(self.offsets)
        width = int(lengths.max(initial=0))
        whole = np.full((len(self), width, *self.values.shape[1:]), pad, self.values.dtype)
        whole[np.arange(width) < lengths[:, None]] = self.values
        return whole


def column_bytes(column: Any) -> int:
    """Size of a column in bytes, including texts and byte strings, of which an array only holds the addresses."""
    values = column.values if isinstance(column, RaggedColumn) else column
    texts = sum(map(sys.getsizeof, values.ravel().tolist())) if values.dtype == object else 0
    return int(column.nbytes) + texts


def joined(parts: Sequence[Any]) -> Any:
    """Concatenate pieces of a column."""
    if not isinstance(parts[0], RaggedColumn):
        return np.concatenate(parts)
    begins = np.cumsum([0, *(part.offsets[-1] for part in parts)])
    offsets = [part.offsets[1:] + begin for part, begin in zip(parts, begins, strict=False)]
    return RaggedColumn(np.concatenate([part.values for part in parts]), np.concatenate([[0], *offsets]))


def checked_pad(pad: dict[str, Any]) -> dict[str, Any]:
    """Validate padding values by column. Raises ``SettingError`` unless they are numbers."""
    for name, value in pad.items():
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise SettingError("pad", f"{{{name!r}: {value!r}}}", "must map column names to numbers")
    return pad
