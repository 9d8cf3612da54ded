"""Recognises messages of frameworks that report a lost peer, in a worker's exception or in its last log lines."""

from __future__ import annotations

import re
from collections.abc import Iterator

_PEER_LOSS = re.compile(
    r"(?i:connection closed by (?:remote )?peer|connection reset by peer|connection refused|broken pipe)"
    r"|gloo/transport/|gloo::|Gloo connectFullMesh failed"
    r"|Timed out waiting \d+ms for"
    r"|NCCL communicator was aborted|ncclRemoteError|ncclSystemError"
    r"|remote process exited or there was a network error"
    r"|Watchdog caught collective operation timeout"
    r"|DistNetworkError|DistStoreError"
    r"|failed to recv, got 0 bytes|[Ss]ocket Timeout"
    r"|TCPStore.*(?:closed|failed|time(?:d )?out)",
)
"""Messages of gloo, NCCL and torch's store."""


def speaks_of_lost_peer(text: str) -> bool:
    """Whether a message or a log says that a peer was lost, or that a communicator was aborted."""
    return _PEER_LOSS.search(text) is not None


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its causes, contexts and group members, each once."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        left += [*getattr(one, "exceptions", ()), one.__context__, one.__cause__]
