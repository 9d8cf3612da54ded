"""Pservers for tests, with a simulated Master: messages over a real connection, and conditions instead of sleeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edl.errors import EdlError
from edl.job_records import Training
from edl.threads import ThreadCondition
from ps.errors import TimedOut
from ps.hashing import bucket_of
from ps.net.caller import FrameCaller, ServerAddress
from ps.protocol import messages, requests
from ps.protocol.frames import Frame, FrameOp, pack_head
from ps.protocol.half_precision import WIRE_DTYPES
from ps.protocol.handshake import MASTER, TRAINER, CallerHello
from ps.rows import TablePush
from ps.server.server import ParameterServer, Setup
from ps.spec import BUCKETS, Initial, InitMethod, Optimizer, TableSpec, UpdateRule

SECRET = "0123456789abcdef"
WAIT_S = 60.0
COUNTS = TableSpec("counts", 2, Optimizer(UpdateRule.ADD), Initial(InitMethod.ZEROS))
SGD = TableSpec("sgd", 4, Optimizer(UpdateRule.SGD, lr=1.0), Initial(InitMethod.ZEROS))
ALL = range(BUCKETS)
OPEN: list[FrameCaller | ParameterServer] = []
"""Whatever has to be closed after a test; see ``tidy``."""


def tidy() -> None:
    """Close everything that a test has opened."""
    while OPEN:
        one = OPEN.pop()
        if isinstance(one, FrameCaller):
            one.close()
        else:
            one.stop()


def until(condition: ThreadCondition, true: Callable[[], Any], what: str = "it") -> Any:
    """Wait for it under a condition that is notified; fails after ``WAIT_S``."""
    deadline_s = time.monotonic() + WAIT_S
    with condition:
        while not (found := true()) and (left_s := deadline_s - time.monotonic()) > 0:
            condition.wait(left_s)
    assert found, f"waited {WAIT_S:g} s for {what}"
    return found


class Boss:
    """The Master's line to one pserver."""

    def __init__(self, place: ServerAddress, token: int = 1) -> None:
        self.caller = FrameCaller.connect(
            place, CallerHello(MASTER, name="boss", token=token), secret=SECRET, deadline_s=WAIT_S
        )
        OPEN.append(self.caller)
        self.caller.heard = self._heard
        self.words: list[Any] = []
        self.changed = threading.Condition()
        self.over = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _heard(self, frame: Frame) -> None:
        with self.changed:
            self.words.append(messages.decode(str(frame.body, "utf-8")))
            self.changed.notify_all()

    def _listen(self) -> None:
        while True:
            try:
                self.caller.receive(deadline_s=1.0)
                continue
            except TimedOut:
                if not self.caller.broken:
                    continue
            except EdlError:
                pass
            break
        with self.changed:
            self.over = True
            self.changed.notify_all()

    def say(self, orders: messages.Orders) -> None:
        """Orders, and wait until they are followed."""
        self.tell(orders)
        version = orders.placement.version
        self.heard(messages.Followed, lambda word: word.version >= version)

    def tell(self, orders: messages.Orders) -> None:
        """Send orders."""
        self.caller.send(FrameOp.CONTROL, b"", [messages.encode(orders).encode()], deadline_s=WAIT_S)

    def synced(self, version: int, buckets: int = BUCKETS) -> None:
        """Wait until the pserver reported this many copies, under orders of this version or later."""

        def all_of_them() -> bool:
            told = [word for word in self.words if isinstance(word, messages.Synced) and word.version >= version]
            return len({bucket for word in told for bucket in messages.of_ranges(word.buckets)}) >= buckets

        until(self.changed, all_of_them, "Synced")

    def heard(self, kind: type[Any], fits: Callable[[Any], bool] = lambda word: True) -> Any:
        """Wait for the first such message."""

        def found() -> Any:
            return next((word for word in self.words if isinstance(word, kind) and fits(word)), None)

        return until(self.changed, found, kind.__name__)


