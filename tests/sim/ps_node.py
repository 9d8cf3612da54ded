"""A simulated pserver: the real ``BucketMachine`` and ``StepBarrier``, rows that remember each push, streams to
followers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edl.job_records import Mode
from ps.protocol import messages
from ps.protocol.deltas import orders_after
from ps.server import bucket_machine as hd
from ps.server.bucket_machine import MOVED, SERVED, BucketMachine
from ps.server.step_barrier import Apply, Stale, StepBarrier
from tests.sim.ps_net import Pipe, Violation

if TYPE_CHECKING:
    from tests.sim.ps_world import PsSim

Id = tuple[int, int]
"""A push: trainer and seq."""
PATIENCE_S = 0.5


@dataclass
class Bucket:
    """A stored bucket: each row's pushes in order, and the highest seq of each trainer."""

    rows: dict[int, tuple[Id, ...]] = field(default_factory=dict)
    seqs: dict[int, int] = field(default_factory=dict)

    def copy(self) -> Bucket:
        return Bucket(dict(self.rows), dict(self.seqs))


@dataclass
class Request:
    """A push that has come here."""

    trainer: int
    seq: int
    step: int
    history: int
    parts: dict[int, tuple[int, ...]]
    """Rows by bucket."""
    answer: Callable[[str], None]
    until_s: float
    complete: bool = False
    """Another pserver has applied this step."""
    tag: int = 0
    at: int = 0
    """The step as the step barrier counts it."""
    applied: bool = False
    marks: dict[tuple[int, int], int] = field(default_factory=dict)
    """By (follower, bucket): what its stream has to have acknowledged."""


class Stream:
    """From one pserver to a follower."""

    def __init__(self, node: Node, follower: int) -> None:
        self.node, self.follower = node, follower
        self.up = False
        self.life = 0
        self.sent = self.acked = 0
        self.under_way: deque[tuple[int, float]] = deque()
        """What is not acknowledged: number, and when it was sent."""
        self.marks: list[tuple[int, int]] = []
        self.images: list[tuple[int, int, int]] = []
        self.pipe: Pipe | None = None
        self.back: Pipe | None = None
        self.lost = False
        self.unnoticed = False
        """It broke, and the sender does not know yet."""
        self.refused = 0
        """Version of the newest orders under which the follower has refused something."""
        self.target: Node | None = None

    def open(self) -> None:
        """Try to open the connection."""
        sim, node = self.node.sim, self.node
        if not node.alive or node.streams.get(self.follower) is not self or self.up or self.unnoticed:
            return
        target = sim.by_number(self.follower)
        same = target is not None and target.bucket_machine.history == node.bucket_machine.history
        if target is None or not same or not sim.linked(node, target):
            self._fail()
            return
        self.up, self.target = True, target
        self.life += 1
        self.sent = self.acked = 0
        self.under_way.clear()
        self.marks, self.images = [], []
        life = self.life
        self.pipe = Pipe(sim.net, lambda item: sim.run(target, target.take, self, item, life), sim.net.streams)
        self.back = Pipe(sim.net, lambda item: sim.run(node, node.stream_said, self, item, life), sim.net.streams)
        target.incoming.append(self)
        if self.lost:
            self.lost = False
            node.event(hd.LineMade(self.follower))

    def _fail(self) -> None:
        if not self.lost:
            self.lost = True
            self.node.event(hd.LineLost(self.follower))
        self.node.sim.net.at(0.3, self.open)

    def send(self, item: Any) -> None:
        if self.unnoticed:
            self.under_way.append((self.sent + 1, self.node.sim.net.now_s))
        if self.up and self.pipe is not None:
            self.sent += 1
            self.under_way.append((self.sent, self.node.sim.net.now_s))
            self.pipe.send((self.sent, self.node.bucket_machine.number, self.node.bucket_machine.version, item))

    @property
    def lag_s(self) -> float:
        """Age of the oldest thing that is not acknowledged, as far as the sender knows."""
        while self.under_way and self.under_way[0][0] <= self.acked:
            self.under_way.popleft()
        return self.node.sim.net.now_s - self.under_way[0][1] if self.under_way else 0.0

    def cut(self) -> None:
        """Break the connection; the sender notices a little later."""
        if self.up and self.pipe is not None and self.back is not None:
            self.pipe.close()
            self.back.close()
            self.up, self.unnoticed = False, True
            self.node.sim.run_later(self.node, self._noticed)

    def _noticed(self) -> None:
        self.unnoticed = False
        if self.node.streams.get(self.follower) is self and not self.up:
            self._fail()


