"""The parameter server: combines store, buckets, replication, checkpoints, and connections to Master, trainers and
pservers.

Threads: requests are handled on their connections' threads (``ps/server/handlers.py``), as are streams from other
pservers (``ps/server/replicate_in.py``). Orders are carried out on the bucket shell's thread
(``ps/server/bucket_shell.py``). Another thread does periodic work: load reports, evictions, lost trainers.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edl.adapters.clock import SystemClock
from edl.adapters.system_threads import SYSTEM_THREADS
from edl.errors import EdlError, ProtocolError, PsError
from edl.ports import Clock, Files
from edl.threads import ThreadLock, Threads
from ps.checkpoint.directory import RESTORE_THREADS
from ps.net.caller import EndpointPeer, FrameCaller, FrameEndpoint, FrameReply
from ps.net.connection import SYSTEM_SOCKETS, Sockets
from ps.net.tls import TlsFiles
from ps.protocol import messages
from ps.protocol.deltas import orders_after
from ps.protocol.frames import Frame, FrameOp, pack_head
from ps.protocol.handshake import MASTER, SERVER, TRAINER, CallerHello
from ps.server.bucket_machine import BucketMachine, MasterLine, OrdersCame, Restored
from ps.server.bucket_shell import BucketShell
from ps.server.checkpoint_task import CheckpointTask
from ps.server.eviction_task import EvictionTask
from ps.server.handlers import RequestHandlers, View
from ps.server.replicate_in import ReplicationIn
from ps.server.replicate_out import CONNECT_S
from ps.spec import BUCKETS
from ps.store.kernels import at_once, chosen, kernels
from ps.store.kernels.ready import compile_elsewhere
from ps.store.push_plan import PartlyApplied
from ps.store.store import REMEMBERED, RowStore

log = logging.getLogger(__name__)

LOAD_S = 2.0
LOOK_S = 0.25
LOST_S = 1.0
"""A trainer that has had no connection for this many seconds, and has not left, is reported as lost."""
HOT = 16


@dataclass(frozen=True, slots=True)
class Setup:
    """Configuration of a pserver."""

    name: str
    job: str
    secret: str = field(repr=False)
    most_bytes: int = 0
    files: Files | None = None
    """The checkpoint directory, if any."""
    kernels: str | None = None
    tls: TlsFiles | None = None
    write_bytes_per_s: float = 0.0
    """Rate limit for writing checkpoints; 0: unlimited."""
    clock: Clock = field(default_factory=SystemClock)
    threads: Threads = SYSTEM_THREADS
    sockets: Sockets = SYSTEM_SOCKETS
    restore_threads: int = RESTORE_THREADS
    """Threads that put a checkpoint's rows into the store; 0: the one that reads them."""
    buckets: int = BUCKETS
    """Only buckets below this number are placed; simulations use few."""


