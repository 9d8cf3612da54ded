"""Rows as they cross the wire."""

from __future__ import annotations

import numpy as np
import pytest

from edl.errors import ProtocolError
from ps.rows import HEADER, Rows, concat, decode, decode_first, encode, encoded_bytes, no_rows, sizes


def rows_of(count: int, dim: int = 3, slots: int = 2) -> Rows:
    numbers = np.arange(count, dtype=np.uint32)
    floats = np.arange(count * (dim + slots), dtype=np.float32).reshape(count, dim + slots)
    return Rows(numbers.astype(np.int64) - 1, floats[:, :dim], floats[:, dim:], numbers + 1, numbers + 2, numbers + 3)


def same(one: Rows, other: Rows) -> bool:
    names = ("keys", "weights", "state", "frequency", "updates", "seen")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize(("count", "slots"), [(0, 2), (1, 0), (7, 2)])
def test_what_is_encoded_comes_back(count: int, slots: int) -> None:
    rows = rows_of(count, slots=slots)
    text = b"".join(encode(rows))
    assert len(text) == encoded_bytes(rows) == sizes({"t": rows})
    assert same(decode(text), rows)


def test_arrays_are_neither_copied_out_nor_in() -> None:
    rows = rows_of(4).take(np.arange(4))
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), rows.weights) for part in encode(rows))
    text = bytearray(b"".join(encode(rows)))
    assert np.shares_memory(decode(text).weights, np.frombuffer(text, np.uint8))


def test_rows_may_follow_one_another() -> None:
    text = b"".join([*encode(rows_of(3)), *encode(rows_of(2))])
    first, used = decode_first(text)
    assert len(first) == 3
    assert same(decode(text[used:]), rows_of(2))
    with pytest.raises(ProtocolError, match="bytes"):
        decode(text)


@pytest.mark.parametrize("cut", [0, 5, HEADER.size, HEADER.size + 8])
def test_what_is_cut_off_is_refused(cut: int) -> None:
    with pytest.raises(ProtocolError, match="rows"):
        decode(b"".join(encode(rows_of(3)))[:cut])


def test_foreign_bytes_are_refused() -> None:
    with pytest.raises(ProtocolError, match="not encoded rows"):
        decode(b"x" * 64)


def test_rows_can_be_joined_and_picked() -> None:
    joined = concat([rows_of(2), no_rows(3, 2), rows_of(3)])
    assert joined.keys.tolist() == [-1, 0, -1, 0, 1]
    assert same(joined.take(np.array([2, 3, 4])), rows_of(3))
    assert same(joined.take(slice(0, 2)), rows_of(2))
