"""Messages about the file list of a data set: fetching and extending it. Part of ``messages``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data_service import fields as needs

NOW, NEXT_EPOCH = "now", "next-epoch"
"""When added files join: in the current epoch if it is not over, or in the next one."""


@dataclass(frozen=True, slots=True)
class ListFiles:
    """Request the file list from this byte on (``file_list``); what a client has is a prefix."""

    id: int
    dataset: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Grow:
    """Report found files; those that are not listed yet join an epoch. Repeating it has no effect."""

    id: int
    dataset: str
    manifest: bytes = b""
    """``Manifest.encode()`` of the files; base64 in JSON. Empty with ``error``."""
    epoch: int = 0
    """The epoch that "now" means if the machine has no position yet."""
    when: str = NOW
    named: bool = False
    """True if the files were named, not found by the data set's own patterns."""
    order: int = 0
    """Number of the ``AddFiles`` that this answers; 0: none."""
    error: str = ""
    """Why the files of the order cannot be added."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Answer to ``ListFiles``."""

    id: int
    dataset: str
    data: bytes
    """A part of the encoded list; base64 in JSON."""
    total: int
    """Size of the encoded list in bytes; 0 if nothing is registered."""


@dataclass(frozen=True, slots=True)
class Grown:
    """Answer to ``Grow``, sent when the result is in the store."""

    id: int
    dataset: str
    text: str
    """The outcome, for display."""
    added: int
    """Number of new files."""


@dataclass(frozen=True, slots=True)
class AddFiles:
    """Sent to the worker that lists the files: an order to add more (``edl data add``). Answered by ``Grow``."""

    dataset: str
    order: int
    files: tuple[str, ...]
    """Paths, patterns or URLs."""
    when: str


def _when(value: object) -> str:
    """Validate when files join. Raises ``ValueError``."""
    if value not in (NOW, NEXT_EPOCH):
        raise ValueError(f"must be {NOW} or {NEXT_EPOCH}")
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
