"""Messages about the file list of a data set: fetching and extending it. Part of ``messages``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from data_service.protocol.fields import Name, Natural

NOW, NEXT_EPOCH = "now", "next-epoch"
"""When files that are added join: the epoch under way if it is not over, or the one after it."""
When = Annotated[str, Meta(pattern=rf"^({NOW}|{NEXT_EPOCH})\Z")]


@dataclass(frozen=True, slots=True)
class ListFiles:
    """Request the file list from this byte on (``file_list``); what a client has is a prefix."""

    id: Natural
    dataset: Name
    offset: Natural = 0


@dataclass(frozen=True, slots=True)
class Grow:
    """Report found files; those that are not listed yet join an epoch. Repeating it has no effect."""

    id: Natural
    dataset: Name
    manifest: bytes = b""
    """``Manifest.encode()`` of them; base64 in the text. Empty with ``error``."""
    epoch: Natural = 0
    """The one that "now" means, where the machine has no position yet."""
    when: When = NOW
    named: bool = False
    """They were named, and not found by the data set's own patterns."""
    order: Natural = 0
    """Number of the ``AddFiles`` that it answers; 0: of none."""
    error: str = ""
    """Why the files of the order cannot be added."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Answer to ``ListFiles``."""

    id: Natural
    dataset: Name
    data: bytes
    """A part of the list's bytes; base64 in the text."""
    total: Natural
    """Bytes of the whole list; 0 when nothing is registered."""


@dataclass(frozen=True, slots=True)
class Grown:
    """Answer to ``Grow``, sent when the result is in the store."""

    id: Natural
    dataset: Name
    text: str
    """What has come of it, for people."""
    added: Natural
    """Files that are new."""


@dataclass(frozen=True, slots=True)
class AddFiles:
    """Sent to the worker that lists the files: an order to add more (``edl data add``). Answered by ``Grow``."""

    dataset: Name
    order: Natural
    files: tuple[str, ...]
    """Paths, patterns or URLs."""
    when: When
