"""The state machine of one pserver: which buckets it serves, which pservers it replicates them to, and which
acknowledgements a push waits for.

Pure: events in, effects out. The shell carries out effects in order, and feeds events in the order in which they
happened. The shell's duties:

- A request for a bucket is served while ``allowed[bucket]`` is ``SERVED``. It waits (bounded, then MOVED) while that is
  ``WAITING``. Otherwise the answer is MOVED. The check and the update happen under the lock of the bucket's shard.
- ``StopServing`` takes effect under that lock too. A push that was applied, but not yet answered when one of its
  buckets is stopped, is answered MOVED. The trainer repeats it, with the same seq, to the bucket's new owner.
- ``FeedFollowers``: from now on, pieces of these buckets go to the followers in ``to``, and a push is answered only
  when the followers in ``wait`` have acknowledged its pieces. This includes pushes that were applied earlier; a
  follower that received no piece of a push has it through an image. Waiting for a follower that is not in ``to`` lasts
  until the next ``FeedFollowers``. A push waits for the giver of its bucket until orders confirm that it has been
  taken. With asynchronous replication it does not wait for other replicas, but it is not answered while the replica is
  more than ``lag_s`` behind, or its stream is down, or it has refused anything under orders that have not arrived here:
  it may own all of this by now. Streams to all followers in ``to`` are opened even if there is nothing to send. A
  repeated push (its seq is known) waits in the same way, for everything that is in the streams when it arrives.
- ``Copy``: take each bucket's image under its lock and put it into the follower's stream; pieces follow from that
  moment on, none before. A copy is skipped if its follower is not in the bucket's newest ``FeedFollowers``
  when its turn comes.
- ``SendRelease`` goes into the stream behind everything that is already in it.
- Streams are ordered, and a broken stream is never continued: ``LineLost`` once, then nothing more goes to that
  follower until ``LineMade``, and after that only what new effects request. A stream is opened when it is first needed.
  It names the number of its intended receiver and the sender's history. The receiver accepts it only if both match its
  own, and closes it otherwise; the sender then tries again.
- A new stream from a pserver ends the previous one: nothing more is accepted from the old one.
- Everything that arrives in a stream is checked with ``refuses`` first. Refused content is dropped, and the sender is
  informed of the buckets and of the ``version`` here. There it becomes ``FollowerFenced``, before anything behind it
  counts as acknowledged.
- ``MasterLine`` for each new connection to the Master, before anything else is sent on it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from edl.job_records import Replication
from ps.protocol import messages
from ps.protocol.messages import NO_PSERVER, RESTORE, Orders
from ps.server.bucket_effects import (
    CloseStream,
    Copy,
    Drop,
    Effect,
    Event,
    FeedFollowers,
    FollowerFenced,
    ImageAcked,
    LineLost,
    LineMade,
    MarkAcked,
    MarkStream,
    MasterLine,
    OrdersCame,
    Released,
    Reset,
    RestoreBuckets,
    Restored,
    SendRelease,
    SendToMaster,
    Serve,
    StopServing,
)
from ps.spec import BUCKETS

__all__ = [
    "MOVED",
    "SERVED",
    "WAITING",
    "BucketMachine",
    "CloseStream",
    "Copy",
    "Drop",
    "Effect",
    "Event",
    "FeedFollowers",
    "FollowerFenced",
    "ImageAcked",
    "LineLost",
    "LineMade",
    "MarkAcked",
    "MarkStream",
    "MasterLine",
    "OrdersCame",
    "Released",
    "Reset",
    "RestoreBuckets",
    "Restored",
    "SendRelease",
    "SendToMaster",
    "Serve",
    "StopServing",
]

MOVED, SERVED, WAITING = 0, 1, 2
"""States of a bucket in ``BucketMachine.allowed``."""


@dataclass(slots=True)
class _Follower:
    """State of another pserver that receives this one's pieces. A bucket is in at most one of the first three."""

    copying: dict[int, int] = field(default_factory=dict)
    """Buckets whose image is on its way, with the copy's number."""
    acked: set[int] = field(default_factory=set)
    """Buckets whose image it has; pushes wait for it."""
    step: set[int] = field(default_factory=set)
    """Buckets in sync: it has everything acknowledged; as a backup with asynchronous replication, except what is in the
    stream."""
    begun: dict[int, int] = field(default_factory=dict)
    """Value of ``since`` when the copy of a bucket was started."""
    said: dict[int, int] = field(default_factory=dict)
    """Version of the last ``Synced`` sent for a bucket."""
    given: set[int] = field(default_factory=set)
    """Buckets whose release is in the stream, as far as known."""
    broken: set[int] = field(default_factory=set)
    """Out of sync although the Master may believe otherwise: ``Unsynced`` is repeated until orders change the
    bucket."""
    marks: dict[int, set[int]] = field(default_factory=dict)
    up: bool = True

    def lose(self, bucket: int) -> None:
        """Forget all progress on this bucket."""
        self.copying.pop(bucket, None)
        self.acked.discard(bucket)
        self.step.discard(bucket)

    def fed(self, bucket: int) -> bool:
        """True if pieces of the bucket are sent to it."""
        return bucket in self.step or bucket in self.acked or bucket in self.copying


