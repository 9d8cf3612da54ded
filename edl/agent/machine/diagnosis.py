"""Finds out from a worker's last output why it ended. Pure text processing."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from edl.agent.machine.turn import SIGABRT, SIGTERM
from edl.wire.peer_loss import speaks_of_lost_peer

_HEADER = re.compile(r"^(?:  \+ Exception Group )?Traceback \(most recent call last\):", re.MULTILINE)
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
"""torch's prefix of each traceback line once a process group exists."""
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_FINAL_LINE = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning)(?::|$)")
"""Pattern of a traceback's last line; used when its first line is beyond the kept lines."""

_USAGE = 2
"""Exit status of a program that was called with wrong arguments."""
_USAGE_LINE = re.compile(r"^[Uu]sage: ", re.MULTILINE)
_REFUSED = re.compile(r"(\S+: )?[Ee]rror: ")

LONGEST_EXCEPTION = 1000
LONGEST_TRACEBACK = 8000
"""Maximum number of characters kept. A record of many failures has to fit into one value of the store (etcd: 1.5
MiB)."""


@dataclass(frozen=True, slots=True)
class LastWords:
    """The cause of a worker's end, besides its exit status."""

    exception: str = ""
    traceback: str = ""
    peer_loss: bool = False


def last_words(exit_code: int, tail: str, error_file: str) -> LastWords:
    """Extract the cause from the error file (torch's ``error.json`` text, empty if there is none) and the last lines of
    stderr.

    ``peer_loss`` is true when the worker reported a lost peer and exited with status 1, aborted (as Paddle's
    DataParallel does) or was terminated by SIGTERM; such an end is most likely a consequence of another failure.
    """
    exception, traceback = _from_error_file(error_file)
    if not exception:
        exception, traceback = _from_tail(tail)
    complaint = f"{exception}\n{tail[-4000:]}" if exit_code in (1, -SIGABRT, -SIGTERM) else ""
    return LastWords(
        _sendable(exception)[:LONGEST_EXCEPTION],
        _sendable(traceback)[-LONGEST_TRACEBACK:],
        speaks_of_lost_peer(complaint),
    )


def is_usage_error(exit_code: int, tail: str) -> bool:
    """Whether the script rejected its own command line, as argparse and click do: a restart would fail the same way."""
    lines = [line for line in tail.splitlines() if line.strip()]
    return exit_code == _USAGE and bool(lines) and bool(_REFUSED.match(lines[-1])) and bool(_USAGE_LINE.search(tail))


def _sendable(text: str) -> str:
    """Replace lone surrogates, which messages may contain (file names, JSON escapes) but protobuf refuses."""
    return text.encode(errors="replace").decode()


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
    """The last Python traceback in the lines, with the exceptions that led to it: its final line, and the whole
    text."""
    tail = _RANK_PREFIX.sub("", tail)
    headers = [match.start() for match in _HEADER.finditer(tail)]
    if not headers:
        return _from_headless_tail(tail.splitlines())
    start = header = headers.pop()
    while start > 0 and tail[:start].rstrip().endswith(_CHAINED):
        start = headers.pop() if headers else 0
    lines = tail[header:].splitlines()
    for index, line in enumerate(lines[1:], start=1):
        if line and not line[0].isspace():
            return line.strip(), tail[start:header] + "\n".join(lines[: index + 1])
    return "", tail[start:]


def _from_headless_tail(lines: list[str]) -> tuple[str, str]:
    """A traceback without a header line: its start is beyond the kept lines, or it is a SyntaxError, which is printed
    without."""
    for index in range(len(lines) - 1, 0, -1):
        if _FINAL_LINE.match(lines[index]) and lines[index - 1][:1].isspace():
            return lines[index].strip(), "\n".join(lines[: index + 1])
    return "", ""
