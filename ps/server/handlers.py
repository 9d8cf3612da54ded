"""A pserver's handlers for trainers' requests: pull, push, scan, intent.

A request waits on its connection's thread, at most as long as its sender does: for other trainers (the step barrier),
for a bucket that is moving here, and a push for its replicas. The answer to a request with an outdated placement map
carries the new one in its head.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edl.adapters.system_threads import SYSTEM_THREADS
from edl.errors import PsError
from edl.job_records import Mode, Replication
from edl.threads import ThreadLock, Threads
from ps.hashing import buckets_of, shard_of_bucket
from ps.intents import MOST_TEXT, Intent, IntentFenced, home
from ps.net.caller import EndpointPeer, FrameReply
from ps.protocol import messages, requests
from ps.protocol.frames import Frame, FrameOp, pack_head
from ps.protocol.half_precision import encode_half
from ps.protocol.handshake import TRAINER
from ps.protocol.requests import InvalidRequest, Wanted, read_pull, read_push, rows_bytes
from ps.rows import BucketImage, Pushed, ShardChange, TablePush, TrainerPush, encode
from ps.rows import RowOp as Does
from ps.server.bucket_shell import BucketShell, Sent, ServedBuckets
from ps.server.step_barrier_shell import BarrierTimeout, Revoked, StepBarrierShell
from ps.spec import BUCKETS, TableSpec
from ps.store.budget import Full
from ps.store.damage import DamagedPush
from ps.store.store import RowStore

WAIT_S = 30.0
"""Wait of a sender that does not state one, in seconds."""
WAIT_SHARE = 0.9
"""Fraction of the sender's wait that is used, to leave time for the answer."""
STREAM_BYTES = 256 << 20
"""Pushes wait while more bytes than this are queued for one replica."""
FULL_S = 1.0
ORDERS_S = 0.05
"""A trainer that has newer orders than this pserver retries after this many seconds."""


class View:
    """An immutable view of the newest orders, prepared for requests."""

    def __init__(self, orders: messages.Orders, before: View | None = None) -> None:
        self.orders = orders
        self.version, self.history = orders.placement.version, orders.placement.history
        self.placed = self.version
        """First version with these pservers and owners; trainers need no placement map newer than this."""
        if before is not None and before.orders.placement.servers == orders.placement.servers:
            self.placed = before.placed if before.orders.placement.owner == orders.placement.owner else self.version
        self.epoch, self.members = orders.epoch, orders.members
        self.revoked = frozenset(orders.revoked)
        self.training = orders.training
        self.tables: dict[str, TableSpec] = {table.name: table for table in orders.tables}
        self._placement_update = ""

    @property
    def placement_update(self) -> str:
        """The encoded placement map for trainers with an outdated one."""
        if not self._placement_update:
            orders = self.orders
            self._placement_update = messages.encode(messages.PlacementUpdate(orders.token, orders.placement, -1, ()))
        return self._placement_update

    def rates(self, step: int, divisor: float) -> dict[str, float]:
        """The LR of each table in a step."""
        found = {}
        for name, table in self.tables.items():
            holds = [hold for hold in self.orders.lr if hold.step <= step and hold.table in ("", name)]
            found[name] = table.optimizer.lr * (holds[-1].factor if holds else 1.0) / divisor
        return found


@dataclass(slots=True)
class Counts:
    """Counters since the start."""

    pulls: int = 0
    pushes: int = 0
    keys: int = 0
    history: int = 0
    top_step: int = 0
    """The highest step of any push in this history."""
    damaged: int = 0
    applied: int = 0
    own: dict[int, deque[int]] = field(default_factory=dict)
    """By live trainer: the values of ``applied`` after its latest pushes."""
    lock: ThreadLock = field(default_factory=SYSTEM_THREADS.lock)

    def others(self, trainer: int, base: int) -> int:
        """Number of pushes by other trainers since ``base``."""
        if base < 0:
            return 0
        with self.lock:
            own = sum(1 for one in self.own.get(trainer, ()) if one > base)
            return max(0, self.applied - base - own)

    def applied_one(self, trainer: int) -> None:
        """Count one more applied push."""
        with self.lock:
            self.pushes += 1
            self.applied += 1
            self.own.setdefault(trainer, deque(maxlen=64)).append(self.applied)

    def begin_history(self, history: int) -> None:
        """Steps of earlier histories do not count any more."""
        with self.lock:
            self.history, self.top_step = history, 0

    def forget(self, trainer: int) -> None:
        """Drop the records of a trainer that will not push any more."""
        with self.lock:
            self.own.pop(trainer, None)