class _Todo:
    """Consequences of one event, collected by kind so that many buckets yield few effects."""

    def __init__(self) -> None:
        self.serve: list[int] = []
        self.stop: list[int] = []
        self.wait: list[int] = []
        self.drop: list[int] = []
        self.restore: list[int] = []
        self.took: list[int] = []
        self.copy: dict[int, list[int]] = {}
        self.promise: dict[int, set[int]] = {}
        """Buckets in sync by follower; pushes wait for it from now on."""
        self.release: dict[int, list[int]] = {}
        self.touched: set[int] = set()
        """Buckets whose feed may have changed."""
        self.effects: list[Effect] = []
        self.said: list[Effect] = []
        """Messages to send at the end."""


class BucketMachine:
    """The buckets of one pserver. Not thread-safe."""

    def __init__(self, name: str, *, buckets: int = BUCKETS, most_bytes: int = 0) -> None:
        self.name, self.buckets, self.most_bytes = name, buckets, most_bytes
        self.number = NO_PSERVER
        self.history = 0
        self.version = 0
        self.orders: Orders | None = None
        """The newest orders."""
        self.allowed = bytearray(buckets)
        self.owner = array("h", bytes(2 * buckets))
        self.backup = array("h", self.owner)
        self.joining = array("h", self.owner)
        self._giver = array("h", self.owner)
        self._since = array("i", bytes(4 * buckets))
        self._has = bytearray(buckets)
        """1 where there may be rows."""
        self._followers: dict[int, _Follower] = {}
        self._fenced: set[int] = set()
        self._early: dict[int, tuple[int, int]] = {}
        """Releases that arrived before the orders they refer to: (giver, version)."""
        self._beyond: dict[int, tuple[int, int]] = {}
        """(version, sender) of content from a sender with newer orders."""
        self._born = 0
        """Version with which the current history began here."""
        self._numbers = 0
        """Last number given to a copy or mark."""
        self._known: frozenset[int] = frozenset()
        """Numbers of the live pservers."""

    def step(self, event: Event) -> tuple[Effect, ...]:
        """Process one event; returns the effects that the shell carries out."""
        todo = _Todo()
        match event:
            case MasterLine():
                return (SendToMaster(self.hello()), *self._say_all())
            case OrdersCame(orders):
                self._orders(todo, orders)
            case ImageAcked(follower, number, buckets):
                self._image_acked(todo, follower, number, buckets)
            case MarkAcked(follower, number):
                self._mark_acked(todo, follower, number)
            case LineLost(follower):
                self._line_lost(todo, follower)
            case LineMade(follower):
                self._line_made(todo, follower)
            case FollowerFenced(follower, version, buckets):
                self._was_fenced(todo, follower, version, buckets)
            case Released(giver, version, buckets):
                self._released(todo, giver, version, buckets)
            case Restored(number, buckets):
                checkpoint = self.orders.checkpoint if self.orders is not None else None
                if checkpoint is not None and checkpoint.number == number:
                    self._take(todo, [b for b in buckets if self._giver[b] == RESTORE])
        return self._finish(todo)

    def refuses(self, sender: int, version: int, buckets: Iterable[int]) -> list[int]:
        """The buckets for which nothing is accepted from ``sender``, whose newest orders are ``version``. Buckets that
        are accepted under newer orders than this pserver's are another pserver's by now: ``allowed`` may change."""
        refused = []
        for bucket in buckets:
            if version > self.version:
                known = self._beyond.get(bucket, (0, NO_PSERVER))
                if version >= known[0]:
                    self._beyond[bucket] = (version, sender)
                elif sender != known[1]:
                    refused.append(bucket)
                    continue
                self._has[bucket] = 1
                if self.allowed[bucket] == SERVED:
                    self.allowed[bucket] = WAITING
                    self._fenced.add(bucket)
            elif not self._is_fed_by(bucket, sender) or version < self._born:
                refused.append(bucket)
        return refused

    def _is_fed_by(self, bucket: int, sender: int) -> bool:
        """True if the orders make this pserver a receiver of the bucket from ``sender``."""
        if self._beyond.get(bucket, (0, sender))[1] != sender or sender not in self._known:
            return False
        if self.owner[bucket] == self.number:
            return self._giver[bucket] == sender and self.allowed[bucket] != SERVED
        return self.owner[bucket] == sender and self.number in (self.backup[bucket], self.joining[bucket])

    # --- orders ------------------------------------------------------------------------------------------------------

    def _orders(self, todo: _Todo, orders: Orders) -> None:
        placement = orders.placement
        if placement.version < self.version:
            return
        if orders.you != self.number or placement.history != self.history:
            self._reset(todo, orders)
        elif placement.version == self.version:
            todo.effects += self._say_all()
            return
        self.orders, self.version = orders, placement.version
        before = self._since
        self.owner, self.backup, self.joining, self._giver = (
            messages.unpack(text, self.buckets)
            for text in (placement.owner, placement.backup, placement.joining, orders.giver)
        )
        self._since = messages.unpack(orders.since, self.buckets, "i")
        self._known = frozenset(server.number for server in placement.servers)
        for number in [number for number in self._followers if number not in self._known]:
            todo.touched |= set(self._followers.pop(number).begun)
            todo.effects.append(CloseStream(number))
        if self._beyond:
            self._beyond = {bucket: seen for bucket, seen in self._beyond.items() if seen[0] > self.version}
        again, self._fenced = self._fenced, set()
        if before != self._since:
            changed = [bucket for bucket, (old, new) in enumerate(zip(before, self._since, strict=True)) if old != new]
            for bucket in changed:
                self._change(todo, bucket)
            again.difference_update(changed)
        for bucket in again:
            self._change(todo, bucket)
        todo.said = [*self._say_broken(), SendToMaster(messages.Followed(self.version))]

    def _reset(self, todo: _Todo, orders: Orders) -> None:
        todo.effects.append(Reset(orders.you, orders.placement.history))
        self.number, self.history, self._born = orders.you, orders.placement.history, orders.placement.version
        self.allowed = bytearray(self.buckets)
        self._has = bytearray(self.buckets)
        self._since = array("i", [-1]) * self.buckets
        self._followers, self._fenced, self._early, self._beyond = {}, set(), {}, {}

    def _change(self, todo: _Todo, bucket: int) -> None:
        """Orders changed a bucket, or it was fenced under the previous ones."""
        todo.touched.add(bucket)
        if self.owner[bucket] == self.number:
            self._has[bucket] = 1
            self._own(todo, bucket)
            return
        if self.allowed[bucket]:
            self.allowed[bucket] = MOVED
            todo.stop.append(bucket)
        if self._giver[bucket] == self.number:
            self._give(todo, bucket)
        for follower in self._followers.values():
            follower.lose(bucket)
            follower.begun.pop(bucket, None)
            follower.said.pop(bucket, None)
            if self._giver[bucket] != self.number:
                follower.broken.discard(bucket)
                follower.given.discard(bucket)
        self._is_released_early(bucket)
        roles = (self.backup[bucket], self.joining[bucket], self._giver[bucket])
        if self.number in roles:
            self._has[bucket] = 1
        elif self._has[bucket] and bucket not in self._beyond:
            self._has[bucket] = 0
            todo.drop.append(bucket)

    def _give(self, todo: _Todo, bucket: int) -> None:
        """The bucket has a new owner: release it, provided that its stream is intact and has everything."""
        heir = self._follower(self.owner[bucket])
        heir.broken.discard(bucket)
        if bucket in heir.step or bucket in heir.given:
            todo.release.setdefault(self.owner[bucket], []).append(bucket)
            heir.given.add(bucket)
        else:
            heir.broken.add(bucket)

    def _own(self, todo: _Todo, bucket: int) -> None:
        """This pserver owns the bucket: serve it as soon as no other pserver does."""
        followers = (self.backup[bucket], self.joining[bucket])
        for number, follower in self._followers.items():
            follower.broken.discard(bucket)
            follower.given.discard(bucket)
            if number not in followers:
                follower.lose(bucket)
                follower.begun.pop(bucket, None)
                follower.said.pop(bucket, None)
        giver = self._giver[bucket]
        released = self._is_released_early(bucket)
        if self.allowed[bucket] == SERVED:
            self._follow(todo, bucket)
        elif giver == RESTORE:
            self._waits(todo, bucket)
            todo.restore.append(bucket)
        elif released:
            self._take(todo, [bucket])
        elif bucket in self._beyond:
            self._waits(todo, bucket)
            self._fenced.add(bucket)
        elif giver == NO_PSERVER or giver not in self._known or giver == self.number:
            self._take(todo, [bucket])
        else:
            self._waits(todo, bucket)
        if giver != NO_PSERVER and self.allowed[bucket] == SERVED:
            todo.took.append(bucket)

    def _is_released_early(self, bucket: int) -> bool:
        """True if the bucket's release arrived before the orders it refers to, which are here now. One with an even
        newer version counts, and is kept: the giver may get the bucket back in between, and release it by this one."""
        giver, version = self._early.get(bucket, (NO_PSERVER, 0))
        mine = self.owner[bucket] == self.number and giver == self._giver[bucket] and version >= self._since[bucket]
        if version <= self.version:
            self._early.pop(bucket, None)
        return giver != NO_PSERVER and mine

    def _waits(self, todo: _Todo, bucket: int) -> None:
        if self.allowed[bucket] != WAITING:
            self.allowed[bucket] = WAITING
            todo.wait.append(bucket)

    def _take(self, todo: _Todo, buckets: Iterable[int]) -> None:
        """Serve buckets that no other pserver serves any more."""
        for bucket in buckets:
            if self.owner[bucket] != self.number or self.allowed[bucket] == SERVED:
                continue
            self.allowed[bucket] = SERVED
            todo.serve.append(bucket)
            todo.touched.add(bucket)
            giver = self._giver[bucket]
            if giver != NO_PSERVER:
                todo.took.append(bucket)
            if giver > NO_PSERVER and giver == self.backup[bucket] and giver in self._known:
                old = self._follower(giver)
                if old.up:  # both had the same data at the release
                    old.step.add(bucket)
                    old.begun[bucket] = self._since[bucket]
            self._follow(todo, bucket)

    def _follow(self, todo: _Todo, bucket: int) -> None:
        """Update the followers of a bucket that is served here."""
        backup, joining = self.backup[bucket], self.joining[bucket]
        if backup:
            follower = self._follower(backup)
            if bucket in follower.acked:  # was catching up under the last orders and has been fed since
                follower.acked.discard(bucket)
                follower.step.add(bucket)
            if bucket not in follower.step:
                follower.lose(bucket)
                follower.broken.add(bucket)
            elif joining == backup:
                self._catch_up(todo, bucket, follower)
        if joining and joining != backup:
            self._copy(todo, bucket, joining)

    def _catch_up(self, todo: _Todo, bucket: int, follower: _Follower) -> None:
        """The backup will become the owner. Pushes wait for it from now on, so it has everything once the present
        content of its stream has arrived."""
        for marked in follower.marks.values():
            marked.discard(bucket)  # pushes may not have waited since then
        follower.step.discard(bucket)
        follower.acked.add(bucket)
        follower.said.pop(bucket, None)
        follower.begun[bucket] = self._since[bucket]
        todo.touched.add(bucket)
        todo.promise.setdefault(self.backup[bucket], set()).add(bucket)

    def _copy(self, todo: _Todo, bucket: int, number: int) -> None:
        """Start a copy, unless one requested under the same orders is in progress."""
        follower = self._follower(number)
        if follower.begun.get(bucket) == self._since[bucket] and follower.fed(bucket):
            return
        follower.lose(bucket)
        follower.said.pop(bucket, None)
        if follower.up:
            follower.begun[bucket] = self._since[bucket]
            todo.copy.setdefault(number, []).append(bucket)
            follower.copying[bucket] = self._numbers + 1
            todo.touched.add(bucket)

    # --- streams to followers ----------------------------------------------------------------------------------------

    def _image_acked(self, todo: _Todo, number: int, copy: int, buckets: tuple[int, ...]) -> None:
        follower = self._followers.get(number)
        if follower is None:
            return
        acked = {bucket for bucket in buckets if follower.copying.get(bucket) == copy}
        for bucket in acked:
            del follower.copying[bucket]
        follower.acked |= acked
        todo.touched |= acked
        if acked:
            self._feeds(todo)
            self._mark(todo, number, acked)

    def _mark(self, todo: _Todo, number: int, buckets: set[int]) -> None:
        """Pushes now wait for the follower with these buckets; it is in sync once it has what came before."""
        self._numbers += 1
        self._follower(number).marks[self._numbers] = buckets
        todo.effects.append(MarkStream(number, self._numbers))

    def _mark_acked(self, todo: _Todo, number: int, mark: int) -> None:
        follower = self._followers.get(number)
        if follower is None:
            return
        synced = follower.marks.pop(mark, set()) & follower.acked
        follower.acked -= synced
        follower.step |= synced
        if synced:
            follower.said.update(dict.fromkeys(synced, self.version))
            todo.effects.append(SendToMaster(messages.Synced(self.version, number, messages.to_ranges(synced))))

    def _line_lost(self, todo: _Todo, number: int) -> None:
        if number not in self._known:
            return
        follower = self._follower(number)
        follower.up = False
        follower.marks.clear()
        self._lose(todo, number, [*follower.copying, *follower.acked, *follower.step])
        follower.broken |= follower.given
        follower.given.clear()
        todo.effects += self._say_broken()

    def _lose(self, todo: _Todo, number: int, buckets: Iterable[int]) -> None:
        """A follower is out of sync with these buckets."""
        follower = self._follower(number)
        for bucket in buckets:
            believed = self.backup[bucket] == number or follower.said.get(bucket, -1) >= self._since[bucket]
            follower.lose(bucket)
            todo.touched.add(bucket)
            if believed and self._giver[bucket] != number:
                follower.broken.add(bucket)

    def _line_made(self, todo: _Todo, number: int) -> None:
        follower = self._followers.get(number)
        if follower is None or follower.up:
            return
        follower.up = True
        for bucket in range(self.buckets):
            mine = self.owner[bucket] == self.number and self.allowed[bucket] == SERVED
            if mine and self.joining[bucket] == number and bucket not in follower.broken:
                self._copy(todo, bucket, number)

    def _was_fenced(self, todo: _Todo, number: int, version: int, buckets: tuple[int, ...]) -> None:
        """The refused content is missing at the follower. If that is due to newer orders, they are on their way: serve
        none of these buckets until they arrive."""
        mine = [bucket for bucket in buckets if self.allowed[bucket] == SERVED]
        self._lose(todo, number, mine)
        for bucket in mine:
            if version > self.version:
                self._fenced.add(bucket)
                self._waits(todo, bucket)
            elif self.joining[bucket] == number and bucket not in self._follower(number).broken:
                self._copy(todo, bucket, number)
        todo.effects += self._say_broken()

    # --- hand-over ---------------------------------------------------------------------------------------------------

    def _released(self, todo: _Todo, giver: int, version: int, buckets: tuple[int, ...]) -> None:
        for bucket in buckets:
            if version > self.version:
                self._early[bucket] = (giver, version)
            if self._giver[bucket] == giver and version >= self._since[bucket]:
                self._take(todo, [bucket])

    # --- effects -----------------------------------------------------------------------------------------------------

    def _follower(self, number: int) -> _Follower:
        return self._followers.setdefault(number, _Follower())

    def _feeds(self, todo: _Todo) -> None:
        """Emit the feeds of the touched buckets."""
        plans: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for bucket in sorted(todo.touched):
            plans.setdefault(self._plan(bucket), []).append(bucket)
        todo.effects += [FeedFollowers(tuple(buckets), *plan) for plan, buckets in plans.items()]
        todo.touched.clear()

    def _plan(self, bucket: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Receivers of a bucket's pieces, and those that its pushes wait for."""
        if self.owner[bucket] != self.number:
            return (), ()
        to, wait = [], []
        backup, joining = self.backup[bucket], self.joining[bucket]
        if backup:
            follower = self._follower(backup)
            fed = bucket in follower.step or bucket in follower.acked
            if fed:
                to.append(backup)
            given = self._giver[bucket] == backup  # the Master gives the bucket back if this pserver does not take it
            always = self.orders is None or self.orders.training.replication is Replication.SYNC
            if always or given or joining == backup or not fed:
                wait.append(backup)
        if joining and joining != backup:
            follower = self._follower(joining)
            if follower.fed(bucket):
                to.append(joining)
            believed = follower.said.get(bucket, -1) >= self._since[bucket]
            if believed or bucket in follower.step or bucket in follower.acked:
                wait.append(joining)
        return tuple(to), tuple(wait)

    def _finish(self, todo: _Todo) -> tuple[Effect, ...]:
        effects = todo.effects
        if todo.stop:
            effects.append(StopServing(tuple(todo.stop), waiting=False))
        if todo.wait:
            effects.append(StopServing(tuple(todo.wait), waiting=True))
        effects += [SendRelease(heir, tuple(buckets), self.version) for heir, buckets in todo.release.items()]
        if todo.drop:
            effects.append(Drop(tuple(todo.drop)))
        self._feeds(todo)
        if todo.serve:
            effects.append(Serve(tuple(todo.serve)))
        if todo.copy:
            self._numbers += 1
            effects += [Copy(follower, self._numbers, tuple(buckets)) for follower, buckets in todo.copy.items()]
        for follower, caught in todo.promise.items():
            self._mark(todo, follower, caught)
        checkpoint = self.orders.checkpoint if self.orders is not None else None
        if todo.restore and checkpoint is not None:
            effects.append(RestoreBuckets(checkpoint, tuple(todo.restore)))
        if todo.took:
            effects.append(SendToMaster(messages.Took(self.version, messages.to_ranges(todo.took))))
        return (*effects, *todo.said)

    def _say_broken(self) -> list[Effect]:
        return [
            SendToMaster(messages.Unsynced(self.version, number, messages.to_ranges(follower.broken)))
            for number, follower in self._followers.items()
            if follower.broken
        ]

    def _say_all(self) -> list[Effect]:
        """Messages that the Master may have missed. Repeating them is harmless."""
        said = self._say_broken()
        for number, follower in self._followers.items():
            synced = [bucket for bucket in follower.step if self.joining[bucket] == number]
            if synced:
                follower.said.update(dict.fromkeys(synced, self.version))
                said.append(SendToMaster(messages.Synced(self.version, number, messages.to_ranges(synced))))
        served = zip(self.owner, self._giver, self.allowed, strict=True)
        took = [b for b, (owner, giver, now) in enumerate(served) if owner == self.number and giver and now == SERVED]
        if took:
            said.append(SendToMaster(messages.Took(self.version, messages.to_ranges(took))))
        return [*said, SendToMaster(messages.Followed(self.version))] if self.version else said

    def hello(self) -> messages.PserverHello:
        """The first message on each connection to the Master."""
        holds = [0] * self.buckets
        for bucket in range(self.buckets):
            if self.owner[bucket] == self.number:
                holds[bucket] = 1
            elif self._has[bucket]:
                holds[bucket] = 2 if self.backup[bucket] == self.number else 3
        text = messages.pack(holds if self.number else bytes(self.buckets))
        return messages.PserverHello(self.name, self.history, self.version, text, self.most_bytes, self.number)
