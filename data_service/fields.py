"""Checks of what JSON made of a field: each gives the field's value, or raises ``ValueError`` saying what is needed."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any

_LIMIT = 1 << 62


def natural(value: object) -> int:
    """A whole number of at least 0, below 2**62."""
    if type(value) is not int or not 0 <= value < _LIMIT:
        raise ValueError("a whole number of at least 0 is needed")
    return value


def naturals(value: object) -> tuple[int, ...]:
    """A list of them."""
    if not isinstance(value, list):
        raise ValueError("a list of whole numbers is needed")
    return tuple(natural(one) for one in value)


def whole(value: object) -> int:
    """A whole number of less than 62 bits."""
    if type(value) is not int or not -_LIMIT <= value < _LIMIT:
        raise ValueError("a whole number is needed")
    return value


def string(value: object) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError("a text is needed")
    return value


def number(value: object) -> float:
    """A finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0 or value > 1e300:
        raise ValueError("a number of at least 0 is needed")
    return float(value)


def flag(value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false is needed")
    return value


def name(value: object) -> str:
    """A name that is fit for a key of the store."""
    text = string(value)
    if not 0 < len(text) <= 100 or not all(one.isalnum() or one in "._-" for one in text) or not text.isascii():
        raise ValueError("1 to 100 letters, digits, dots, dashes and underscores are needed")
    return text


def rows(*columns: Callable[[object], Any]) -> Callable[[object], tuple[tuple[Any, ...], ...]]:
    """A check for a list of rows. Leases come by the hundred thousand, hence the short way for plain numbers."""
    naturals = all(check is natural for check in columns)

    def check(value: object) -> tuple[tuple[Any, ...], ...]:
        if not isinstance(value, list):
            raise ValueError("a list is needed")
        found = []
        for row in value:
            if not isinstance(row, list) or len(row) != len(columns):
                raise ValueError(f"each entry needs {len(columns)} values, not {short(row)}")
            if naturals and set(map(type, row)) == {int} and min(row) >= 0 and max(row) < _LIMIT:
                found.append(tuple(row))
            else:
                found.append(tuple(check(one) for check, one in zip(columns, row, strict=True)))
        return tuple(found)

    return check


def rising(value: object) -> tuple[tuple[int, int], ...]:
    """Half-open ranges, rising and apart."""
    pairs = rows(natural, natural)(value)
    last = 0
    for begin, end in pairs:
        if not last <= begin < end:
            raise ValueError(f"ranges must rise and not overlap: {begin}-{end}")
        last = end
    return pairs


def strings(value: object) -> tuple[str, ...]:
    """A list of texts."""
    if not isinstance(value, list):
        raise ValueError("a list of texts is needed")
    return tuple(string(one) for one in value)


def wholes(value: object) -> tuple[int, ...]:
    """A list of whole numbers."""
    if not isinstance(value, list):
        raise ValueError("a list of whole numbers is needed")
    return tuple(whole(one) for one in value)


def encoded(value: object) -> bytes:
    """Bytes, as base64."""
    try:
        return base64.b64decode(string(value), validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from None


def short(value: object) -> str:
    """A value in a message: not more than 80 letters."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
