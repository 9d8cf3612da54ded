"""Dataclasses as JSON datagrams, for the local sockets between an agent and its own processes.

``AF_UNIX`` ``SOCK_SEQPACKET``: one JSON array ``[kind, fields]`` per datagram, descriptors beside it where needed.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from edl.errors import ProtocolError

LARGEST_BYTES = 64 * 1024
"""No message is longer: long texts are cut, and what has no limit travels in a memory file."""


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
