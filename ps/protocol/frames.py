"""The frame format of parameter-server connections: a fixed header, a small head, a body of up to 1 GiB.

    magic "edp1" | op | flags | 0 | head bytes | wait ms | request | body bytes | head check | body check | check

Little-endian. ``request`` pairs an answer with its request; 0 is unsolicited. ``wait`` is how long the caller
waits for the answer, so that no work is done for it later. The three checks are 64-bit XXH3 hashes: of the head,
of the body if a flag says so (data is not damaged on a unix socket), and of the header before it. The
header is verified before its lengths are used. Another flag says that the body lies in memory that the peer
has lent (``ps/net/buffers.py``) and does not follow; a third one in a request allows this. Nothing in a
frame is ever unpickled: heads are JSON, bodies arrays.

Pure: bytes in, bytes out. ``ps/net/connection.py`` moves them over blocking sockets, ``ps/net/master_connections.py``
over asyncio.
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
"""Or any other object with C-contiguous memory, such as a numpy array; see ``views``."""

MAGIC = b"edp1"
MOST_HEAD = 1 << 20
MOST_BODY = 1 << 30
UNASKED = 0
"""Request number of an unsolicited frame."""
_CHECKED, _LENT, _BORROWS = 1, 2, 4
_FIELDS = struct.Struct("<4sBBHIIQQQQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECK.size
_MOST_WAIT_MS = (1 << 32) - 1

hash_of = xxhash.xxh3_64_intdigest
Check = xxhash.xxh3_64
"""The same hash, computed incrementally."""


class FrameOp(enum.IntEnum):
    """The type of a frame."""

    HELLO = 1
    """First frame of a connection, from the caller."""
    PULL = 2
    PUSH = 3
    CONTROL = 4
    """A message of ``ps/protocol/messages.py``. Also sent by the server, unsolicited."""
    STREAM = 5
    """From pserver to pserver: many in flight at once, acknowledged together; see ``FrameCaller.send``."""
    SCAN = 6
    STATS = 7
    BYE = 8
    """The peer leaves on purpose. Not answered."""
    PING = 9
    """Answered by the transport itself: proves that the process runs."""
    INTENT = 10
    """A trainer stores the records of its next push, or reads those of a lost trainer."""

    OK = 32
    MOVED = 33
    WAIT = 34
    STALE = 35
    REFUSED = 36
    BUSY = 37
    ROLLED_BACK = 38


_OPS = {int(op): op for op in FrameOp}


@dataclass(frozen=True, slots=True)
class Frame:
    """A received frame. ``body`` lies in memory that will be reused; see the function that returned it."""

    op: FrameOp
    request: int
    head: bytes
    body: memoryview
    wait_s: float = 0.0
    borrows: bool = False
    """The body of the answer may be in lent memory."""

    def json(self) -> dict[str, Any]:
        """The head as a JSON object; an empty head is an empty object. Raises ``ProtocolError``."""
        return unpack_head(self.head)


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded frame header."""

    op: FrameOp
    request: int
    head_bytes: int
    body_bytes: int
    wait_s: float
    head_check: int
    body_check: int | None
    """None: the body has no checksum."""
    lent: bool = False
    borrows: bool = False

    def accept_head(self, head: Buffer) -> None:
        """Verify the head's checksum. Raises ``ProtocolError``."""
        if hash_of(head) != self.head_check:
            raise ProtocolError(f"the head of a frame ({self.op.name}, {self.head_bytes} bytes) was damaged in transit")

    def accept_body(self, check: int) -> None:
        """Verify the body's checksum. Raises ``ProtocolError``."""
        if self.body_check is not None and check != self.body_check:
            raise ProtocolError(f"the body of a frame ({self.op.name}, {self.body_bytes} bytes) was damaged in transit")


def pack(
    op: FrameOp,
    request: int,
    head: bytes = b"",
    body: Sequence[memoryview] = (),
    *,
    wait_s: float = 0,
    check: bool,
    lent: bool = False,
    borrows: bool = False,
) -> bytes:
    """Encode header and head of a frame; the parts of the body follow, unless it is ``lent``. Raises ``ProtocolError``
    if a size limit is exceeded."""
    size = sum(part.nbytes for part in body)
    if len(head) > MOST_HEAD or size > MOST_BODY:
        raise ProtocolError(
            f"a frame ({op.name}) with a head of {len(head)} bytes and a body of {size} bytes; limits: {MOST_HEAD} and "
            f"{MOST_BODY}. Ask for less at a time"
        )
    flags, body_check = (_CHECKED, check_of(body)) if check and size and not lent else (0, 0)
    flags |= (_LENT if lent else 0) | (_BORROWS if borrows else 0)
    wait_ms = min(_MOST_WAIT_MS, int(wait_s * 1000))
    fields = _FIELDS.pack(MAGIC, op, flags, 0, len(head), wait_ms, request, size, hash_of(head), body_check)
    return b"".join((fields, _CHECK.pack(hash_of(fields)), head))


def unpack(data: Buffer) -> Header:
    """Decode a header of exactly ``HEADER_BYTES`` bytes. Raises ``ProtocolError``."""
    magic, op, flags, spare, head_bytes, wait_ms, request, size, head_check, body_check = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(f"not a frame of this protocol: it begins with {bytes(magic)!r}")
    if _CHECK.unpack_from(data, _FIELDS.size)[0] != hash_of(data[: _FIELDS.size]):
        raise ProtocolError("the header of a frame was damaged in transit")
    if op not in _OPS or flags & ~(_CHECKED | _LENT | _BORROWS) or spare:
        raise ProtocolError(f"a frame of an unknown kind ({op}, flags {flags}): the peer runs another version")
    if head_bytes > MOST_HEAD or size > MOST_BODY:
        raise ProtocolError(f"a frame with a head of {head_bytes} bytes and a body of {size}")
    checked = body_check if flags & _CHECKED else None
    lent, borrows = bool(flags & _LENT), bool(flags & _BORROWS)
    return Header(_OPS[op], request, head_bytes, size, wait_ms / 1000, head_check, checked, lent, borrows)


def check_of(body: Sequence[memoryview]) -> int:
    """Checksum of the concatenated parts."""
    if len(body) == 1:
        return hash_of(body[0])
    whole = Check()
    for part in body:
        whole.update(part)
    return whole.intdigest()


def views(parts: Sequence[Any]) -> list[memoryview]:
    """Parts of a body as memoryviews of bytes, without copying; empty ones are omitted. Raises ``ProtocolError`` for
    non-contiguous memory."""
    found = []
    for part in parts:
        view = memoryview(part)
        if not view.nbytes:
            continue
        if not view.c_contiguous:
            raise ProtocolError("a part of a body is not contiguous in memory; copy it first")
        found.append(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
    return found


def pack_head(content: Mapping[str, Any]) -> bytes:
    """Encode a head as JSON."""
    return json.dumps(content, separators=(",", ":")).encode()


def unpack_head(head: Buffer) -> dict[str, Any]:
    """The inverse of ``pack_head``. Raises ``ProtocolError``."""
    if not head:
        return {}
    try:
        content = json.loads(bytes(head))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not the head of a frame: {error}") from None
    if not isinstance(content, dict):
        raise ProtocolError(f"not the head of a frame: {str(content)[:80]!r}")
    return content
