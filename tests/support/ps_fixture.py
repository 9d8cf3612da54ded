"""Pservers in this process, over real sockets, that a test can move buckets between, hold up and break; a Master that
says what the test wants."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edl.job_records import Training
from ps.client.client import PsClient
from ps.net.caller import EndpointLimits, EndpointPeer, FrameEndpoint, FrameReply
from ps.protocol import messages, requests
from ps.protocol.frames import Frame, FrameOp, pack_head
from ps.protocol.half_precision import WIRE_DTYPES, encode_half
from ps.protocol.requests import laid_out
from ps.rows import TrainerPush, encode
from ps.spec import BUCKETS, Initial, InitMethod, Optimizer, TableSpec, UpdateRule
from ps.store.store import RowStore

SECRET = "the secret"
WAIT_S = 60.0
"""After that a test that waits has failed."""
SGD = Optimizer(UpdateRule.SGD, lr=1.0)
PLAIN = TableSpec("plain", 4, SGD, Initial(InitMethod.ZEROS))
"""A push of ones takes 1 away from each weight."""
WIDE = TableSpec("wide", 9, SGD, Initial(InitMethod.UNIFORM, 0.5, 7))

Fault = Callable[[Frame, dict[str, Any]], FrameReply | None]


class Pserver:
    """A pserver with programmable behavior, without copies or gates. ``faults`` see each request first."""

    def __init__(self, number: int, tables: Sequence[TableSpec]) -> None:
        self.number = number
        self.store = RowStore(kernels="numpy")
        for spec in tables:
            self.store.define(spec)
        self.tables = {spec.name: spec for spec in tables}
        self.allowed = np.zeros(BUCKETS, np.uint8)
        self.version = 1
        self.placement_update = ""
        self.applied = 0
        self.clock = 0
        """Told in answers, unless it is 0."""
        self.faults: list[Fault] = []
        """The first that gives an answer is used."""
        self.after: list[Callable[[Frame, dict[str, Any]], None]] = []
        """Called when a request has been carried out, before it is answered."""
        self.heads: list[tuple[FrameOp, dict[str, Any]]] = []
        self.farewells: list[int] = []
        self.ended = threading.Semaphore(0)
        """Counts connections that have ended."""
        self._lock = threading.Lock()
        self.endpoint = FrameEndpoint(
            self._handle, secret=SECRET, left=self._left, limits=EndpointLimits(greeting_s=WAIT_S)
        )
        self.endpoint.start("127.0.0.1")

    @property
    def server(self) -> messages.PserverAddress:
        """Its entry in a placement map; reached over TCP."""
        return messages.PserverAddress(self.number, f"ps-{self.number}", "127.0.0.1", self.endpoint.port)

    def seen(self, op: FrameOp) -> list[dict[str, Any]]:
        """Heads of requests of this kind."""
        return [head for kind, head in list(self.heads) if kind is op]

    def stop(self) -> None:
        """Stop serving, like a process that died."""
        self.endpoint.stop()

    def _left(self, peer: EndpointPeer) -> None:
        if peer.farewell:
            self.farewells.append(peer.number)
        self.ended.release()

    def _handle(self, peer: EndpointPeer, frame: Frame) -> FrameReply:
        head = frame.json()
        self.heads.append((frame.op, head))
        for fault in list(self.faults):
            reply = fault(frame, head)
            if reply is not None:
                return reply
        answer = {FrameOp.PULL: self._pull, FrameOp.PUSH: self._push, FrameOp.SCAN: self._scan}[frame.op]
        with self._lock:
            reply = answer(head, frame)
        for look in list(self.after):
            look(frame, head)
        return reply

    def _moved(self) -> FrameReply:
        placement_update = {"placement": self.placement_update} if self.placement_update else {}
        return FrameReply.no(FrameOp.MOVED, placement_version=self.version, text="moved", **placement_update)

    def _pull(self, head: dict[str, Any], frame: Frame) -> FrameReply:
        found = []
        for one in requests.read_pull(head, frame.body, self.tables):
            out = np.empty((len(one.keys), self.tables[one.table].dim), np.float32)
            if self.store.pull(
                one.table, one.keys, out, step=head["step"], insert=head["insert"], allowed=self.allowed,
                counts=one.counts,
            ):  # fmt: skip
                return self._moved()
            found.append(encode_half(out, one.dtype).astype(WIRE_DTYPES[one.dtype], copy=False))
        return FrameReply(FrameOp.OK, self._told(head), laid_out(found))

    def _push(self, head: dict[str, Any], frame: Frame) -> FrameReply:
        parts = requests.read_push(head, frame.body, self.tables)
        pushed = self.store.push(
            [TrainerPush(head["trainer"], head["seq"], parts)],
            step=head["step"],
            scale=head["scale"],
            allowed=self.allowed,
        )
        if pushed.refused:
            return self._moved()
        self.applied += bool(pushed.fresh)
        told, back, found = (
            self._told(head, fresh=pushed.fresh, again=pushed.skipped, damaged=pushed.damaged),
            dict(head.get("back", [])),
            [],
        )
        for one in parts:
            if one.table in back:
                out = np.empty(one.grads.shape, np.float32)
                self.store.pull(one.table, one.keys, out, step=head["step"], insert=False)
                found.append(encode_half(out, back[one.table]).astype(WIRE_DTYPES[back[one.table]], copy=False))
        return FrameReply(FrameOp.OK, told, laid_out(found))

    def _scan(self, head: dict[str, Any], frame: Frame) -> FrameReply:
        if not self.allowed[head["bucket"]]:
            return self._moved()
        rows = self.store.image(head["bucket"]).rows.get(head["table"])
        return FrameReply(FrameOp.OK, self._told(head), [] if rows is None else encode(rows))

    def _told(self, head: dict[str, Any], **more: Any) -> bytes:
        if self.placement_update and head["version"] < self.version:
            more["placement"] = self.placement_update
        if self.clock:
            more["clock"] = self.clock
        return pack_head({"applied": self.applied, "epoch": 1, "version": self.version, **more})


@dataclass
class Bench:
    """Some pservers with evenly dealt buckets."""

    tables: Sequence[TableSpec] = (PLAIN, WIDE)
    pservers: dict[int, Pserver] = field(default_factory=dict)
    owner: NDArray[np.int16] = field(default_factory=lambda: np.zeros(BUCKETS, np.int16))
    version: int = 1
    clients: list[PsClient] = field(default_factory=list)

    def start(self, count: int) -> Bench:
        """Start this many pservers."""
        for number in range(1, count + 1):
            self.add(number)
        self.deal((np.arange(BUCKETS) * count // BUCKETS + 1).astype(np.int16))
        return self

    def add(self, number: int) -> Pserver:
        """One that has no buckets yet."""
        self.pservers[number] = Pserver(number, self.tables)
        return self.pservers[number]

    def deal(self, owner: NDArray[np.int16]) -> None:
        """Set the initial owners of all buckets."""
        self.owner = owner.copy()
        for number, one in self.pservers.items():
            one.allowed[:] = owner == number

    def move(self, buckets: slice | NDArray[np.intp], to: int, *, tell: bool = True) -> None:
        """Move buckets with their rows. ``tell``: pservers attach the new placement map to MOVED."""
        chosen = np.arange(BUCKETS)[buckets]
        for bucket in chosen.tolist():
            old, new = self.pservers.get(int(self.owner[bucket])), self.pservers[to]
            if old is not None:
                with old.store.lock(bucket):
                    old.allowed[bucket] = 0
                    image = old.store.image(bucket)
                new.store.take_image(image)
            new.allowed[bucket] = 1
            self.owner[bucket] = to
        self.version += 1
        for one in self.pservers.values():
            one.version = self.version
            one.placement_update = messages.encode(self.placement_update()) if tell else ""

    def placement(self, *, without: Sequence[int] = (), history: int = 1) -> messages.PlacementMap:
        """The current placement map."""
        servers = tuple(one.server for number, one in self.pservers.items() if number not in without)
        return messages.PlacementMap(self.version, history, servers, messages.pack(self.owner.tolist()))

    def placement_update(self, **options: Any) -> messages.PlacementUpdate:
        """The current placement map as a message."""
        return messages.PlacementUpdate(0, self.placement(**options), 1, ())

    def client(self, **options: Any) -> PsClient:
        """A client without a Master."""
        options = {"deadline_s": WAIT_S, **options}
        client = PsClient.direct((), tables=self.tables, secret=SECRET, placement=self.placement(), **options)
        self.clients.append(client)
        return client

    def joined(self, master: Master, **options: Any) -> PsClient:
        """A client that joined through a Master."""
        options = {"deadline_s": WAIT_S, **options}
        client = PsClient.join(master, lambda: 1, tables=self.tables, **options)
        self.clients.append(client)
        return client

    def stop(self) -> None:
        """Stop all clients and pservers."""
        for client in self.clients:
            client.close()
        for one in self.pservers.values():
            one.stop()


class Master:
    """The other end of a trainer's link. Answers ``Join``, ``Begin`` and ``Leave``; all else waits in ``said``."""

    def __init__(self, bench: Bench, training: Training | None = None) -> None:
        self.bench, self.training = bench, training or Training()
        self.said: queue.Queue[Any] = queue.Queue()
        self.rounds: list[int] = []
        self.joins: list[messages.Join] = []
        self.deaf = False
        """Nothing is answered, as if there were no Master."""
        self.tables = tuple(bench.tables)
        self.number = 5
        self.step = 0
        self.restored = ""
        self.members: tuple[messages.TrainerMember, ...] = ()
        self._heard: Callable[[str | None], None] = lambda text: None

    def call(self, service: str, body: str, number: int) -> None:
        """Send a request to the Master, as ``Link`` does."""
        assert service == "ps"
        self.rounds.append(number)
        word = messages.decode(body)
        if self.deaf or not self._answered(word):
            self.said.put(word)

    def listen(self, service: str, heard: Callable[[str | None], None]) -> None:
        """Register a listener for messages of the Master, as ``Link`` does."""
        self._heard = heard

    def expect(self, kind: type[Any]) -> Any:
        """The next message of this kind; others are skipped."""
        while True:
            word = self.said.get(timeout=WAIT_S)
            if isinstance(word, kind):
                return word

    def tell(self, word: Any) -> None:
        """Send a message to the trainer."""
        self._heard(messages.encode(word))

    def lose(self) -> None:
        """Break the connection: earlier messages of the trainer may be lost."""
        self._heard(None)

    def joined(self) -> messages.Joined:
        """The answer to ``Join``."""
        return messages.Joined(
            self.number, 0, self.bench.placement(), 1, self.members, self.training, self.tables, self.step,
            self.restored, SECRET,
        )  # fmt: skip

    def placement_update(self, **options: Any) -> messages.PlacementUpdate:
        """The current placement map and members."""
        return replace(self.bench.placement_update(**options), members=self.members)

    def _answered(self, word: Any) -> bool:
        match word:
            case messages.Join():
                self.joins.append(word)
                known = {one.name for one in self.tables}
                self.tables += tuple(one for one in word.tables if one.name not in known)
                self.tell(self.joined())
            case messages.Begin(number):
                self.members = (messages.TrainerMember(number, "a/0", self.step),)
                self.tell(self.placement_update())
            case messages.LeaveMembership():
                self.members = ()
                self.tell(self.placement_update())
            case _:
                return False
        return True
