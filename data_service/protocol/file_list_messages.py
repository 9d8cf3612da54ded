"""Messages about the list of files of a data set: who has it, and how it grows. Part of ``messages``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data_service import fields as needs

NOW, NEXT_EPOCH = "now", "next-epoch"
"""When files that are added join: the epoch under way if it is not over, or the one after it."""


@dataclass(frozen=True, slots=True)
class ListFiles:
    """The list of files, please, from this byte on (``file_list``): what somebody has of it is a prefix."""

    id: int
    dataset: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Grow:
    """These files have been found; those that are not listed yet join an epoch. Said twice it is done once."""

    id: int
    dataset: str
    manifest: bytes = b""
    """``Manifest.encode()`` of them; base64 in the text. Empty with ``error``."""
    epoch: int = 0
    """The one that "now" means, where the machine has no position yet."""
    when: str = NOW
    named: bool = False
    """They were named, and not found by the data set's own patterns."""
    order: int = 0
    """Number of the ``AddFiles`` that it answers; 0: of none."""
    error: str = ""
    """Why those of the order cannot be added."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Answer to ``ListFiles``."""

    id: int
    dataset: str
    data: bytes
    """A part of the list's bytes; base64 in the text."""
    total: int
    """Bytes of the whole list; 0 when nothing is registered."""


@dataclass(frozen=True, slots=True)
class Grown:
    """Answer to ``Grow``: it is in the store."""

    id: int
    dataset: str
    text: str
    """What has come of it, for people."""
    added: int
    """Files that are new."""


@dataclass(frozen=True, slots=True)
class AddFiles:
    """Told to the worker that lists the files: somebody has asked for more (``edl data add``). Answered by ``Grow``."""

    dataset: str
    order: int
    files: tuple[str, ...]
    """Paths, patterns or URLs."""
    when: str


def _when(value: object) -> str:
    """When files join. Raises ``ValueError``."""
    if value not in (NOW, NEXT_EPOCH):
        raise ValueError(f"{NOW} or {NEXT_EPOCH} is needed")
    return str(value)


HEAD: dict[str, Callable[[object], Any]] = {"id": needs.natural, "dataset": needs.name}
CHECKS: dict[type[Any], dict[str, Callable[[object], Any]]] = {
    ListFiles: {**HEAD, "offset": needs.natural},
    Grow: {
        **HEAD,
        "manifest": needs.encoded,
        "epoch": needs.natural,
        "when": _when,
        "named": needs.flag,
        "order": needs.natural,
        "error": needs.string,
    },
    Listed: {**HEAD, "data": needs.encoded, "total": needs.natural},
    Grown: {**HEAD, "text": needs.string, "added": needs.natural},
    AddFiles: {"dataset": needs.name, "order": needs.natural, "files": needs.strings, "when": _when},
}
