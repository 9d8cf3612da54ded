"""Dataclasses as JSON datagrams, for the local sockets between an agent and its own processes.

``AF_UNIX`` ``SOCK_SEQPACKET``: one JSON array ``[kind, fields]`` per datagram, descriptors beside it where needed.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from edl.errors import ProtocolError

LARGEST_BYTES = 64 * 1024
"""No message is longer: long texts are cut, and what has no limit travels in a memory file."""


def write_memory(name: str, data: bytes) -> int:
    """A memory file that holds the data, for what has no limit; returns its descriptor, which the caller closes."""
    descriptor = os.memfd_create(name)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_memory(descriptor: int) -> bytes:
    """The inverse of ``write_memory``; leaves the descriptor open."""
    size, data = os.fstat(descriptor).st_size, b""
    while len(data) < size and (part := os.pread(descriptor, size - len(data), len(data))):
        data += part
    return data


class Datagrams:
    """Codec for one set of flat dataclasses, told apart by name."""

    def __init__(self, *kinds: type) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def encode(self, message: Any) -> bytes:
        """One datagram."""
        return json.dumps([type(message).__name__, dataclasses.asdict(message)]).encode()

    def decode(self, datagram: bytes) -> Any:
        """The inverse of ``encode``. Raises ``ProtocolError`` for anything else."""
        try:
            name, fields = json.loads(datagram)
            return self._kinds[name](**fields)
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"not a message of ours: {datagram[:200]!r} ({error})") from error
