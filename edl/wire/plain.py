"""The values that lie in the store: JSON objects of frozen dataclasses."""

from __future__ import annotations

from typing import TypeVar

from edl.wire import json_messages
from edl.wire.json_messages import encode as dumps

__all__ = ["dumps", "loads"]

T = TypeVar("T")

_ADVICE = "The store holds it: was it written by another program, or by another version of edl? Use another --rdzv-id"


def loads(kind: type[T], text: bytes) -> T:
    """The inverse of ``dumps``. Raises ``ProtocolError`` when the text is nothing that ``dumps`` has written."""
    return json_messages.decode(kind, text, advice=_ADVICE)
