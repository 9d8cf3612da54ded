"""Messages about the list of files of a data set: who has it, and how it grows. Part of ``messages``."""

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
    """The list of files, please, from this byte on (``file_list``): what somebody has of it is a prefix."""

    id: Natural
    dataset: Name
    offset: Natural = 0


@dataclass(frozen=True, slots=True)
class Grow:
    """These files have been found; those that are not listed yet join an epoch. Said twice it is done once."""

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
    """Why those of the order cannot be added."""


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
    """Answer to ``Grow``: it is in the store."""

    id: Natural
    dataset: Name
    text: str
    """What has come of it, for people."""
    added: Natural
    """Files that are new."""


@dataclass(frozen=True, slots=True)
class AddFiles:
    """Told to the worker that lists the files: somebody has asked for more (``edl data add``). Answered by ``Grow``."""

    dataset: Name
    order: Natural
    files: tuple[str, ...]
    """Paths, patterns or URLs."""
    when: When
