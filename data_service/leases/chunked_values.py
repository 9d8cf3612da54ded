"""Large values in the store, whose limit is about 1 MB per value.

A value is one key, or, if long, a head that lists its parts. Parts are named after their content, and the head is
written after them and before old parts are deleted. So after any number of these writes the value read is a complete
one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from edl.errors import DataError
from edl.master.service import Keep

PART_BYTES = 900_000
_INLINE, _PARTS = b"=", b"+"


class ChunkedValues:
    """Writes named values in chunks that the store accepts. Remembers the chunks in order to delete them."""

    def __init__(self) -> None:
        self._parts: dict[str, list[str]] = {}

    def put(self, name: str, value: bytes) -> list[Keep]:
        """Write a value, replacing the previous one of this name."""
        old = self._parts.pop(name, [])
        if len(value) < PART_BYTES:
            writes, names = [Keep(name, _INLINE + value)], []
        else:
            digest = hashlib.blake2b(value, digest_size=8).hexdigest()
            starts = range(0, len(value), PART_BYTES)
            names = [f"{name}/{digest}-{number}" for number in range(len(starts))]
            writes = [Keep(part, value[start : start + PART_BYTES]) for part, start in zip(names, starts, strict=True)]
            writes.append(Keep(name, _PARTS + json.dumps([digest, names]).encode("utf-8")))
            self._parts[name] = names
        return writes + [Keep(part, b"") for part in old if part not in names]

    def drop(self, name: str) -> list[Keep]:
        """Delete the value of this name."""
        return [Keep(name, b""), *(Keep(part, b"") for part in self._parts.pop(name, []))]

    def get(self, kept: Mapping[str, bytes], name: str) -> bytes:
        """Assemble a value. Raises ``DataError`` if it is incomplete or damaged."""
        head = kept[name]
        if head[:1] == _INLINE:
            return head[1:]
        try:
            digest, names = json.loads(head[1:])
            value = b"".join(kept[part] for part in names)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{name} in the store is incomplete: {error}") from None
        if hashlib.blake2b(value, digest_size=8).hexdigest() != digest:
            raise DataError(f"{name} in the store is damaged: its parts do not match its head")
        self._parts[name] = list(names)
        return value
