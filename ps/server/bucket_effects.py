"""Events and effects of ``ps.server.bucket_machine``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ps.protocol import messages
from ps.protocol.messages import Orders

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MasterLine:
    """There is a new connection to the Master; messages sent before may be lost."""


@dataclass(frozen=True, slots=True)
class OrdersCame:
    """Orders from the Master arrived, new or repeated."""

    orders: Orders


@dataclass(frozen=True, slots=True)
class ImageAcked:
    """The follower has these buckets' images of copy ``number``."""

    follower: int
    number: int
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MarkAcked:
    """The follower has everything that was put into its stream before ``MarkStream(follower, number)``."""

    follower: int
    number: int


@dataclass(frozen=True, slots=True)
class LineLost:
    """The stream to this follower broke, or cannot be opened."""

    follower: int


@dataclass(frozen=True, slots=True)
class LineMade:
    """The stream is open again and empty. Only follows ``LineLost``."""

    follower: int


@dataclass(frozen=True, slots=True)
class FollowerFenced:
    """The follower refused content of these buckets, because its newest orders, ``version``, do not allow it."""

    follower: int
    version: int
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Released:
    """A giver's release has arrived; everything before it in the stream has been applied here."""

    giver: int
    version: int
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Restored:
    """These buckets have been loaded, as requested by ``RestoreBuckets`` of this number."""

    number: int
    buckets: tuple[int, ...]


Event = MasterLine | OrdersCame | ImageAcked | MarkAcked | LineLost | LineMade | FollowerFenced | Released | Restored

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reset:
    """Discard all rows, sequence numbers and streams: this pserver has a new number, or a new history begins."""

    number: int
    history: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Serve requests for these buckets from now on."""

    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopServing:
    """Stop serving these buckets. ``waiting``: requests wait; otherwise they are answered MOVED."""

    buckets: tuple[int, ...]
    waiting: bool


@dataclass(frozen=True, slots=True)
class Copy:
    """Put these buckets' images into the follower's stream."""

    follower: int
    number: int
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FeedFollowers:
    """Send pieces of these buckets to the followers in ``to``, and let pushes wait for those in ``wait``. Replaces the
    previous ``FeedFollowers`` of each bucket."""

    buckets: tuple[int, ...]
    to: tuple[int, ...]
    wait: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MarkStream:
    """Report ``MarkAcked`` when the follower has acknowledged everything now in its stream."""

    follower: int
    number: int


@dataclass(frozen=True, slots=True)
class SendRelease:
    """Put a release of these buckets into the follower's stream."""

    follower: int
    buckets: tuple[int, ...]
    version: int


@dataclass(frozen=True, slots=True)
class RestoreBuckets:
    """Load these buckets from the checkpoint, then report ``Restored``, or send
    ``CheckpointPhaseDone(…, failed=…)`` to the Master."""

    checkpoint: messages.CheckpointOrder
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Discard rows and sequence numbers of these buckets."""

    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseStream:
    """This follower is dead or unknown: close its stream for good."""

    follower: int


@dataclass(frozen=True, slots=True)
class SendToMaster:
    """Send a message to the Master; dropped without a connection."""

    message: Any


Effect = (
    Reset
    | Serve
    | StopServing
    | Copy
    | FeedFollowers
    | MarkStream
    | SendRelease
    | RestoreBuckets
    | Drop
    | CloseStream
    | SendToMaster
)