class Evicting(Protocol):
    """Makes room when memory is full."""

    def make_room(self, tables: Collection[str]) -> bool:
        """Start evicting if one of these tables can lose rows; return whether that is so."""
        ...


@dataclass(slots=True)
class _Done:
    """The result of applying a push."""

    pushed: Pushed
    sent: Sent


@dataclass(slots=True)
class _Asked:
    """The head of a request after validation, with the view under which it was validated."""

    head: dict[str, Any]
    view: View
    serving: ServedBuckets
    trainer: int
    until_s: float

    @property
    def step(self) -> int:
        step = self.head.get("step", 0)
        if type(step) is not int or not 0 <= step < 1 << 32:
            raise InvalidRequest("word", f"step {step!r} must be an integer from 0 to {(1 << 32) - 1}")
        return step


class Waited(Exception):
    """The request's wait has timed out or is pointless; it is answered with ``op``."""

    def __init__(self, op: FrameOp, **content: Any) -> None:
        self.op, self.content = op, content
        super().__init__(op.name)


class RequestHandlers:
    """Handles trainers' requests. ``view`` is replaced with each new orders."""

    def __init__(
        self,
        name: str,
        store: RowStore,
        bucket_shell: BucketShell,
        evicting: Evicting,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        self.view: View | None = None
        self.counts = Counts(lock=threads.lock())
        self.barrier = StepBarrierShell(threads=threads)
        self._now_s = threads.now_s
        self._name, self._store, self._bucket_shell, self._evicting = name, store, bucket_shell, evicting
        self.stream_bytes = STREAM_BYTES

    def answer(self, peer: EndpointPeer, frame: Frame) -> FrameReply:
        """Handle PULL, PUSH, SCAN or INTENT."""
        view = self.view
        head: dict[str, Any] = {}
        try:
            head = frame.json()
            asked = self._asked(peer, frame, head, view)
            view = asked.view
            if frame.op is FrameOp.PULL:
                return self._pull(peer, frame.body, asked)
            if frame.op is FrameOp.PUSH:
                return self._push(frame.body, asked)
            if frame.op is FrameOp.INTENT:
                return self._intent(frame.body, asked)
            return self._scan(asked)
        except Waited as waited:
            return self._no(waited.op, head, view, **waited.content)
        except BarrierTimeout as held:
            text = f"waiting for {held.names} in step {head.get('step')}"
            return self._no(FrameOp.WAIT, head, view, text=text, **{"for": "trainers"})
        except (Revoked, IntentFenced):
            return self._no(
                FrameOp.STALE, head, view, kind="trainer", text="this trainer is considered lost; restart the process"
            )
        except InvalidRequest as refusal:
            if refusal.kind == "table" and view is not None and head.get("version", 0) > view.version:
                # A trainer may learn of a new table before a pserver does.
                text = f"{refusal} (the pserver's orders are outdated)"
                return self._no(FrameOp.BUSY, head, view, after_s=ORDERS_S, text=text)
            return self._no(FrameOp.REFUSED, head, view, kind=refusal.kind, text=f"pserver {self._name}: {refusal}")
        except Full as full:
            return self._full(str(full), head, view)
        except MemoryError:
            return self._full("the system is out of memory", head, view)
        except PsError as error:
            kind = "damaged" if isinstance(error, DamagedPush) else "table"
            return self._no(FrameOp.REFUSED, head, view, kind=kind, text=f"pserver {self._name}: {error}")

    # --- common to all requests --------------------------------------------------------------------------------------

    def _asked(self, peer: EndpointPeer, frame: Frame, head: dict[str, Any], view: View | None) -> _Asked:
        if view is None:
            raise Waited(FrameOp.BUSY, after_s=0.2, text="this pserver has received no orders yet")
        until_s = self._now_s() + WAIT_SHARE * (frame.wait_s or WAIT_S)
        clock = head.get("clock", 0)
        if type(clock) is not int or not 0 <= clock < 1 << 32:
            raise InvalidRequest("word", f"clock {clock!r} must be an integer from 0 to {(1 << 32) - 1}")
        trainer = peer.number if peer.role == TRAINER else 0
        if frame.op is FrameOp.PUSH and head.get("trainer", trainer) != trainer and peer.role == TRAINER:
            raise InvalidRequest("word", f"trainer {trainer} must not push as {head.get('trainer')!r}")
        with self._bucket_shell.changed:
            while True:
                view, serving = self.view or view, self._bucket_shell.serving
                history = head.get("history", serving.history)
                if history <= serving.history == view.history:  # the view is replaced shortly after the rows
                    break
                if self._now_s() >= until_s:
                    raise Waited(
                        FrameOp.WAIT, text="the pserver's orders are older than the trainer's", **{"for": "release"}
                    )
                self._bucket_shell.changed.wait(until_s - self._now_s())
            self._check_history(history)
            self._store.clock.at_least(clock)  # not later: another history may begin, with an earlier second
        if trainer in view.revoked:
            raise Revoked
        return _Asked(head, view, serving, trainer, until_s)

    def _check_history(self, history: int) -> None:
        """Raise ``Waited`` if the rows have a later history than a request's."""
        current = self._bucket_shell.serving.history
        if history < current:
            text = "the parameters were rolled back to a checkpoint; restart the process"
            raise Waited(FrameOp.ROLLED_BACK, history=current, text=text)

    def _no(self, op: FrameOp, head: dict[str, Any], view: View | None, **content: Any) -> FrameReply:
        if op is FrameOp.MOVED and view is not None:
            content["placement_version"] = view.version
        return FrameReply(op, pack_head({**content, **self._placement_if_outdated(head)}))

    def _placement_if_outdated(self, head: dict[str, Any]) -> dict[str, Any]:
        view = self.view
        known = head.get("version")
        return (
            {"placement": view.placement_update}
            if view is not None and known is not None and known < view.placed
            else {}
        )

    def _ok(self, asked: _Asked, parts: Sequence[Any] = (), **content: Any) -> FrameReply:
        view = self.view or asked.view
        head = {"applied": self.counts.applied, "epoch": view.epoch, "version": view.version, **content}
        if self._store.timed:
            head["clock"] = self._store.clock.now()
        return FrameReply(FrameOp.OK, pack_head({**head, **self._placement_if_outdated(asked.head)}), parts)

    def _full(self, text: str, head: dict[str, Any], view: View | None) -> FrameReply:
        text = f"pserver {self._name}: {text}. Use --pserver-memory to change its limit"
        if self._evicting.make_room(requests.named(head)):
            return self._no(FrameOp.BUSY, head, view, after_s=FULL_S, text=f"{text} (rows are being evicted)")
        return self._no(FrameOp.REFUSED, head, view, kind="memory", text=text)

    def _await_served(self, buckets: NDArray[np.uint16], asked: _Asked) -> None:
        """Wait until all of these buckets are served here. Raises ``Waited``, also if all rows are dropped."""
        bucket_shell, served, until_s = self._bucket_shell, asked.serving.mask, asked.until_s
        with bucket_shell.changed:
            while not served[buckets].all():
                missing = buckets[served[buckets] == 0].tolist()
                self._check_history(asked.serving.history)
                if asked.serving is not bucket_shell.serving or not bucket_shell.waiting(missing):
                    raise Waited(FrameOp.MOVED, text=f"bucket {missing[0]} is not on pserver {self._name}")
                if self._now_s() >= until_s:
                    text = f"bucket {missing[0]} is moving to pserver {self._name}"
                    raise Waited(FrameOp.WAIT, text=text, **{"for": "release"})
                bucket_shell.changed.wait(until_s - self._now_s())

    # --- pull --------------------------------------------------------------------------------------------------------

    def _pull(self, peer: EndpointPeer, body: memoryview, asked: _Asked) -> FrameReply:
        parts = read_pull(asked.head, body, asked.view.tables)
        insert = bool(asked.head.get("insert", True))
        step = asked.step
        if insert and asked.trainer:
            self.barrier.pull(asked.trainer, step, asked.until_s)
        room = peer.room(sum(rows_bytes(len(one.keys), one.dim, one.dtype) for one in parts))
        at = 0
        for one in parts:
            size = rows_bytes(len(one.keys), one.dim, one.dtype)
            self._rows(one, room[at : at + size], step, insert, asked)
            at += size
        counts = self.counts
        with counts.lock:
            counts.pulls += 1
            counts.keys += sum(len(one.keys) for one in parts)
        return self._ok(asked, [room[:at]])

    def _rows(self, one: Wanted, room: memoryview, step: int, insert: bool, asked: _Asked) -> None:
        count, dim = len(one.keys), one.dim
        if not count:
            return
        if one.dtype == "f4":
            out = np.frombuffer(room, np.float32, count * dim).reshape(count, dim)
        else:
            out = np.empty((count, dim), np.float32)
        served = asked.serving.mask
        while self._store.pull(one.table, one.keys, out, step=step, insert=insert, allowed=served, counts=one.counts):
            self._await_served(_buckets([one]), asked)
            if self._now_s() >= asked.until_s:
                raise Waited(
                    FrameOp.WAIT, text=f"buckets keep moving to and from pserver {self._name}", **{"for": "release"}
                )
        if one.dtype != "f4":
            small = encode_half(out, one.dtype)
            room[: small.nbytes] = small.reshape(-1).view(np.uint8).data

    # --- push --------------------------------------------------------------------------------------------------------

    def _push(self, body: memoryview, asked: _Asked) -> FrameReply:
        head, view = asked.head, asked.view
        seq, base = head.get("seq"), head.get("base", -1)
        if type(seq) is not int or seq < 0 or type(base) is not int:
            raise InvalidRequest("word", f"seq {seq!r} and base {base!r} must be integers")
        trainer = asked.trainer or head.get("trainer", 0)
        number = _redone(head) or (trainer, seq)
        parts = _scaled(read_push(head, body, view.tables), head.get("scale", 1.0))
        push, step = TrainerPush(*number, parts), asked.step
        buckets = _buckets(parts)
        self._await_room(buckets, asked.until_s)
        self._await_served(buckets, asked)
        if any(part.op != Does.GRAD for part in parts):
            if any(part.op == Does.GRAD for part in parts):
                raise InvalidRequest("word", "one push cannot contain both gradients and other values")
            scale, done = 1.0, self._apply([push], step, 1.0, asked, base)
        else:

            def apply(pushes: Sequence[TrainerPush], at: int, scale: float) -> tuple[float, _Done]:
                return scale, self._apply(pushes, at, scale, asked, base)

            complete, history = head.get("complete") is True, asked.serving.history
            try:
                found = self.barrier.push(push, step, apply, asked.until_s, complete, trainer, history)
            except Revoked:
                self._check_history(history)
                raise
            step = found.step
            scale, done = found.result
        counts = [done.pushed.fresh, done.pushed.skipped, done.pushed.damaged]
        while done.pushed.refused:
            self._await_served(buckets, asked)
            done = self._apply([push], step, scale, asked, base)
        self._await_copies(done, buckets, asked)
        if counts[0] or not counts[1]:
            self.counts.applied_one(trainer)
        return self._ok(asked, self._back(parts, asked), step=step, fresh=counts[0], again=counts[1], damaged=counts[2])

    def _back(self, parts: Sequence[TablePush], asked: _Asked) -> list[Any]:
        """Updated rows of the pushed keys, for the tables requested in the head."""
        requested = asked.head.get("back", [])
        if not requested:
            return []
        try:
            dtypes = {str(table): str(dtype) for table, dtype in requested}
            wanted = [
                Wanted(one.table, one.keys, dtypes[one.table], one.grads.shape[1]) for one in parts
                if one.table in dtypes
            ]  # fmt: skip
            sizes = [rows_bytes(len(one.keys), one.dim, one.dtype) for one in wanted]
        except (TypeError, ValueError, KeyError):
            raise InvalidRequest(
                "word", f"back must be a list of tables and number formats, not {str(requested)[:80]}"
            ) from None
        found = []
        for one, size in zip(wanted, sizes, strict=True):
            room = memoryview(bytearray(size))
            self._rows(one, room, asked.step, False, asked)
            found.append(room)
        return found

    def _apply(self, pushes: Sequence[TrainerPush], step: int, scale: float, asked: _Asked, base: int) -> _Done:
        """Apply these pushes to the store, all or none of them."""
        view, counts = self.view or asked.view, self.counts
        divisor = 1.0
        if view.training.staleness_lr and view.training.mode is Mode.ASYNC:
            divisor = 1 + counts.others(asked.trainer, base) / max(1, len(view.members))
        sent = self._bucket_shell.sent()
        pushed = self._store.push(
            pushes,
            step=step,
            lr=view.rates(step, divisor),
            scale=scale,
            allowed=asked.serving.mask,
            each=lambda piece: self._bucket_shell.spread(piece, sent),
            needed=self._bucket_shell.feeds,
        )
        with counts.lock:
            counts.keys += pushed.fresh
            counts.damaged += pushed.damaged
            if counts.history == asked.serving.history:
                counts.top_step = max(counts.top_step, step)
        return _Done(pushed, sent)

    def _await_room(self, buckets: NDArray[np.uint16], until_s: float) -> None:
        """Wait until the streams to these buckets' replicas have room. Raises ``Waited``."""
        bucket_shell = self._bucket_shell
        with bucket_shell.changed:
            while follower := bucket_shell.fullest(self.stream_bytes, buckets):
                if self._now_s() >= until_s:
                    under_way = f"{self.stream_bytes >> 20} MB are queued for pserver {follower}"
                    raise Waited(FrameOp.BUSY, after_s=0.2, text=f"replicas lag behind: more than {under_way}")
                bucket_shell.changed.wait(until_s - self._now_s())

    def _await_copies(self, done: _Done, buckets: NDArray[np.uint16], asked: _Asked) -> None:
        """Wait until all replicas that the push waits for have it. Raises ``Waited``."""
        bucket_shell, sent = self._bucket_shell, done.sent
        training = asked.view.training
        lag_s = training.lag_s if training.replication is Replication.ASYNC else None
        if done.pushed.skipped or done.pushed.refused:
            sent = bucket_shell.behind(sent, buckets)
        with bucket_shell.changed:
            while True:
                if bucket_shell.stopped(sent, buckets):
                    raise Waited(
                        FrameOp.MOVED, text=f"a bucket has left pserver {self._name} meanwhile; repeat this push"
                    )
                follower = bucket_shell.waits_for(sent, buckets, lag_s)
                if not follower:
                    return
                if self._now_s() >= asked.until_s:
                    text = f"pserver {self._name} waits for the replica on pserver {follower}"
                    raise Waited(FrameOp.WAIT, text=text, **{"for": "copies"})
                bucket_shell.changed.wait(asked.until_s - self._now_s())

    # --- intents -----------------------------------------------------------------------------------------------------

    def _intent(self, body: memoryview, asked: _Asked) -> FrameReply:
        """Store or fence an intent (``ps/intents.py``). Answered once all replicas that a push would wait for have
        it."""
        head, intents = asked.head, self._store.intents
        of, seq, fence = head.get("of"), head.get("seq", -1), head.get("fence") is True
        if type(of) is not int or of < 1 or type(seq) is not int:
            raise InvalidRequest("word", f"invalid intent: trainer {of!r}, number {seq!r}")
        if body.nbytes > MOST_TEXT:
            long = f"the list of the records in one push has {body.nbytes} bytes, more than {MOST_TEXT}"
            raise InvalidRequest("word", f"{long}. Call step() after fewer batches")
        if not fence and of != asked.trainer:
            raise InvalidRequest("word", f"trainer {asked.trainer} must not declare an intent of trainer {of}")
        bucket = home(of)
        buckets, shard = np.array([bucket], np.uint16), shard_of_bucket(bucket)
        found: Intent | None = None
        sent = self._bucket_shell.sent()
        while found is None:
            self._await_served(buckets, asked)
            sent = self._bucket_shell.sent()
            with self._store.lock(bucket):
                if asked.serving.mask[bucket]:
                    found = intents.fence(of) if fence else intents.declare(of, seq, str(body, "utf-8"))
                    self._bucket_shell.spread(ShardChange(shard, (), buckets, intents={of: found}), sent)
        self._await_copies(_Done(Pushed(), sent), buckets, asked)
        text = found.text.encode() if fence else b""
        return self._ok(asked, [text] if text else [], seq=found.seq)

    # --- scan --------------------------------------------------------------------------------------------------------

    def _scan(self, asked: _Asked) -> FrameReply:
        table, bucket = asked.head.get("table"), asked.head.get("bucket")
        if table not in asked.view.tables:
            raise InvalidRequest("table", f"there is no table {str(table)[:100]!r}")
        if type(bucket) is not int or not 0 <= bucket < BUCKETS:
            raise InvalidRequest("word", f"bucket {bucket!r} must be an integer from 0 to {BUCKETS - 1}")
        image: BucketImage | None = None
        while image is None:
            self._await_served(np.array([bucket], np.uint16), asked)
            with self._store.lock(bucket):
                if asked.serving.mask[bucket]:  # it may have left meanwhile, and its rows be gone
                    image = self._store.image(bucket)
        rows = image.rows.get(str(table))
        parts = encode(rows) if rows is not None else []
        size = sum(memoryview(part).nbytes for part in parts)
        return self._ok(asked, parts, rows=0 if rows is None else len(rows), bytes=size)


def _buckets(parts: Sequence[TablePush | Wanted]) -> NDArray[np.uint16]:
    """The buckets of all keys, without repetition."""
    found = np.zeros(BUCKETS, np.bool_)
    for part in parts:
        found[buckets_of(part.keys)] = True
    return np.flatnonzero(found).astype(np.uint16)


def _redone(head: dict[str, Any]) -> tuple[int, int] | None:
    """Trainer and sequence number of the push that is repeated, if any. Raises ``InvalidRequest``."""
    redo = head.get("redo")
    if redo is None:
        return None
    if not isinstance(redo, list) or len(redo) != 2 or any(type(one) is not int or one < 0 for one in redo):
        raise InvalidRequest("word", f"redo {str(redo)[:40]} must be the numbers of a trainer and a push")
    return redo[0], redo[1]


def _scaled(parts: list[TablePush], scale: Any) -> list[TablePush]:
    if type(scale) not in (int, float) or not np.isfinite(scale):
        raise InvalidRequest("word", f"scale {scale!r} must be a finite number")
    if scale == 1:
        return parts
    return [
        TablePush(one.table, one.keys, one.grads * np.float32(scale), one.op)
        if one.op in (Does.GRAD, Does.ADD)
        else one
        for one in parts
    ]