class ParameterServer:
    """One pserver. Runs between ``start`` and ``stop``, following the Master's orders."""

    def __init__(
        self, setup: Setup, gone: Callable[[], None] = lambda: None, failed: Callable[[str], None] | None = None
    ) -> None:
        """``gone``: called when orders let it exit. ``failed``: called when a thread has failed; the process must exit.
        By default all connections are closed."""
        self._setup, self._gone, self._clock = setup, gone, setup.clock
        self._failed = failed or (lambda what: self.stop())
        threads = setup.threads
        self.store = RowStore(kernels=setup.kernels or at_once(), most_bytes=setup.most_bytes, threads=threads)
        self.bucket_machine = BucketMachine(setup.name, buckets=setup.buckets, most_bytes=setup.most_bytes)
        self.bucket_shell = BucketShell(self.bucket_machine, self.store, self, setup.clock, threads)
        self.checkpoint_task = CheckpointTask(
            self.store, setup.files, setup.job, self, setup.clock, setup.write_bytes_per_s, threads,
            setup.restore_threads,
        )  # fmt: skip
        self.eviction_task = EvictionTask(
            self.store, self.bucket_shell, self.checkpoint_task.evicted, self.failed, threads
        )
        self.handlers = RequestHandlers(setup.name, self.store, self.bucket_shell, self.eviction_task, threads)
        self._following = ReplicationIn(self.bucket_shell, self.store, threads)
        self.endpoint = FrameEndpoint(
            self._handle,
            secret=setup.secret,
            met=self._met,
            greeted=self._greeted,
            left=self._left,
            lost=self._lost,
            greeting={"name": setup.name},
            tls=lambda: self._tls()[1],
            threads=threads,
            sockets=setup.sockets,
        )
        self._master: EndpointPeer | None = None
        """The Master that messages are sent to; ``_newest`` once ``PserverHello`` has been sent on it."""
        self._newest: EndpointPeer | None = None
        self._token = 0
        self._received: tuple[EndpointPeer | None, messages.Orders | None] = None, None
        """The newest orders and their sender; deltas are based on them."""
        self._trainers = _Trainers(threads.lock())
        self._over = threads.event()
        self._heat = np.zeros(BUCKETS, np.uint32)
        self._loaded_s = 0.0

    def start(self, host: str, port: int = 0) -> None:
        """Listen and start all threads. Raises ``PortInUse``."""
        self.store.warm()
        self.bucket_shell.start()
        self.checkpoint_task.start()
        self.eviction_task.start()
        self.endpoint.start(host, port)
        self._setup.threads.start(self._run_periodic, name="edl-ps-looks")
        if self.store.kernels != (wanted := self._setup.kernels or chosen()):
            self._setup.threads.start(self._compile, wanted, name="edl-ps-compiles")

    def stop(self) -> None:
        """Close all connections and stop the threads."""
        self._over.set()
        self.endpoint.stop()
        self.bucket_shell.stop()
        self.eviction_task.stop()
        self.checkpoint_task.stop()

    def masterless(self, lease_s: float) -> bool:
        """Whether no Master has sent anything for the length of a lease; a connected one pings several times in it. A
        connection that has just ended still counts: the Master ends it when the pserver's key is gone."""
        master = self._newest
        return master is None or self._setup.threads.now_s() - master.heard_s >= lease_s

    def _compile(self, wanted: str) -> None:
        """Compile the kernels while the numpy kernels serve."""
        log.info("Parameter server %s: compiling kernels, slower until that is done. "
                 "'python -m ps warm' compiles them ahead of time", self._setup.name)  # fmt: skip
        start_s = self._clock.now_s()
        try:
            compile_elsewhere()
            kernels(wanted).warm()
            self.store.take_kernels(wanted)
        except (EdlError, OSError, MemoryError) as error:
            log.warning(
                "Parameter server %s: cannot compile kernels, continuing with slower ones: %s", self._setup.name, error
            )
            return
        log.info(
            "Parameter server %s: compiled kernels in use after %.1f s", self._setup.name, self._clock.now_s() - start_s
        )

    # --- connections -------------------------------------------------------------------------------------------------

    def _met(self, peer: EndpointPeer) -> tuple[str, str] | None:
        view = self.handlers.view
        if peer.role == MASTER and peer.hello.token < self._token:
            log.warning("Parameter server: refused a Master with token %d; a newer one has token %d",
                        peer.hello.token, self._token)  # fmt: skip
            return "fenced", f"there is a newer Master, with token {self._token}"
        if peer.role == TRAINER and view is not None and peer.number in view.revoked:
            return "stale", "this trainer is considered lost; restart the process"
        return None

    def _greeted(self, peer: EndpointPeer) -> None:
        if peer.role == MASTER:
            self._token = max(self._token, peer.hello.token)
            old, self._newest = self._newest, peer
            if old is not None:
                old.hang_up()
            log.info("Parameter server %s: connected to the Master on %s", self._setup.name, peer.name)
            self.bucket_shell.post(MasterLine())
        elif peer.role == TRAINER:
            self._trainers.came(peer.number)

    def _left(self, peer: EndpointPeer) -> None:
        if peer.role == SERVER:
            self._following.left(peer)

    def _lost(self, peer: EndpointPeer) -> None:
        if peer.role == TRAINER and peer.number:
            others = any(one.role == TRAINER and one.number == peer.number for one in self.endpoint.peers)
            if not others:
                self._trainers.went(peer.number, self._clock.now_s())

    def _handle(self, peer: EndpointPeer, frame: Frame) -> FrameReply:
        if frame.op in (FrameOp.PULL, FrameOp.PUSH, FrameOp.SCAN, FrameOp.INTENT):
            return self._answer(peer, frame)
        if frame.op is FrameOp.STREAM and peer.role == SERVER:
            return self._stream(peer, frame)
        if frame.op is FrameOp.CONTROL and peer.role == MASTER:
            self._on_message(peer, frame)
            return FrameReply()
        if frame.op is FrameOp.STATS:
            return FrameReply(FrameOp.OK, pack_head(self.statistics()))
        return FrameReply.no(
            FrameOp.REFUSED, kind="word", text=f"{frame.op.name} is not a request that a {peer.role} may send"
        )

    def _answer(self, peer: EndpointPeer, frame: Frame) -> FrameReply:
        try:
            return self.handlers.answer(peer, frame)
        except PartlyApplied as error:
            log.exception("Parameter server: %s of %s failed", frame.op.name, peer)
            self.failed(str(error))
            raise

    def _stream(self, peer: EndpointPeer, frame: Frame) -> FrameReply:
        try:
            return self._following.take(peer, frame)
        except (EdlError, MemoryError) as error:
            why = str(error) or "out of memory"
            log.warning("Parameter server %s: refusing the replication stream from %s: %s", self._setup.name, peer, why)
            return FrameReply.no(FrameOp.REFUSED, kind="error", text=why)
        except Exception:
            log.exception("Parameter server: the replication stream from %s failed", peer)
            self.failed(f"the replication stream from {peer} failed")
            raise

    def _on_message(self, peer: EndpointPeer, frame: Frame) -> None:
        message = messages.decode(str(frame.body, "utf-8"))
        if not isinstance(message, messages.Orders | messages.OrdersChanged):
            raise ProtocolError(f"{type(message).__name__} is not a message from a Master to a pserver")
        if peer.hello.token < self._token or 0 < message.token < self._token:
            log.warning("Parameter server: ignoring orders of a replaced Master (token %d, not %d)",
                        message.token or peer.hello.token, self._token)  # fmt: skip
            peer.hang_up()
            return
        if isinstance(message, messages.OrdersChanged):
            sender, before = self._received
            if sender is not peer or before is None or before.placement.version != message.base:
                peer.push(
                    FrameOp.CONTROL, b"", [messages.encode(messages.GetOrders(self.bucket_machine.version)).encode()]
                )
                return
            message = orders_after(before, message)
        self._received = peer, message
        self.bucket_shell.post(OrdersCame(message))

    # --- dependencies of the bucket shell and of checkpoints ----------------------------------------------------------

    def _tls(self) -> tuple[ssl.SSLContext, ssl.SSLContext] | tuple[None, None]:
        """Contexts for the calling and the serving side, of what the files contain now."""
        files = self._setup.tls
        if files is None:
            return None, None
        files.refresh()
        return files.newest

    def connect(self, follower: int) -> FrameCaller:
        """Connect to another pserver, as ``BucketShellDeps`` requires."""
        orders = self.bucket_machine.orders
        place = next((one for one in orders.placement.servers if one.number == follower), None) if orders else None
        if place is None:
            raise PsError(f"pserver {follower} is not in the placement map")
        hello = CallerHello(SERVER, self.bucket_machine.number, self._setup.name)
        return FrameCaller.connect(
            place, hello, secret=self._setup.secret, deadline_s=CONNECT_S, tls=self._tls()[0],
            threads=self._setup.threads, sockets=self._setup.sockets,
        )  # fmt: skip

    def say(self, message: Any) -> None:
        """Send a message to the Master; dropped without a connection."""
        master = self._master
        if master is not None:
            master.push(FrameOp.CONTROL, b"", [messages.encode(message).encode()])

    def prepare(self, orders: messages.Orders) -> None:
        """Prepare for new orders before they take effect: define tables."""
        for table in orders.tables:
            try:
                self.store.define(table)
            except EdlError as error:
                log.error("Parameter server %s: ignoring a table definition: %s", self._setup.name, error)

    def followed(self, orders: messages.Orders) -> None:
        """New orders have taken effect."""
        before = self.handlers.view
        self.handlers.view = View(orders, before)
        known = before.revoked if before is not None else frozenset()
        for trainer in orders.revoked:  # the oldest first
            if trainer in known:
                continue
            self.store.forget(trainer, max(REMEMBERED, len(orders.revoked)))
            self.handlers.counts.forget(trainer)
            self._trainers.confirmed(trainer)
        self.handlers.barrier.orders(orders.epoch, orders.members, orders.revoked, orders.training)
        self.eviction_task.holds(int((self.owned() != 0).sum()), self._copies())
        self.checkpoint_task.orders(orders)
        with self.bucket_shell.changed:
            self.bucket_shell.changed.notify_all()
        placement = orders.placement
        if before is None or before.epoch != orders.epoch or before.orders.placement.servers != placement.servers:
            log.info(
                "Parameter server %s is number %d: placement %d, history %d; pservers %d, trainers %d, buckets here %d",
                self._setup.name, orders.you, placement.version, placement.history, len(placement.servers),
                len(orders.members), int((self.owned() != 0).sum()),
            )  # fmt: skip
        if orders.go:
            log.info("Parameter server %s: no buckets left, exiting", self._setup.name)
            self._gone()

    def restore(self, checkpoint: messages.CheckpointOrder, buckets: tuple[int, ...]) -> None:
        """Load these buckets in another thread, then ``post(Restored(…))``."""
        orders = self.bucket_machine.orders
        if orders is not None:
            self.checkpoint_task.restore(orders, checkpoint, buckets)

    def restored(self, number: int, buckets: tuple[int, ...]) -> None:
        """Report that the buckets have been loaded."""
        self.bucket_shell.post(Restored(number, buckets))

    def reset(self, number: int, history: int) -> None:
        """This pserver starts again without rows: it has a new number, or a new history has begun."""
        log.info("Parameter server %s begins without rows as number %d in history %d",
                 self._setup.name, number, history)  # fmt: skip
        self.checkpoint_task.reset()
        self.handlers.barrier.reset(history)
        self.handlers.counts.begin_history(history)
        for peer in self.endpoint.peers:
            if peer.role == TRAINER:
                peer.farewell = True  # its disconnecting does not mean that the trainer is lost
        self._following.reset()
        self._trainers.forget()

    def failed(self, what: str) -> None:
        """The process is inconsistent and must exit, so that replicas take over."""
        log.error("Parameter server %s exits: %s. Replicas take over its buckets", self._setup.name, what)
        self._failed(what)

    def line_begins(self) -> None:
        """From now on messages go over the newest connection to the Master."""
        self._master = self._newest

    def line_made(self) -> None:
        """``PserverHello`` has been sent on the new connection."""
        self.checkpoint_task.again()
        for trainer in self._trainers.lost:
            self.say(messages.TrainerLost(trainer))

    def owned(self) -> NDArray[np.uint8]:
        """Mask by bucket: nonzero for those that the orders assign to this pserver."""
        owner = np.frombuffer(self.bucket_machine.owner, np.int16)
        mine: NDArray[np.uint8] = np.zeros(BUCKETS, np.uint8)
        mine[: len(owner)] = owner == (self.bucket_machine.number or -1)
        mine[len(owner) :] = mine[len(owner) - 1]  # if only some are placed, the others are with the last of these
        return mine

    def _copies(self) -> int:
        bucket_machine = self.bucket_machine
        return (
            (bucket_machine.backup.count(bucket_machine.number) + bucket_machine.joining.count(bucket_machine.number))
            if bucket_machine.number
            else 0
        )

    # --- periodic work -----------------------------------------------------------------------------------------------

    def _run_periodic(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                self.look(self._clock.now_s())
            except Exception:
                log.exception("Parameter server: periodic work failed")
                self.failed("periodic work failed")
                return

    def look(self, now_s: float) -> None:
        """Do the periodic work that is due."""
        for trainer in self._trainers.due(now_s):
            log.warning("Parameter server %s: lost the connection of trainer %d", self._setup.name, trainer)
            self.say(messages.TrainerLost(trainer))
        if now_s - self._loaded_s >= LOAD_S:
            self._loaded_s = now_s
            self.say(self.load())

    def load(self) -> messages.PserverLoad:
        """Load report, with the hottest buckets since the last call."""
        heat = self.store.heat.copy()
        risen = heat - self._heat
        self._heat = heat
        top = np.argsort(risen)[::-1][:HOT]
        with self.handlers.counts.lock:
            history, top_step = self.handlers.counts.history, self.handlers.counts.top_step
        counts, size, most = self.handlers.counts, self.store.bytes(), self._setup.most_bytes
        return messages.PserverLoad(
            rows=sum(table.rows for table in self.store.tables.values()),
            bytes=size,
            most_bytes=most,
            pulls=counts.pulls,
            pushes=counts.pushes,
            keys=counts.keys,
            top_step=top_step,
            lag_s=max((stream.lag_s for stream in self.bucket_shell.streams()), default=0.0),
            hot=tuple((int(bucket), int(risen[bucket])) for bucket in top if risen[bucket]),
            damaged=counts.damaged,
            text=f"memory is {100 * size // most} % full" if most and size > 0.9 * most else "",
            history=history,
        )

    def statistics(self) -> dict[str, Any]:
        """Load and replication of this pserver as plain values, for tools."""
        heat = self._heat
        load = self.load()
        self._heat = heat
        streams = [
            {"follower": one.follower, "queued_bytes": one.queued_bytes, "lag_s": one.lag_s, "up": one.up}
            for one in self.bucket_shell.streams()
        ]
        tables = {name: {"rows": table.rows} for name, table in self.store.tables.items()}
        plain = {name: getattr(load, name) for name in load.__dataclass_fields__}
        bucket_machine = self.bucket_machine
        return {
            "load": plain, "number": bucket_machine.number, "version": bucket_machine.version,
            "history": bucket_machine.history,
            "served": int(self.bucket_shell.served.sum()), "streams": streams, "tables": tables,
        }  # fmt: skip


class _Trainers:
    """Connected trainers, and those that disconnected without a farewell."""

    def __init__(self, lock: ThreadLock) -> None:
        self._lock = lock
        self._since: dict[int, float] = {}
        self.lost: set[int] = set()

    def came(self, trainer: int) -> None:
        """A trainer has connected (again)."""
        with self._lock:
            self._since.pop(trainer, None)
            self.lost.discard(trainer)

    def went(self, trainer: int, now_s: float) -> None:
        """A trainer's last connection broke."""
        with self._lock:
            self._since[trainer] = now_s

    def confirmed(self, trainer: int) -> None:
        """The Master has confirmed that it considers this trainer lost."""
        with self._lock:
            self._since.pop(trainer, None)
            self.lost.discard(trainer)

    def forget(self) -> None:
        """Forget all trainers, also those that are lost."""
        with self._lock:
            self._since.clear()
            self.lost.clear()

    def due(self, now_s: float) -> list[int]:
        """Lost trainers that must be reported now."""
        with self._lock:
            found = [trainer for trainer, since in self._since.items() if now_s - since >= LOST_S]
            for trainer in found:
                del self._since[trainer]
                self.lost.add(trainer)
        return found
