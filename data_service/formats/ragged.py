"""Columns of lists that differ in length: all values one after the other, and where each record's list begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from edl.errors import SettingError


class Ragged(NamedTuple):
    """What a batch has of such a column: the list of record ``i`` is ``values[offsets[i]:offsets[i + 1]]``, as for
    ``torch.nn.EmbeddingBag`` with ``include_last_offset``."""

    values: Any
    offsets: Any
    """64-bit, one more than there are records; the first is 0."""


class _Flags(NamedTuple):
    writeable: bool


class RaggedColumn:
    """As much of an array as records need that are cut, gathered and put together."""

    __slots__ = ("offsets", "values")

    def __init__(self, values: Any, offsets: Any) -> None:
        self.values = values
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        """Of all values and offsets."""
        return int(self.values.nbytes + self.offsets.nbytes)

    @property
    def flags(self) -> _Flags:
        """Whether the values may be written to."""
        return _Flags(bool(self.values.flags.writeable))

    def __getitem__(self, records: slice) -> RaggedColumn:
        begin, end, _ = records.indices(len(self))
        offsets = self.offsets[begin : max(begin, end) + 1]
        return RaggedColumn(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, records: Any, axis: int = 0) -> RaggedColumn:
        """Some records in any order, in new arrays."""
        begins = self.offsets[:-1][records]
        lengths = self.offsets[1:][records] - begins
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        # The place of each value: where its list begins, plus its number within the list.
        places = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], lengths)
        return RaggedColumn(self.values.take(places, axis=0), offsets)

    def copy(self) -> RaggedColumn:
        """One that may be written to."""
        return RaggedColumn(self.values.copy(), self.offsets.copy())

    def public(self, pad: Any = None) -> Any:
        """What the script gets: ``Ragged``, or with ``pad`` an array as wide as the longest list, filled up with it."""
        if pad is None:
            return Ragged(self.values, self.offsets)
        lengths = np.diff(self.offsets)
        width = int(lengths.max(initial=0))
        whole = np.full((len(self), width, *self.values.shape[1:]), pad, self.values.dtype)
        whole[np.arange(width) < lengths[:, None]] = self.values
        return whole


def joined(parts: Sequence[Any]) -> Any:
    """Several pieces of a column as one."""
    if not isinstance(parts[0], RaggedColumn):
        return np.concatenate(parts)
    begins = np.cumsum([0, *(part.offsets[-1] for part in parts)])
    offsets = [part.offsets[1:] + begin for part, begin in zip(parts, begins, strict=False)]
    return RaggedColumn(np.concatenate([part.values for part in parts]), np.concatenate([[0], *offsets]))


def checked_pad(pad: dict[str, Any]) -> dict[str, Any]:
    """By column, a number. Raises ``SettingError``."""
    for name, value in pad.items():
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise SettingError("pad", f"{{{name!r}: {value!r}}}", "must be a number by the name of a column")
    return pad
