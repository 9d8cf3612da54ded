"""Carries out the effects of ``BucketMachine``: which buckets are served, where pieces go, what pushes wait for.

One thread steps the machine and carries out its effects, so they happen in order. What requests read (``served`` and
each follower's ``live``) changes only under the lock of the bucket's shard; what they wait for changes only under
``changed``. Lock order: ``changed``, shard, stream. A thread that holds a shard's lock never acquires ``changed``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edl.adapters.system_threads import SYSTEM_THREADS
from edl.ports import Clock
from edl.threads import ThreadQueue, Threads
from ps.hashing import SHARDS, shard_of_bucket
from ps.net.caller import FrameCaller
from ps.protocol.messages import CheckpointOrder, Orders
from ps.protocol.replication import ReleaseItem, part_of
from ps.rows import ShardChange
from ps.server import bucket_machine as h
from ps.server.bucket_machine import BucketMachine
from ps.server.replicate_out import ReplicationStream
from ps.spec import BUCKETS
from ps.store.store import RowStore

log = logging.getLogger(__name__)

Mask = NDArray[np.uint8]


class BucketShellDeps(Protocol):
    """Dependencies of the shell on the process. Called from the shell's thread, except ``connect``."""

    def connect(self, follower: int) -> FrameCaller:
        """Connect to another pserver. Raises ``PsError``."""
        ...

    def say(self, message: Any) -> None:
        """Send a message to the Master; dropped without a connection."""
        ...

    def prepare(self, orders: Orders) -> None:
        """Prepare for new orders before they take effect: define tables."""
        ...

    def followed(self, orders: Orders) -> None:
        """New orders have taken effect."""
        ...

    def restore(self, checkpoint: CheckpointOrder, buckets: tuple[int, ...]) -> None:
        """Load these buckets in another thread, then ``post(Restored(…))``."""
        ...

    def reset(self, number: int, history: int) -> None:
        """Everything starts again; the rows have been discarded."""
        ...

    def failed(self, what: str) -> None:
        """The process is inconsistent and must exit, so that replicas take over. Thread-safe."""
        ...

    def line_begins(self) -> None:
        """From now on messages go over the newest connection to the Master."""
        ...

    def line_made(self) -> None:
        """``PserverHello`` has been sent on the new connection."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ServedBuckets:
    """The buckets that are served, until the next reset: it clears ``mask`` for good and begins another one. A request
    keeps the one that it began with, so what it waits for never becomes a row of a later history."""

    history: int = 0
    mask: Mask = field(default_factory=lambda: np.zeros(BUCKETS, np.uint8))
    """1 where requests are served."""


@dataclass(slots=True, eq=False)
class FollowerStream:
    """The stream to one follower, and what goes into it, by bucket."""

    stream: ReplicationStream
    to: Mask = field(default_factory=lambda: np.zeros(BUCKETS, np.uint8))
    """Pieces are to be sent to it."""
    wait: Mask = field(default_factory=lambda: np.zeros(BUCKETS, np.uint8))
    """Pushes wait for it."""
    pending: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BUCKETS, np.int64))
    """Number of the copy whose image has not been made yet; 0: none."""
    live: Mask = field(default_factory=lambda: np.zeros(BUCKETS, np.uint8))
    """Pieces are sent to it."""
    refused: int = 0
    """Newest orders' version under which it has refused anything."""


class Sent:
    """Where the pieces of one push were sent."""

    def __init__(self, stops: NDArray[np.uint32]) -> None:
        self.stops = stops
        """Stop counts from before the push."""
        self.marks: dict[FollowerStream, tuple[int, int]] = {}