class Node:
    """A pserver process."""

    def __init__(self, sim: PsSim, name: str, machine: str) -> None:
        self.sim, self.name, self.machine = sim, name, machine
        self.bucket_machine = BucketMachine(name, buckets=sim.buckets)
        self.barrier = StepBarrier(sim.training)
        self.alive = True
        self.draining = False
        self.frozen_s = 0.0
        self.store: dict[int, Bucket] = {}
        self.streams: dict[int, Stream] = {}
        self.incoming: list[Stream] = []
        self.feeds: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.pending: dict[tuple[int, int], int] = {}
        """Copies whose image is not taken yet: (follower, bucket) -> number."""
        self.requests: list[Request] = []
        self.told: messages.Orders | None = None
        """The newest, to go on from."""
        self.up_pipe: Pipe | None = None
        """To the Master."""
        self.tags = 0
        self.done: set[tuple[int, str]] = set()
        self.marked: dict[int, dict[int, Bucket]] = {}
        self.top_step = 0

    # --- the Master --------------------------------------------------------------------------------------------------

    def say(self, word: Any) -> None:
        if self.up_pipe is not None:
            self.up_pipe.send(messages.encode(word))
            if self.sim.net.rng.random() < 0.05 and not isinstance(word, messages.Hello):
                self.up_pipe.send(messages.encode(word))

    def hear(self, body: str) -> None:
        word = messages.decode(body)
        if isinstance(word, messages.OrdersChanged):
            if self.told is None or self.told.chart.version != word.base:
                self.say(messages.OrdersPlease(self.bucket_machine.version))
                return
            word = orders_after(self.told, word)
        self.told = word
        self.event(hd.OrdersCame(word))
        orders = self.bucket_machine.orders
        if orders is None:
            return
        self.verdicts(self.barrier.orders(orders.epoch, orders.members, orders.revoked))
        for request in [one for one in self.requests if one.trainer in orders.revoked]:
            self.finish(request, "stale")
        if orders.go:
            self.sim.leave(self)
            return
        cut = orders.cut
        if cut is not None and (cut.number, cut.phase) not in self.done and cut.phase != "restore":
            self.done.add((cut.number, cut.phase))
            self.sim.disk.work(self, cut, orders.chart)

    def event(self, event: hd.Event) -> None:
        """Feed an event to the bucket machine and apply its effects."""
        for effect in self.bucket_machine.step(event):
            self._do(effect)
        self.look()

    def _do(self, effect: hd.Effect) -> None:
        match effect:
            case hd.Say(word):
                self.say(word)
            case hd.Reset():
                self._reset()
            case hd.Stop(buckets, False):
                for request in [one for one in self.requests if not one.parts.keys().isdisjoint(buckets)]:
                    self.finish(request, "moved")
            case hd.Drop(buckets):
                for bucket in buckets:
                    self.store.pop(bucket, None)
            case hd.Feed():
                self._feed(effect)
            case hd.Copy(follower, number, buckets):
                self.stream(follower)
                for bucket in buckets:
                    self.pending[follower, bucket] = number
                    self.sim.run_later(self, self.copy, follower, bucket, number)
            case hd.Mark(follower, number):
                stream = self.stream(follower)
                stream.marks.append((stream.sent, number))
                self.sim.run_later(self, self.stream_said, stream, ("ack", stream.acked), stream.life)
            case hd.Release(follower, buckets, version):
                self.stream(follower).send(("release", version, buckets))
            case hd.Part(follower):
                if follower in self.streams:
                    self.streams.pop(follower).cut()
            case hd.Restore(cut, buckets):
                self.sim.run_later(self, self.restore, cut, buckets)

    def _reset(self) -> None:
        self.store, self.feeds, self.pending, self.marked = {}, {}, {}, {}
        self.verdicts(self.barrier.reset())
        for stream in [*self.streams.values(), *self.incoming]:
            stream.cut()
        self.streams, self.incoming = {}, []
        for request in list(self.requests):
            self.finish(request, "stale")

    def _feed(self, effect: hd.Feed) -> None:
        for bucket in effect.buckets:
            self.feeds[bucket] = (effect.to, effect.wait)
            for key in [key for key in self.pending if key[1] == bucket and key[0] not in effect.to]:
                del self.pending[key]
        for follower in effect.to:
            self.stream(follower)

    def restore(self, cut: messages.Cut, buckets: tuple[int, ...]) -> None:
        if self.sim.disk.broken(cut):
            self.say(messages.CutDone(cut.number, "restore", "a checksum is wrong"))
            return
        for bucket in buckets:
            if (
                self.bucket_machine.owner[bucket] == self.bucket_machine.number
                and self.bucket_machine.allowed[bucket] != SERVED
            ):
                self.store[bucket] = self.sim.disk.load(cut.run, bucket)
        self.event(hd.Restored(cut.number, buckets))

    # --- streams -----------------------------------------------------------------------------------------------------

    def stream(self, follower: int) -> Stream:
        if follower not in self.streams:
            self.streams[follower] = Stream(self, follower)
            self.streams[follower].open()
        return self.streams[follower]

    def copy(self, follower: int, bucket: int, number: int) -> None:
        """The turn of an image has come."""
        if self.pending.get((follower, bucket)) != number:
            return
        del self.pending[follower, bucket]
        stream = self.streams.get(follower)
        if stream is not None and stream.up:
            image = self.store.get(bucket, Bucket()).copy()
            stream.send(("image", bucket, image))
            stream.images.append((stream.sent, number, bucket))

    def take(self, stream: Stream, item: Any, life: int) -> None:
        """Something arrives in a stream from another pserver. A new stream ends the last one of the same sender."""
        count, sender, version, word = item
        if life != stream.life:
            return
        if stream.target is not self or self.bucket_machine.number != stream.follower:
            stream.cut()
            return
        if word[0] == "release":
            self.event(hd.Released(sender, word[1], word[2]))
        else:
            bucket = word[1]
            if self.bucket_machine.refuses(sender, version, [bucket]):
                if stream.back is not None:
                    stream.back.send(("fenced", bucket, self.bucket_machine.version))
            elif word[0] == "image":
                self.store[bucket] = word[2].copy()
            else:
                held = self.store.setdefault(bucket, Bucket())
                held.rows.update(word[2])
                held.seqs[word[3][0]] = max(word[3][1], held.seqs.get(word[3][0], 0))
        if stream.back is not None:
            stream.back.send(("ack", count))

    def stream_said(self, stream: Stream, item: Any, life: int = 0) -> None:
        if self.streams.get(stream.follower) is not stream or (life and life != stream.life) or not stream.up:
            return
        if item[0] == "fenced":
            stream.refused = max(stream.refused, item[2])
            self.event(hd.Fenced(stream.follower, item[2], (item[1],)))
            return
        stream.acked = max(stream.acked, item[1])
        done = [image for image in stream.images if image[0] <= stream.acked]
        stream.images = stream.images[len(done) :]
        for _, number, bucket in done:
            self.event(hd.ImageAcked(stream.follower, number, (bucket,)))
        while stream.marks and stream.marks[0][0] <= stream.acked:
            self.event(hd.MarkAcked(stream.follower, stream.marks.pop(0)[1]))
        self.look()

    # --- pushes ------------------------------------------------------------------------------------------------------

    def push(self, request: Request) -> None:
        """A push, or what of it belongs here, has come from a trainer."""
        orders = self.bucket_machine.orders
        if orders is None:
            request.answer("moved")
            return
        if request.history < self.bucket_machine.history or request.trainer in orders.revoked:
            request.answer("stale")
            return
        self.requests.append(request)
        self.top_step = max(self.top_step, request.step)
        self.look()
        self.sim.run_later(self, self.look, after_s=PATIENCE_S + 0.01)

    def look(self) -> None:
        """Retry the requests that wait."""
        for request in list(self.requests):
            if request in self.requests:
                self._look_at(request)

    def _look_at(self, request: Request) -> None:
        states = {self.bucket_machine.allowed[bucket] for bucket in request.parts}
        if MOVED in states or request.history != self.bucket_machine.history:
            self.finish(request, "moved")
        elif not request.applied and states <= {SERVED}:
            if self.sim.training.mode is Mode.SYNC:
                if not request.tag:
                    self.tags += 1
                    request.tag = self.tags
                    self.verdicts(self.barrier.push(request.trainer, request.step, request.tag, request.complete))
            else:
                self.apply(request)
        if request in self.requests and request.applied and states <= {SERVED} and self._is_acked(request):
            self.sim.acknowledged(self, request)
            self.finish(request, "ok")
        elif request in self.requests and self.sim.net.now_s >= request.until_s:
            self.finish(request, "slow" if request.applied else "wait" if request.tag else "later")

    def verdicts(self, verdicts: tuple[Apply | Stale, ...]) -> None:
        by_tag = {request.tag: request for request in self.requests if request.tag}
        for verdict in verdicts:
            for tag in verdict.tags:
                if tag not in by_tag:
                    continue
                if isinstance(verdict, Stale):
                    self.finish(by_tag[tag], "stale")
                elif any(self.bucket_machine.allowed[bucket] != SERVED for bucket in by_tag[tag].parts):
                    self.finish(by_tag[tag], "moved")
                else:
                    by_tag[tag].at = verdict.step
                    self.apply(by_tag[tag])

    def apply(self, request: Request) -> None:
        """Rows change, and pieces go out."""
        request.applied = True
        for bucket, rows in request.parts.items():
            held = self.store.setdefault(bucket, Bucket())
            push = (request.trainer, request.seq)
            if held.seqs.get(request.trainer, 0) < request.seq:
                held.seqs[request.trainer] = request.seq
                for row in rows:
                    if push in held.rows.get(row, ()):
                        raise Violation(f"{push} is applied twice to row {row} of bucket {bucket} on {self.name}")
                    held.rows[row] = (*held.rows.get(row, ()), push)
                for follower in self.feeds.get(bucket, ((), ()))[0]:
                    if (follower, bucket) not in self.pending:
                        self.stream(follower).send(("piece", bucket, {row: held.rows[row] for row in rows}, push))
            for follower, stream in self.streams.items():
                request.marks[follower, bucket] = stream.life * 10**6 + stream.sent

    def _is_acked(self, request: Request) -> bool:
        for bucket in request.parts:
            to, wait = self.feeds.get(bucket, ((), ()))
            for follower in wait:
                stream = self.streams.get(follower)
                if follower not in to or stream is None or not stream.up:
                    return False
                if stream.life * 10**6 + stream.acked < request.marks.get((follower, bucket), 0):
                    return False
            for follower in set(to) - set(wait):
                stream = self.streams.get(follower)
                up = stream is not None and (stream.up or stream.unnoticed)
                if stream is None or not up or stream.lag_s > self.sim.training.lag_s:
                    return False
                if stream.refused > self.bucket_machine.version:
                    return False
        return True

    def finish(self, request: Request, answer: str) -> None:
        if request in self.requests:
            self.requests.remove(request)
            if request.tag:
                self.barrier.withdraw(request.tag)
            request.answer(answer)
