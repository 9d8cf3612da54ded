"""Keeps the lines of several streams on one console apart although some of them are shown unfinished. Pure, except
``place_of``."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable
from typing import IO, Any, NamedTuple

_REDRAWN = re.compile(rb"\r(?=[^\r\n])")
"""Matches where text follows that is drawn over the line."""


def place_of(console: IO[Any] | None) -> Hashable:
    """What identifies a console: stdout and stderr may be the same terminal, or the same pipe."""
    if console is None:
        return None
    try:
        stat = os.fstat(console.fileno())
    except (OSError, ValueError):
        return console
    return stat.st_dev, stat.st_ino


class _Unfinished(NamedTuple):
    owner: object | None
    """None: it writes no more."""
    returned: bool
    """Whether the last byte is a carriage return."""


class ConsoleLines:
    """The unfinished line of each console. If another owner writes meanwhile, a newline ends it."""

    def __init__(self) -> None:
        self._unfinished: dict[Hashable, _Unfinished] = {}
        self._ended: set[tuple[Hashable, object]] = set()
        """Consoles and owners whose own line was ended for others."""

    def shown(self, place: Hashable, owner: object, prefix: bytes, text: bytes) -> bytes:
        """What to write for the next piece of output of ``owner``. Without a prefix, a piece that begins with a
        carriage return is drawn over the other's unfinished line, as if both wrote to a terminal."""
        if (place, owner) in self._ended:
            self._ended.discard((place, owner))
            text = text.removeprefix(b"\n")  # it has been written already
            if not text:
                return b""
        line, between, continued = self._unfinished.get(place), b"", False
        if line is not None and line.owner is owner:
            continued = not line.returned or text[:1] in b"\r\n"
        elif line is not None and (prefix or not text.startswith(b"\r")):
            between = self.interrupt(place)
        if text.endswith(b"\n"):
            self._unfinished.pop(place, None)
        else:
            self._unfinished[place] = _Unfinished(owner, text.endswith(b"\r"))
        return between + (_prefixed(text, prefix, continued=continued) if prefix else text)

    def interrupt(self, place: Hashable) -> bytes:
        """What to write before a new line of somebody else: a newline if there is an unfinished line."""
        line = self._unfinished.pop(place, None)
        if line is None:
            return b""
        if line.owner is not None:
            self._ended.add((place, line.owner))
        return b"\n"

    def forget(self, owner: object) -> None:
        """The owner writes no more; a line that it has left unfinished will be ended."""
        for place, line in self._unfinished.items():
            if line.owner is owner:
                self._unfinished[place] = line._replace(owner=None)
        self._ended = {ended for ended in self._ended if ended[1] is not owner}


def _prefixed(text: bytes, prefix: bytes, *, continued: bool) -> bytes:
    """The text with the prefix wherever it is at the left margin; ``continued``: that is not so at its beginning."""
    bare = continued or _REDRAWN.match(text)
    if b"\r" in text:
        text = _REDRAWN.sub(lambda _: b"\r" + prefix, text)
    inner = text[:-1].replace(b"\n", b"\n" + prefix) + text[-1:]
    return inner if bare else prefix + inner


CONSOLES = ConsoleLines()
"""The consoles of this process."""
