"""The ordered replication stream to one follower, with cumulative acknowledgements.

Each item has a number. Images are made by the stream's own thread, a few at a time, so that pieces of pushes never wait
behind many of them. A broken stream is not resumed: it reports its loss once, discards its content, and reconnects only
after its owner calls ``again``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from edl.adapters.system_threads import SYSTEM_THREADS
from edl.errors import EdlError, ProtocolError
from edl.ports import Clock
from edl.threads import ThreadHandle, Threads
from ps.errors import TimedOut
from ps.net.caller import FrameCaller
from ps.protocol.frames import MOST_HEAD, FrameOp, pack_head
from ps.protocol.replication import Content, head_bytes_of, pack, size_of
from ps.rows import BucketImage

log = logging.getLogger(__name__)

FRAME_BYTES = 4 << 20
"""Items are sent in one frame up to this many bytes."""
FRAME_HEAD_BYTES = MOST_HEAD // 2
"""Items are sent in one frame while their part of its head is at most this long, which leaves room for the rest."""
FRAME_ITEMS = 512
FRAME_IMAGES = 64
"""No image is made while this many items are queued."""
IMAGES_BYTES = 16 << 20
"""No further image is made while images in flight to one follower have so many bytes: pushes wait behind them."""
IMAGES = 128
"""No further image is made while so many are in flight: each takes time, however small."""
STALL_S = 10.0
"""A follower that acknowledges nothing for this many seconds is considered lost."""
CONNECT_S = 3.0
NOT_YET_S = 3.0
"""Seconds that a follower has to receive the orders that give it its number."""
_ASK_S = 0.5
_LONGEST_PAUSE_S = 1.0


class _NotYet(ProtocolError):
    """The follower has another number: it has not yet received the orders with this one, or has newer ones."""


class StreamOwner(Protocol):
    """The owner of a stream. Called from the stream's threads, without its lock."""

    @property
    def history(self) -> int:
        """The history of its rows."""
        ...

    def connect(self, follower: int) -> FrameCaller:
        """Connect to the follower. Raises ``PsError``."""
        ...

    def take_image(self, follower: int, bucket: int, copy: int) -> None:
        """Under the bucket's lock, put its image into the stream, unless it is no longer wanted."""
        ...

    def fenced(self, follower: int, version: int, buckets: Sequence[int]) -> None:
        """The follower, whose newest orders are ``version``, has refused these buckets. Reported before anything that
        was sent with them counts as acknowledged."""
        ...

    def failed(self, what: str) -> None:
        """A thread of the stream has failed; the process must exit."""
        ...

    def acked(self, follower: int, images: dict[int, list[int]], marks: Sequence[int]) -> None:
        """The follower has acknowledged more: images, by the number of their copy, and marks."""
        ...

    def lost(self, follower: int, why: str) -> None:
        """The stream broke, or cannot be opened."""
        ...

    def made(self, follower: int) -> None:
        """The stream is open again and empty."""
        ...


@dataclass(slots=True)
class _QueuedItem:
    number: int
    version: int
    content: Content
    bytes: int
    at_s: float
    copy: int
    """For an image, the number of its copy; else 0."""
    head_bytes: int
    """Most bytes that it takes in a frame's head."""


@dataclass(slots=True)
class _Sent:
    """A frame that the follower has not acknowledged yet."""

    request: int
    items: list[_QueuedItem]
    images: list[tuple[int, int]] = field(default_factory=list)
    """Images in the frame as (copy, bucket)."""

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.items)


