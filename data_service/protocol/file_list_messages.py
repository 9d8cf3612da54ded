"""Messages about the file list of a data set: fetching and extending it. Part of ``messages``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from data_service.protocol.fields import Name, Natural

NOW, NEXT_EPOCH = "now", "next-epoch"
"""When added files join: in the current epoch if it is not over, or in the next one."""
When = Annotated[str, Meta(pattern=rf"^({NOW}|{NEXT_EPOCH})\Z")]


@dataclass(frozen=True, slots=True)
class ListFiles:
    """Request the encoded file list (``data_service.file_list``) from a byte offset on. The list only grows at its end,
    so a client that has its beginning fetches the rest."""

    id: Natural
    dataset: Name
    offset: Natural = 0


@dataclass(frozen=True, slots=True)
class Grow:
    """Report files; those that are not listed yet join an epoch. Idempotent."""

    id: Natural
    dataset: Name
    manifest: bytes = b""
    """``Manifest.encode()`` of the files; base64 in the text. Empty with ``error``."""
    epoch: Natural = 0
    """The epoch that "now" refers to if the machine has no position yet."""
    when: When = NOW
    named: bool = False
    """True if the files were named by a user, not found by the data set's own patterns."""
    order: Natural = 0
    """Number of the ``AddFiles`` that this answers; 0 if it answers none."""
    error: str = ""
    """The reason why the files of the order cannot be added."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Answer to ``ListFiles``: a part of the encoded list."""

    id: Natural
    dataset: Name
    data: bytes
    """A part of the list's bytes; base64 in the text."""
    total: Natural
    """Size of the whole list in bytes; 0 if nothing is registered."""


@dataclass(frozen=True, slots=True)
class Grown:
    """Answer to ``Grow``, sent when the result is in the store."""

    id: Natural
    dataset: Name
    text: str
    """The outcome, for people."""
    added: Natural
    """Number of new files."""


@dataclass(frozen=True, slots=True)
class AddFiles:
    """An order to add files (``edl data add``), sent to the worker that scans files. Answered with ``Grow``."""

    dataset: Name
    order: Natural
    files: tuple[str, ...]
    """Paths, patterns or URLs."""
    when: When