class BucketShell:
    """Thread-safe shell around ``BucketMachine``; see the module."""

    def __init__(
        self,
        bucket_machine: BucketMachine,
        store: RowStore,
        deps: BucketShellDeps,
        clock: Clock,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        self.serving = ServedBuckets()
        """Replaced under ``changed``."""
        self.stops: NDArray[np.uint32] = np.zeros(BUCKETS, np.uint32)
        """Number of times that each bucket was stopped."""
        self.changed = threads.condition()
        """Notified when anything that a request waits for may have changed."""
        self.version = 0
        self._carried = 0
        """Version of the orders that have been carried out."""
        self._bucket_machine, self._store, self._deps, self._clock = bucket_machine, store, deps, clock
        self._threads = threads
        self._stepping = threads.lock()
        self._turns = 0
        """Number of steps that may have changed what is accepted from other pservers."""
        self._taken: NDArray[np.int64] = np.full(BUCKETS, -1, np.int64)
        """By bucket: the turn in which its content was last accepted from another pserver."""
        self._to_followers: dict[int, FollowerStream] = {}
        self._refusals: Counter[int] = Counter()
        """By follower: refusals that the machine has not handled yet."""
        self._events: ThreadQueue[h.Event | None] = threads.queue()

    def start(self) -> None:
        """Start the thread that processes events."""
        self._threads.start(self._run, name="edl-ps-buckets")

    def stop(self) -> None:
        """Stop processing events and close all streams."""
        self._events.put(None)
        for to_follower in list(self._to_followers.values()):
            to_follower.stream.close()

    def post(self, event: h.Event) -> None:
        """Queue an event. Thread-safe; events are processed in order."""
        self._events.put(event)

    # --- for requests ------------------------------------------------------------------------------------------------

    @property
    def served(self) -> Mask:
        """1 where requests are served."""
        return self.serving.mask

    def sent(self) -> Sent:
        """Start tracking a push that is about to be applied."""
        return Sent(self.stops.copy())

    def spread(self, piece: ShardChange, sent: Sent | None = None) -> None:
        """Send a piece to all followers that need it. Requires the shard's lock."""
        version = self.version
        for to_follower in tuple(self._to_followers.values()):
            begin = piece.shard * BUCKETS // SHARDS
            live = (
                to_follower.live[begin : begin + BUCKETS // SHARDS]
                if piece.removed
                else to_follower.live[piece.buckets]
            )
            if not live.any():
                continue
            mine = piece if live.all() else part_of(piece, to_follower.live != 0)
            mark = to_follower.stream.put(mine, version)
            if sent is not None:
                sent.marks[to_follower] = mark

    def feeds(self, first: int, last: int) -> bool:
        """True if any follower needs pieces of these shards. Requires their locks."""
        size = BUCKETS // SHARDS
        return any(
            to_follower.live[first * size : last * size].any() for to_follower in tuple(self._to_followers.values())
        )

    def behind(self, sent: Sent, buckets: NDArray[np.uint16]) -> Sent:
        """Track everything now in the streams for these buckets: pieces of a repeated push may already be in them."""
        found = Sent(sent.stops)
        for to_follower in tuple(self._to_followers.values()):
            if to_follower.to[buckets].any():
                found.marks[to_follower] = to_follower.stream.tail
        return found

    def stopped(self, sent: Sent, buckets: NDArray[np.uint16]) -> bool:
        """True if any of these buckets was stopped since the push began."""
        return bool((self.stops[buckets] != sent.stops[buckets]).any())

    def waits_for(self, sent: Sent, buckets: NDArray[np.uint16], lag_s: float | None) -> int:
        """Number of a follower that delays the acknowledgement, or 0. ``lag_s``: limit of asynchronous replication.
        Requires ``changed``."""
        for number, to_follower in self._to_followers.items():
            wanted = buckets[to_follower.wait[buckets] != 0]
            if len(wanted):
                if not to_follower.to[wanted].all() or not to_follower.stream.has(sent.marks.get(to_follower)):
                    return number
                if self._refusals[number]:  # after ``has``: a refusal is reported before it counts as acknowledged
                    return number
            elif (
                lag_s is not None
                and to_follower in sent.marks
                and to_follower.to[buckets].any()
                and self._lacks(to_follower, lag_s)
            ):
                return number
        return 0

    def _lacks(self, to_follower: FollowerStream, lag_s: float) -> bool:
        """True if a replica may lack more than allowed. In this order, as in ``waits_for``. What it has refused one
        bucket for may concern others."""
        return to_follower.stream.behind(lag_s) or to_follower.refused > self._carried

    def fullest(self, most: int, buckets: NDArray[np.uint16]) -> int:
        """Number of a follower of any of these buckets whose stream holds more than ``most`` bytes, or 0."""
        full = (number for number, to_follower in self._to_followers.items() if to_follower.stream.queued_bytes > most)
        return next((number for number in full if self._to_followers[number].to[buckets].any()), 0)

    def streams(self) -> list[ReplicationStream]:
        """The replication streams to all followers."""
        return [to_follower.stream for to_follower in tuple(self._to_followers.values())]

    # --- content from other pservers ---------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """This pserver's number; 0 if it has none yet."""
        return self._bucket_machine.number

    @property
    def history(self) -> int:
        """The history of the rows here."""
        return self._bucket_machine.history

    @property
    def turn(self) -> int:
        """Increases whenever what is accepted from other pservers may have changed."""
        return self._turns

    def refuses(self, sender: int, version: int, buckets: Sequence[int]) -> list[int]:
        """The buckets for which nothing is accepted from ``sender``, whose newest orders are ``version``. Requires
        the lock of the buckets' shard, which must be held until accepted content is in the store."""
        with self._stepping:
            refused = self._bucket_machine.refuses(sender, version, buckets)
            turn = self._turns
        some = np.asarray(buckets, np.int64)
        self._taken[some] = turn
        lost = some[(self.served[some] != 0) & (self._allowed(some) != h.SERVED)]
        if len(lost):
            self.served[lost] = 0
            self.stops[lost] += np.uint32(1)
        return refused

    def _allowed(self, buckets: NDArray[np.int64]) -> NDArray[np.uint8]:
        return np.frombuffer(self._bucket_machine.allowed, np.uint8)[buckets]

    def waiting(self, buckets: Iterable[int]) -> bool:
        """True if none of these buckets belongs to another pserver: those not served yet will be."""
        allowed = self._bucket_machine.allowed
        return all(allowed[bucket] != h.MOVED for bucket in buckets)

    # --- the owner of streams ----------------------------------------------------------------------------------------

    def connect(self, follower: int) -> FrameCaller:
        """Connect to the follower, as ``StreamOwner`` requires."""
        return self._deps.connect(follower)

    def take_image(self, follower: int, bucket: int, copy: int) -> None:
        """Under the bucket's lock, put its image into the stream, unless it is no longer wanted."""
        with self._store.lock(bucket):
            to_follower = self._to_followers.get(follower)
            if to_follower is None or not to_follower.to[bucket] or to_follower.pending[bucket] != copy:
                return  # superseded by a newer copy, which is awaited by its own number
            to_follower.stream.put(self._store.image(bucket), self.version, copy)
            to_follower.pending[bucket] = 0
            to_follower.live[bucket] = 1

    def fenced(self, follower: int, version: int, buckets: Sequence[int]) -> None:
        """The follower, whose newest orders are ``version``, has refused these buckets."""
        with self.changed:
            self._refusals[follower] += 1
            to_follower = self._to_followers.get(follower)
            if to_follower is not None:
                to_follower.refused = max(to_follower.refused, version)
        self.stops[np.asarray(buckets, np.int64)] += np.uint32(1)
        self.post(h.FollowerFenced(follower, version, tuple(buckets)))

    def failed(self, what: str) -> None:
        """A thread has failed, as ``StreamOwner`` requires."""
        self._deps.failed(what)

    def acked(self, follower: int, images: dict[int, list[int]], marks: Sequence[int]) -> None:
        """More is acknowledged: images, by the number of their copy, and marks."""
        for number, buckets in images.items():
            self.post(h.ImageAcked(follower, number, tuple(buckets)))
        for mark in marks:
            self.post(h.MarkAcked(follower, mark))
        with self.changed:
            self.changed.notify_all()

    def lost(self, follower: int, why: str) -> None:
        """The stream broke, or cannot be opened."""
        log.warning("Parameter server: lost the replication stream to pserver %d: %s", follower, why)
        self.post(h.LineLost(follower))

    def made(self, follower: int) -> None:
        """The stream is open again and empty."""
        log.info("Parameter server: the replication stream to pserver %d is open again", follower)
        self.post(h.LineMade(follower))

    # --- the bucket thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            event = self._events.get()
            if event is None:
                return
            try:
                self._take(event)
            except Exception:
                log.exception("Parameter server: cannot carry out %s", type(event).__name__)
                self._deps.failed(f"cannot carry out {type(event).__name__}")
                return

    def _take(self, event: h.Event) -> None:
        if isinstance(event, h.OrdersCame):
            if event.orders.placement.version < self._bucket_machine.version:
                log.info("Parameter server: ignoring orders %d, which are outdated", event.orders.placement.version)
                return
            self._deps.prepare(event.orders)
        with self._stepping:
            effects = self._bucket_machine.step(event)
            if isinstance(event, h.OrdersCame | h.Released | h.Restored | h.FollowerFenced):
                self._turns += 1
            turn = self._turns
            self.version = self._bucket_machine.version
        with self.changed:
            self._carry(effects)
            self._carried = self.version
            if isinstance(event, h.FollowerFenced):
                self._refusals[event.follower] -= 1
            self.changed.notify_all()
        for effect in effects:
            if isinstance(effect, h.Drop):
                self._drop(effect.buckets, turn)
        match event:
            case h.OrdersCame(orders):
                self._deps.followed(orders)
            case h.LineLost(follower) if follower in self._to_followers:
                self._to_followers[follower].stream.again()
            case h.MasterLine():
                self._deps.line_begins()
        for effect in effects:
            if isinstance(effect, h.SendToMaster):
                self._deps.say(effect.message)
        if isinstance(event, h.MasterLine):
            self._deps.line_made()

    def _carry(self, effects: Sequence[h.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, h.Reset):
                self._reset(effect.number, effect.history)
            elif isinstance(effect, h.CloseStream):
                self._part(effect.follower)
        for effect in effects:
            if isinstance(effect, h.Copy):
                self._await_images(effect)
        for effect in effects:
            match effect:
                case h.Serve(buckets):
                    for some in self._locked(buckets):  # another one may have got them since the step: ``refuses``
                        self.served[some] = self._allowed(some) == h.SERVED
                case h.StopServing(buckets, _):
                    for some in self._locked(buckets):
                        self.served[some] = 0
                        self.stops[some] += np.uint32(1)
                case h.FeedFollowers():
                    self._feed(effect)
                case h.Copy() | h.MarkStream() | h.SendRelease():
                    self._into_stream(effect)
                case h.RestoreBuckets(checkpoint, buckets):
                    self._deps.restore(checkpoint, buckets)

    def _into_stream(self, effect: h.Copy | h.MarkStream | h.SendRelease) -> None:
        stream = self._to_follower(effect.follower).stream
        match effect:
            case h.Copy(_, number, buckets):
                stream.copy(number, buckets)
            case h.MarkStream(_, number):
                stream.mark(number)
            case h.SendRelease(_, buckets, version):
                stream.put(ReleaseItem(buckets), version)

    def _to_follower(self, follower: int) -> FollowerStream:
        to_follower = self._to_followers.get(follower)
        if to_follower is None:
            to_follower = FollowerStream(ReplicationStream(follower, self, self._clock, self._threads))
            self._to_followers = {**self._to_followers, follower: to_follower}
        return to_follower

    def _part(self, follower: int) -> None:
        to_follower = self._to_followers.get(follower)
        if to_follower is not None:
            self._to_followers = {number: one for number, one in self._to_followers.items() if number != follower}
            to_follower.stream.close()

    def _await_images(self, effect: h.Copy) -> None:
        to_follower = self._to_follower(effect.follower)
        for some in self._locked(effect.buckets):
            to_follower.pending[some] = effect.number
            to_follower.live[some] = 0

    def _feed(self, effect: h.FeedFollowers) -> None:
        for number in effect.wait:
            self._to_follower(number)
        for number in effect.to:
            self._to_follower(number).stream.begin()
        for some in self._locked(effect.buckets):
            for number, to_follower in self._to_followers.items():
                to_follower.to[some] = number in effect.to
                to_follower.wait[some] = number in effect.wait
                if number not in effect.to:
                    to_follower.pending[some] = 0
                to_follower.live[some] = to_follower.to[some] & (to_follower.pending[some] == 0)

    def _reset(self, number: int, history: int) -> None:
        """Drop all rows, except those that a sender has sent meanwhile to the new number, which the machine has had
        since its step."""
        for follower in list(self._to_followers):
            self._part(follower)
        for some in self._locked(range(BUCKETS)):
            self.served[some] = 0
            self.stops[some] += np.uint32(1)
            self._store.drop(some[self._taken[some] < self._turns])
        self._store.begin_history()
        self.serving = ServedBuckets(history)
        self._deps.reset(number, history)

    def _drop(self, buckets: Sequence[int], turn: int) -> None:
        """Drop buckets, except those that a sender with newer orders has begun to send meanwhile."""
        for some in self._locked(buckets):
            self._store.drop(some[self._taken[some] < turn])

    def _locked(self, buckets: Iterable[int]) -> Iterator[NDArray[np.int64]]:
        """Iterate over the buckets by shard, holding the shard's lock."""
        shards: dict[int, list[int]] = {}
        for bucket in buckets:
            shards.setdefault(shard_of_bucket(bucket), []).append(bucket)
        for shard, some in sorted(shards.items()):
            with self._store.lock(shard=shard):
                yield np.array(some, np.int64)
