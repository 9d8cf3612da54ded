"""What a worker's last words say about why it ended. Pure text work."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from edl.agent.machine import SIGABRT

_PEER_LOSS = re.compile(
    r"Connection closed by peer"
    r"|Connection reset by peer"
    r"|Connection refused"
    r"|Broken pipe"
    r"|gloo::(?:Timeout|Io)Exception"
    r"|gloo/transport/tcp/"
    r"|Timed out waiting \d+ms for"
    r"|ncclRemoteError|ncclSystemError|NCCL communicator was aborted|Watchdog caught collective operation timeout"
    r"|DistNetworkError|DistStoreError"
    r"|remote process exited or there was a network error"
    r"|TCPStore.*(?:closed|failed|timed out)",
    re.IGNORECASE,
)
"""Texts by which gloo, NCCL and the frameworks' stores report that the other side of a connection is gone."""


@dataclass(frozen=True, slots=True)
class LastWords:
    """What is known about a worker's end beside its exit status."""

    exception: str = ""
    traceback: str = ""
    peer_loss: bool = False


def last_words(exit_code: int, tail: str, error_file: str) -> LastWords:
    """Read the cause out of the error file (torch's ``error.json`` text, empty when there is none) and the last lines.

    ``peer_loss`` is true when the worker complains about losing a peer, or aborts (Paddle's DataParallel does) while
    complaining; such an end is most likely the consequence of another one.
    """
    exception, traceback = _from_error_file(error_file)
    if not exception:
        exception, traceback = _from_tail(tail)
    complaint = f"{exception}\n{tail[-4000:]}" if exit_code in (1, -SIGABRT) else ""
    return LastWords(exception, traceback, bool(_PEER_LOSS.search(complaint)))


def _from_error_file(text: str) -> tuple[str, str]:
    if not text:
        return "", ""
    try:
        message = json.loads(text)["message"]
        if isinstance(message, str):
            return message.strip().splitlines()[-1] if message.strip() else "", ""
        return str(message["message"]).strip(), str(message["extraInfo"]["py_callstack"])
    except (ValueError, KeyError, TypeError, IndexError):
        return "", ""


def _from_tail(tail: str) -> tuple[str, str]:
    """The last Python traceback among the lines: its final line, and all of it."""
    start = tail.rfind("Traceback (most recent call last):")
    if start < 0:
        return "", ""
    lines = tail[start:].splitlines()
    for index, line in enumerate(lines[1:], start=1):
        if line and not line[0].isspace():
            return line.strip(), "\n".join(lines[: index + 1])
    return "", tail[start:]
