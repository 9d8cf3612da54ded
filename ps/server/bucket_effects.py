"""What happens to a pserver's buckets, and what its shell is to do about it: the words of
``ps.server.bucket_machine``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ps.protocol import messages
from ps.protocol.messages import Orders

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MasterLine:
    """A new line to the Master: what was said before may be lost."""


@dataclass(frozen=True, slots=True)
class OrdersCame:
    """Orders from the Master, new or again."""

    orders: Orders


@dataclass(frozen=True, slots=True)
class ImageAcked:
    """The follower has these buckets' images of the copy ``number``."""

    follower: int
    number: int
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MarkAcked:
    """The follower has everything that went into its stream before ``Mark(follower, number)``."""

    follower: int
    number: int


@dataclass(frozen=True, slots=True)
class LineLost:
    """The stream to this follower broke, or cannot be made."""

    follower: int


@dataclass(frozen=True, slots=True)
class LineMade:
    """It stands, and is empty. Not said for a stream that was never lost."""

    follower: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """The follower refused something about these buckets: orders ``version``, its newest, do not have it so."""

    follower: int
    version: int
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Released:
    """A giver's RELEASE has come through its stream, all that was before it is applied here."""

    giver: int
    version: int
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Restored:
    """These buckets are loaded, as ``Restore`` of this number asked."""

    number: int
    buckets: tuple[int, ...]


Event = MasterLine | OrdersCame | ImageAcked | MarkAcked | LineLost | LineMade | Fenced | Released | Restored

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reset:
    """All rows and seqs go, and all streams in and out: this pserver has a new number, or a new history begins."""

    number: int
    history: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Requests for these buckets are served from now on."""

    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """They are not served any more. ``waiting``: requests wait; otherwise the answer is MOVED."""

    buckets: tuple[int, ...]
    waiting: bool


@dataclass(frozen=True, slots=True)
class Copy:
    """Put these buckets' images into the follower's stream."""

    follower: int
    number: int
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Feed:
    """Pieces of these buckets go ``to`` these followers, and pushes wait for those in ``wait``. Replaces the last
    ``Feed`` of each of these buckets."""

    buckets: tuple[int, ...]
    to: tuple[int, ...]
    wait: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """Say ``MarkAcked`` when the follower has acknowledged all that is in its stream now."""

    follower: int
    number: int


@dataclass(frozen=True, slots=True)
class Release:
    """Put RELEASE of these buckets into the follower's stream."""

    follower: int
    buckets: tuple[int, ...]
    version: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Load these buckets from the cut, then say ``Restored``; or ``CutDone(…, failed=…)`` to the Master."""

    cut: messages.Cut
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Rows and seqs of these buckets go."""

    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """This follower is dead or unknown: close the stream to it for good."""

    follower: int


@dataclass(frozen=True, slots=True)
class Say:
    """To the Master. Lost when there is no line."""

    word: Any


Effect = Reset | Serve | Stop | Copy | Feed | Mark | Release | Restore | Drop | Part | Say
