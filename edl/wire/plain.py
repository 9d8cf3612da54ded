"""Frozen dataclasses to JSON-like values and back, for what lies in the store.

Only what edl's own dataclasses use: None, bool, int, float, str, enums, NewTypes, tuples of one kind, optional
values, and dataclasses of these. Unknown keys are ignored, so that an older program can read
what a newer one wrote; a missing key takes the field's default.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import types
import typing
from typing import Any, TypeVar

from edl.errors import ProtocolError

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """A dataclass (or a value inside one) as JSON-like values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: type[T], value: Any) -> T:
    """The inverse of ``to_plain``. Raises ``TypeError`` or ``ValueError`` when the value does not fit the type."""
    return typing.cast(T, _read(kind, value))


def dumps(value: Any) -> bytes:
    """A dataclass as JSON text."""
    return json.dumps(to_plain(value), separators=(",", ":")).encode()


def loads(kind: type[T], text: bytes) -> T:
    """The inverse of ``dumps``. Raises ``ProtocolError`` when the text is nothing that ``dumps`` has written."""
    try:
        return from_plain(kind, json.loads(text))
    except (ValueError, TypeError, AttributeError) as error:
        raise ProtocolError(
            f"the store holds something that is no {kind.__name__} ({error}). Was it written by another program, "
            "or by another version of edl? Use another --rdzv-id"
        ) from error


@functools.lru_cache(maxsize=256)
def hints(kind: type) -> dict[str, Any]:
    """Resolved field types of a dataclass."""
    return typing.get_type_hints(kind)


def _read(kind: Any, value: Any) -> Any:
    kind = getattr(kind, "__supertype__", kind)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _read(next(option for option in typing.get_args(kind) if option is not type(None)), value)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{value!r} where a list belongs")
        return tuple(_read(typing.get_args(kind)[0], item) for item in value)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise TypeError(f"{value!r} where a {kind.__name__} belongs")  # type: ignore[union-attr]
        known = hints(kind)  # type: ignore[arg-type]
        return kind(**{name: _read(known[name], item) for name, item in value.items() if name in known})  # type: ignore[operator]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise TypeError(f"{value!r} where a value of type {kind.__name__} belongs")
    return value
