"""The layout of what goes over a line to or from a parameter server: a fixed header, a small head, a body of any size.

    magic "edp1" | op | flags | 0 | head bytes | patience ms | request | body bytes | head check | body check | check

Little-endian. ``request`` pairs a reply with what it answers; 0 is said unasked. ``patience`` is how long whoever asks
waits for the answer, so that nobody works for somebody who has gone. The three checks are XXH3 of 64 bits: of the head,
of the body if a flag says that there is one (a unix socket cannot damage anything), and of the header before it. The
header is checked before its lengths are believed. Another flag says that the body lies in memory that the other side
has lent (``ps/net/buffers.py``) and does not follow; whoever asks says with a third that this would do. Nothing in a
frame is ever unpickled: heads are JSON, bodies arrays.

Pure: bytes in, bytes out. ``ps/net/connection.py`` moves them over blocking sockets, ``ps/net/master_lines.py`` over
asyncio.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from edl.errors import ProtocolError

Buffer = bytes | bytearray | memoryview
"""Also anything else with C-contiguous memory, such as a numpy array; see ``views``."""

MAGIC = b"edp1"
MOST_HEAD = 1 << 20
MOST_BODY = 1 << 30
UNASKED = 0
"""Number of the request that a frame belongs to which nobody has asked for."""
_CHECKED, _LENT, _BORROWS = 1, 2, 4
_FIELDS = struct.Struct("<4sBBHIIQQQQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECK.size
_MOST_PATIENCE_MS = (1 << 32) - 1

hash_of = xxhash.xxh3_64_intdigest
Check = xxhash.xxh3_64
"""The same, in pieces."""


class Op(enum.IntEnum):
    """What a frame is."""

    HELLO = 1
    """First of a connection, from the side that calls."""
    PULL = 2
    PUSH = 3
    CONTROL = 4
    """A word of ``ps/protocol/messages.py``. Also said by the side that is called, unasked."""
    STREAM = 5
    """From pserver to pserver: many under way at a time, answered together; see ``Caller.send``."""
    SCAN = 6
    STATS = 7
    BYE = 8
    """The peer goes on purpose. Not answered."""
    PING = 9
    """Answered by the transport itself: the process runs."""
    INTENT = 10
    """A trainer says which records it is about to push, or asks what one that is gone had said."""

    OK = 32
    MOVED = 33
    WAIT = 34
    STALE = 35
    REFUSED = 36
    BUSY = 37
    ROLLED_BACK = 38


_OPS = {int(op): op for op in Op}


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame that has come. ``body`` lies in memory that is used again: see who gives it."""

    op: Op
    request: int
    head: bytes
    body: memoryview
    patience_s: float = 0.0
    borrows: bool = False
    """The body of the answer may be lent."""

    def json(self) -> dict[str, Any]:
        """The head, as a JSON object; empty for an empty one. Raises ``ProtocolError``."""
        return unpack_head(self.head)


@dataclass(frozen=True, slots=True)
class Header:
    """What comes before a head and a body."""

    op: Op
    request: int
    head_bytes: int
    body_bytes: int
    patience_s: float
    head_check: int
    body_check: int | None
    """None: the body is not checked."""
    lent: bool = False
    borrows: bool = False

    def accept_head(self, head: Buffer) -> None:
        """Raises ``ProtocolError`` when it is not the head that was sent."""
        if hash_of(head) != self.head_check:
            raise ProtocolError(f"the head of a frame ({self.op.name}, {self.head_bytes} bytes) was damaged on the way")

    def accept_body(self, check: int) -> None:
        """Raises ``ProtocolError`` when it is not the body that was sent, by its checksum."""
        if self.body_check is not None and check != self.body_check:
            raise ProtocolError(f"the body of a frame ({self.op.name}, {self.body_bytes} bytes) was damaged on the way")


def pack(
    op: Op,
    request: int,
    head: bytes = b"",
    body: Sequence[memoryview] = (),
    *,
    patience_s: float = 0,
    check: bool,
    lent: bool = False,
    borrows: bool = False,
) -> bytes:
    """Header and head of a frame, to be followed by the parts of the body, unless that is ``lent``. Raises
    ``ProtocolError`` for too much."""
    size = sum(part.nbytes for part in body)
    if len(head) > MOST_HEAD or size > MOST_BODY:
        raise ProtocolError(
            f"a frame ({op.name}) with a head of {len(head)} bytes and a body of {size}: the most are {MOST_HEAD} and "
            f"{MOST_BODY}. Ask for less at a time"
        )
    flags, body_check = (_CHECKED, check_of(body)) if check and size and not lent else (0, 0)
    flags |= (_LENT if lent else 0) | (_BORROWS if borrows else 0)
    patience_ms = min(_MOST_PATIENCE_MS, int(patience_s * 1000))
    fields = _FIELDS.pack(MAGIC, op, flags, 0, len(head), patience_ms, request, size, hash_of(head), body_check)
    return b"".join((fields, _CHECK.pack(hash_of(fields)), head))


def unpack(data: Buffer) -> Header:
    """The inverse, of exactly ``HEADER_BYTES``. Raises ``ProtocolError``."""
    magic, op, flags, spare, head_bytes, patience_ms, request, size, head_check, body_check = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(f"not a frame of this protocol: it begins with {bytes(magic)!r}")
    if _CHECK.unpack_from(data, _FIELDS.size)[0] != hash_of(data[: _FIELDS.size]):
        raise ProtocolError("the header of a frame was damaged on the way")
    if op not in _OPS or flags & ~(_CHECKED | _LENT | _BORROWS) or spare:
        raise ProtocolError(f"a frame of an unknown kind ({op}, flags {flags}): the other side runs another version")
    if head_bytes > MOST_HEAD or size > MOST_BODY:
        raise ProtocolError(f"a frame with a head of {head_bytes} bytes and a body of {size}")
    checked = body_check if flags & _CHECKED else None
    lent, borrows = bool(flags & _LENT), bool(flags & _BORROWS)
    return Header(_OPS[op], request, head_bytes, size, patience_ms / 1000, head_check, checked, lent, borrows)


def check_of(body: Sequence[memoryview]) -> int:
    """Checksum of parts that follow one another."""
    if len(body) == 1:
        return hash_of(body[0])
    whole = Check()
    for part in body:
        whole.update(part)
    return whole.intdigest()


def views(parts: Sequence[Any]) -> list[memoryview]:
    """Parts of a body as bytes, without copying; empty ones are left out. Raises ``ProtocolError`` for memory with
    gaps."""
    found = []
    for part in parts:
        view = memoryview(part)
        if not view.nbytes:
            continue
        if not view.c_contiguous:
            raise ProtocolError("a part of a body does not lie in one piece of memory: copy it first")
        found.append(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
    return found


def pack_head(content: Mapping[str, Any]) -> bytes:
    """A head as JSON."""
    return json.dumps(content, separators=(",", ":")).encode()


def unpack_head(head: Buffer) -> dict[str, Any]:
    """The inverse. Raises ``ProtocolError``."""
    if not head:
        return {}
    try:
        content = json.loads(bytes(head))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not the head of a frame: {error}") from None
    if not isinstance(content, dict):
        raise ProtocolError(f"not the head of a frame: {str(content)[:80]!r}")
    return content
