"""Codec of the values in the store: frozen dataclasses as JSON objects."""

from __future__ import annotations

from typing import TypeVar

from edl.wire import json_messages
from edl.wire.json_messages import encode as dumps

__all__ = ["dumps", "loads"]

T = TypeVar("T")

_ADVICE = "The store holds it: was it written by another program, or by another version of edl? Use another --rdzv-id"


def loads(kind: type[T], text: bytes) -> T:
    """The inverse of ``dumps``. Raises ``ProtocolError`` if ``dumps`` cannot have written the text."""
    return json_messages.decode(kind, text, advice=_ADVICE)