class ReplicationStream:
    """The stream to one follower. Thread-safe; adding content never blocks."""

    def __init__(self, follower: int, owner: StreamOwner, clock: Clock, threads: Threads = SYSTEM_THREADS) -> None:
        self.follower = follower
        self.life = 0
        """Number of the connection; content put into an earlier one is lost."""
        self._owner, self._clock, self._threads = owner, clock, threads
        self._lock = threads.lock()
        self._go = threads.condition(self._lock)
        self._queue: deque[_QueuedItem] = deque()
        self._sent: deque[_Sent] = deque()
        self._copies: list[tuple[int, deque[int]]] = []
        """Buckets whose images are to be made, by copy; the newest copy is served first."""
        self._marks: deque[tuple[int, int]] = deque()
        """Pending marks: (number that must be acknowledged, mark)."""
        self._number = self._acked = self._answered = 0
        self._bytes = self._image_bytes = self._images = 0
        self._state = "new"
        self._thread: ThreadHandle | None = None
        self._caller: FrameCaller | None = None
        self._moved_s = clock.now_s()
        """Time of the follower's last acknowledgement, or when it last had nothing to acknowledge."""

    # --- requests ---------------------------------------------------------------------------------------------------

    def put(self, content: Content, version: int, copy: int = 0) -> tuple[int, int]:
        """Append content; return the connection's ``life`` and the item's number. Dropped while the stream is down."""
        size, head_bytes = size_of(content), head_bytes_of(content)
        with self._lock:
            if self._state in ("down", "over"):
                return -1, 0
            self._number += 1
            now_s = self._clock.now_s()
            if not self._bytes:
                self._moved_s = now_s
            self._queue.append(_QueuedItem(self._number, version, content, size, now_s, copy, head_bytes))
            self._bytes += size
            if copy:
                self._image_bytes += size
                self._images += 1
            self._begin()
            self._go.notify_all()
            return self.life, self._number

    def begin(self) -> None:
        """Open the stream now if it is not open yet; there may be nothing to send for a while."""
        with self._lock:
            self._begin()

    def copy(self, number: int, buckets: Sequence[int]) -> None:
        """Make the images of these buckets and append them."""
        with self._lock:
            if self._state not in ("down", "over"):
                self._copies.append((number, deque(buckets)))
                self._begin()
                self._go.notify_all()

    def mark(self, mark: int) -> None:
        """Report ``mark`` once everything now in the stream is acknowledged."""
        with self._lock:
            if self._state in ("down", "over"):
                return
            done = self._acked >= self._number
            if not done:
                self._marks.append((self._number, mark))
        if done:
            self._owner.acked(self.follower, {}, [mark])

    def again(self) -> None:
        """Reconnect after a loss."""
        with self._lock:
            if self._state == "down":
                self._state = "retry"
                self._go.notify_all()

    def close(self) -> None:
        """Close the stream for good."""
        with self._lock:
            self._state = "over"
            self._forget()
            caller = self._caller
            self._go.notify_all()
        if caller is not None:
            caller.abort()

    # --- queries ------------------------------------------------------------------------------------------------------

    @property
    def tail(self) -> tuple[int, int]:
        """The connection's ``life`` and the number of the last item."""
        with self._lock:
            return self.life, self._number

    def has(self, mark: tuple[int, int] | None) -> bool:
        """True if content is accepted for sending and the follower has acknowledged the item with this ``mark``, a
        result of ``put`` or ``tail``; ``None``: no item. An item of an earlier connection counts as acknowledged: the
        follower has it by image, or not at all."""
        with self._lock:  # otherwise the stream could break after it was found to be up
            return self.up and (mark is None or mark[0] != self.life or self._acked >= mark[1])

    @property
    def queued_bytes(self) -> int:
        """Bytes not acknowledged yet."""
        return self._bytes

    @property
    def lag_s(self) -> float:
        """Age of the oldest unacknowledged item, in seconds."""
        with self._lock:
            return self._age_s()

    def _age_s(self) -> float:
        """``lag_s``. Requires the lock."""
        oldest = self._sent[0].items[0] if self._sent else self._queue[0] if self._queue else None
        return 0.0 if oldest is None else self._clock.now_s() - oldest.at_s

    def behind(self, lag_s: float) -> bool:
        """True if the follower lags by more than ``lag_s`` seconds, or is unreachable."""
        with self._lock:
            return not self.up or self._age_s() > lag_s

    @property
    def up(self) -> bool:
        """True if content is accepted for sending."""
        return self._state not in ("down", "over")

    # --- threads ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start the thread with the first item. Requires the lock."""
        if self._thread is None:
            self._thread = self._threads.start(self._run, name=f"edl-ps-to-{self.follower}")

    def _run(self) -> None:
        try:
            self._keep()
        except Exception:
            log.exception("Parameter server: the replication stream to pserver %d failed", self.follower)
            self._owner.failed(f"the replication stream to pserver {self.follower} failed")

    def _keep(self) -> None:
        pause_s, notified, early_s = 0.05, False, 0.0
        while True:
            with self._lock:
                while self._state == "down":
                    self._go.wait()
                if self._state == "over":
                    return
            try:
                caller = self._connect()
            except EdlError as error:
                now_s = self._clock.now_s()
                early_s = (early_s or now_s + NOT_YET_S) if isinstance(error, _NotYet) else 0.0
                if not notified and now_s >= early_s:
                    notified = self._lose(str(error))
                with self._lock:
                    if self._state != "over":
                        self._go.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s, early_s = 0.05, 0.0
            with self._lock:
                if self._state == "over":
                    caller.abort()
                    return
                self._state, self._caller = "up", caller
                self._moved_s = self._clock.now_s()
            if notified:
                notified = False
                self._owner.made(self.follower)
            notified = self._lose(self._serve(caller)) or notified

    def _connect(self) -> FrameCaller:
        caller = self._owner.connect(self.follower)
        try:
            self._request(caller, [])
            frame = caller.receive(deadline_s=CONNECT_S)
            if frame.op is not FrameOp.OK:
                raise _NotYet(f"the follower refused the stream: {frame.json().get('text', frame.op.name)}")
            self._answered = frame.request
        except BaseException:
            caller.abort()
            raise
        return caller

    def _lose(self, why: str) -> bool:
        """Discard the content and report the loss; returns False if the stream was closed on purpose."""
        with self._lock:
            if self._state == "over":
                return False
            self._state, self._caller = "down", None
            self._forget()
        self._owner.lost(self.follower, why)
        return True

    def _forget(self) -> None:
        self.life += 1
        self._queue.clear()
        self._sent.clear()
        self._copies.clear()
        self._marks.clear()
        self._acked = self._number
        self._answered = self._bytes = self._image_bytes = self._images = 0

    def _serve(self, caller: FrameCaller) -> str:
        """Serve a connection until it breaks; returns the reason."""
        reasons: list[str] = []

        def receive() -> None:
            try:
                self._receive(caller, reasons)
            except Exception:
                log.exception("Parameter server: receiving acknowledgements of pserver %d failed", self.follower)
                self._owner.failed(f"receiving acknowledgements of pserver {self.follower} failed")

        receiver = self._threads.start(receive, name=f"edl-ps-from-{self.follower}")
        try:
            while not caller.broken:
                if not self._make_image():
                    self._send_some(caller)
        except EdlError as error:
            reasons.append(str(error))
        finally:
            caller.abort()
            receiver.join()
        return reasons[0] if reasons else "the connection broke"

    def _make_image(self) -> bool:
        """Make the next image if one is due; returns whether it did."""
        with self._lock:
            while self._copies and not self._copies[-1][1]:
                self._copies.pop()
            full = self._images >= IMAGES or self._image_bytes >= IMAGES_BYTES or len(self._queue) >= FRAME_IMAGES
            if full or not self._copies:
                return False
            copy, buckets = self._copies[-1]
            bucket = buckets.popleft()
        self._owner.take_image(self.follower, bucket, copy)
        return True

    def _send_some(self, caller: FrameCaller) -> None:
        """Send queued items as one frame, or wait for some."""
        with self._lock:
            if not self._queue:
                self._go.wait(_ASK_S)
                return
            items = self._next_items()
            sent = _Sent(0, items)
            sent.images = [(one.copy, one.content.bucket) for one in items if isinstance(one.content, BucketImage)]
            self._sent.append(sent)
        request = self._request(caller, [(one.version, one.content) for one in items])
        with self._lock:
            sent.request = request
        self._settle()

    def _next_items(self) -> list[_QueuedItem]:
        """Take the items of one frame off the queue, at least one. Requires the lock."""
        items = [self._queue.popleft()]
        size, head_bytes = items[0].bytes, items[0].head_bytes
        while self._queue and len(items) < FRAME_ITEMS and size < FRAME_BYTES:
            head_bytes += self._queue[0].head_bytes
            if head_bytes > FRAME_HEAD_BYTES:
                break
            items.append(self._queue.popleft())
            size += items[-1].bytes
        return items

    def _request(self, caller: FrameCaller, items: Sequence[tuple[int, Content]]) -> int:
        heads, arrays = pack(items)
        head = {"to": self.follower, "history": self._owner.history, "items": heads}
        return caller.send(FrameOp.STREAM, pack_head(head), arrays, deadline_s=STALL_S)

    def _receive(self, caller: FrameCaller, reasons: list[str]) -> None:
        """Receive acknowledgements until the connection breaks."""
        while True:
            try:
                frame = caller.receive(deadline_s=_ASK_S)
            except TimedOut as error:
                if caller.broken or self._stalled():
                    reasons.append(str(error) if caller.broken else f"no acknowledgement for {STALL_S:g} s")
                    break
                continue
            except EdlError as error:
                reasons.append(str(error))
                break
            head: dict[str, Any] = frame.json()
            if frame.op is not FrameOp.OK:
                reasons.append(str(head.get("text", frame.op.name)))
                break
            if head.get("fenced"):
                self._owner.fenced(self.follower, int(head["version"]), [int(one) for one in head["fenced"]])
            with self._lock:
                self._answered = max(self._answered, frame.request)
            self._settle()
        caller.abort()
        with self._lock:
            self._go.notify_all()

    def _stalled(self) -> bool:
        with self._lock:
            return bool(self._sent) and self._clock.now_s() - self._moved_s > STALL_S

    def _settle(self) -> None:
        """Process acknowledgements received so far."""
        images: dict[int, list[int]] = {}
        marks: list[int] = []
        with self._lock:
            before = self._acked
            while self._sent and 0 < self._sent[0].request <= self._answered:
                done = self._sent.popleft()
                self._acked = done.items[-1].number
                self._bytes -= done.bytes
                self._image_bytes -= sum(one.bytes for one in done.items if one.copy)
                self._images -= sum(1 for one in done.items if one.copy)
                for copy, bucket in done.images:
                    images.setdefault(copy, []).append(bucket)
            while self._marks and self._marks[0][0] <= self._acked:
                marks.append(self._marks.popleft()[1])
            if self._acked != before:
                self._moved_s = self._clock.now_s()
                self._go.notify_all()
            moved = self._acked != before
        if moved or marks:
            self._owner.acked(self.follower, images, marks)