@dataclass
class Plan:
    """A hand-made placement map."""

    places: Mapping[int, ServerAddress]
    owner: dict[int, Sequence[int]]
    """Buckets, by owner."""
    backup: dict[int, Sequence[int]] = field(default_factory=dict)
    joining: dict[int, Sequence[int]] = field(default_factory=dict)
    giver: dict[int, Sequence[int]] = field(default_factory=dict)
    version: int = 1
    history: int = 1
    changed: Sequence[int] = ALL
    members: tuple[int, ...] = ()
    revoked: tuple[int, ...] = ()
    training: Training = field(default_factory=Training)
    tables: tuple[TableSpec, ...] = (COUNTS, SGD)
    lr: tuple[messages.LrHold, ...] = ()
    checkpoint: messages.CheckpointOrder | None = None
    since: list[int] = field(default_factory=lambda: [1] * BUCKETS)
    go: tuple[int, ...] = ()

    def next(self, **changes: Any) -> Plan:
        """The next version. ``changed``: buckets whose roles change."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain.update({"version": self.version + 1, "changed": (), "since": list(self.since), **changes})
        plan = Plan(**plain)
        for bucket in plan.changed:
            plan.since[bucket] = plan.version
        return plan

    def orders(self, number: int) -> messages.Orders:
        """Orders for one of the pservers."""

        def packed(roles: dict[int, Sequence[int]]) -> str:
            found = [0] * BUCKETS
            for server, buckets in roles.items():
                for bucket in buckets:
                    found[bucket] = server
            return messages.pack(found)

        servers = tuple(
            messages.PserverAddress(one, place.name, place.host, place.port, place.path, place.machine)
            for one, place in self.places.items()
        )
        placement = messages.PlacementMap(
            self.version, self.history, servers, packed(self.owner), packed(self.backup), packed(self.joining)
        )
        return messages.Orders(
            token=0, you=number, placement=placement, epoch=self.version,
            members=tuple(messages.TrainerMember(one, f"node-{one}/0") for one in self.members),
            training=self.training, tables=self.tables, lr=self.lr, checkpoint=self.checkpoint, revoked=self.revoked,
            go=number in self.go, since=messages.pack(self.since, "i"), giver=packed(self.giver),
        )  # fmt: skip


@dataclass
class Answer:
    """The answer of a pserver."""

    op: FrameOp
    head: dict[str, Any]


class Trainer:
    """One that speaks to one pserver."""

    def __init__(self, place: ServerAddress, number: int = 1, secret: str = SECRET) -> None:
        self.number = number
        self.caller = FrameCaller.connect(
            place, CallerHello(TRAINER, number, f"t{number}"), secret=secret, deadline_s=WAIT_S
        )
        OPEN.append(self.caller)

    def ask(self, op: FrameOp, head: dict[str, Any], parts: Sequence[Any] = (), wait_s: float = WAIT_S) -> Frame:
        """Send a raw request. ``wait_s``: the server may answer WAIT after this time."""
        return self.caller.request(op, pack_head(head), parts, deadline_s=WAIT_S, wait_s=wait_s)

    def pull(
        self, table: TableSpec, keys: Sequence[int], dtype: str = "f4", insert: bool = True, **head: Any
    ) -> NDArray[Any]:
        """Pull rows, in the order of the answer."""
        frame = self.pulled(table, keys, dtype, insert, **head)
        assert frame.op is FrameOp.OK, (frame.op, frame.json())
        wire = WIRE_DTYPES[dtype]
        return np.frombuffer(frame.body, wire, len(keys) * table.dim).reshape(len(keys), table.dim).copy()  # type: ignore[no-any-return]

    def pulled(
        self, table: TableSpec, keys: Sequence[int], dtype: str = "f4", insert: bool = True, **head: Any
    ) -> Frame:
        """Pull rows and return the answer."""
        heads, body = requests.pull([requests.Wanted(table.name, np.array(keys, np.int64), dtype, table.dim)])
        return self.ask(FrameOp.PULL, {"step": 0, "insert": insert, "parts": heads, **head}, body)

    def push(
        self, seq: int, table: TableSpec | None = None, keys: Sequence[int] = (), value: float = 1.0,
        op: str = "grad", dtype: str = "f4", wait_s: float = WAIT_S, **head: Any,
    ) -> Answer:  # fmt: skip
        """Push one value for all of the keys' numbers."""
        parts = []
        if table is not None:
            rows = np.full((len(keys), table.dim), value, np.float32)
            parts = [TablePush(table.name, np.array(keys, np.int64), rows, op)]
        heads, body = requests.push(parts, dtype)
        whole = {"trainer": self.number, "seq": seq, "step": seq, "parts": heads, **head}
        frame = self.ask(FrameOp.PUSH, whole, body, wait_s)
        return Answer(frame.op, frame.json())


def server(name: str = "a", **setup: Any) -> ParameterServer:
    """One that listens, in this process."""
    one = ParameterServer(Setup(name, "job", SECRET, kernels="numpy", **setup))
    one.start("127.0.0.1")
    OPEN.append(one)
    return one


@dataclass(frozen=True)
class At:
    """Name and address of a pserver."""

    name: str
    host: str
    port: int
    path: str = ""
    machine: str = ""


def place(one: ParameterServer, name: str = "a") -> At:
    """Its address at its unix socket."""
    endpoint = one.endpoint
    return At(name, endpoint.host, endpoint.port, endpoint.path, endpoint.machine)


def keys_in(buckets: Sequence[int], count: int, first: int = 0) -> list[int]:
    """So many keys that fall into these buckets."""
    wanted, key = frozenset(buckets), first
    found: list[int] = []
    while len(found) < count:
        if bucket_of(key) in wanted:
            found.append(key)
        key += 1
    return found


class Pusher:
    """A trainer that finds every bucket: asks all pservers that it may have to, until all of a push is acknowledged."""

    def __init__(self, number: int, plan: Plan) -> None:
        self.number = number
        self.plan = plan
        self.seq = 0
        self.acknowledged = 0
        self.moved = 0
        self._lines: dict[int, Trainer] = {}

    def push(self, table: TableSpec, keys: Sequence[int]) -> None:
        """Push 1 to each key."""
        self.seq += 1
        left = list(keys)
        retry = threading.Event()
        while left:
            plan, by_owner = self.plan, {}  # type: ignore[var-annotated]
            owners = {bucket: number for number, buckets in plan.owner.items() for bucket in buckets}
            for key in left:
                by_owner.setdefault(owners[bucket_of(key)], []).append(key)
            left = []
            for number, some in by_owner.items():
                if not self._pushed(number, plan, table, some):
                    left += some
            if left:
                retry.wait(0.01)
        self.acknowledged += 1

    def _pushed(self, number: int, plan: Plan, table: TableSpec, keys: list[int]) -> bool:
        try:
            if number not in self._lines:
                self._lines[number] = Trainer(plan.places[number], self.number)
            answer = self._lines[number].push(self.seq, table, keys, wait_s=2.0)
        except (EdlError, KeyError):
            self._lines.pop(number, None)
            return False
        if answer.op is FrameOp.MOVED:
            self.moved += 1
        assert answer.op in (FrameOp.OK, FrameOp.MOVED, FrameOp.WAIT, FrameOp.BUSY), answer
        return answer.op is FrameOp.OK
