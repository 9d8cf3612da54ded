"""Records of pushes under faults: real leases, real intents and real rows over a simulated network.

A trainer reads, writes its intent down, pushes to all pservers, acknowledges. Trainers, pservers and the Master die at
any moment, trainers fall silent until others have their shards, messages to a pserver stay under way for as long as it
is stalled and arrive after their sender is dead. Every record adds 1 to a row of its own and to one that records share.
``python -c "from tests.sim.records_world import RecordSim; RecordSim(17).play()"`` plays one history again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_service.loader import replay
from data_service.loader.deps import PROCESS
from data_service.loader.lease_client import LeaseClient, PendingRequest
from data_service.loader.replay import Batch, LostTrainer, RecordRange
from data_service.loader.trainers import trainers
from data_service.manifest import ManifestBuilder
from data_service.protocol import messages
from data_service.protocol.messages import DataSetOptions, Given, Opened
from edl.master.service import Caller, WorldBegan
from edl.types import NodeId
from ps.hashing import buckets_of
from ps.intents import IntentFenced, home
from ps.protocol.replication import pack, unpack
from ps.rows import ShardChange as Rows
from ps.rows import TablePush, TrainerPush
from ps.spec import BUCKETS, Initial, InitMethod, Optimizer, TableSpec, UpdateRule
from ps.store.store import RowStore
from tests.sim.lease_net import Shell, Violation, world_of

NAME = "clicks"
SHARED = 5
TABLE = TableSpec("t", 1, Optimizer(UpdateRule.SGD, lr=1.0), Initial(InitMethod.ZEROS))


def sent(content: Any) -> Any:
    """The content after a round trip through the stream encoding."""
    heads, arrays = pack([(1, content)])
    body = b"".join(bytes(memoryview(one).cast("B")) for one in arrays)
    return next(iter(unpack(heads, memoryview(body))))[1]


class Pserver:
    """Owns some buckets, with a copy that every acknowledgement waits for."""

    def __init__(self, sim: RecordSim, buckets: range) -> None:
        self.sim, self.buckets = sim, buckets
        self.store, self.copy = self._empty(), self._empty()
        self.inbox: list[Callable[[], None]] = []
        self.stalled = 0

    def _empty(self) -> RowStore:
        store = RowStore(kernels="numpy")
        store.define(TABLE)
        return store

    def push(self, push: TrainerPush) -> None:
        self.store.push([push], step=1, each=lambda piece: self.copy.apply_piece(sent(piece)))

    def intent(self, of: int, action: Callable[[], Any]) -> Any:
        found = action()
        bucket = home(of)
        piece = Rows(bucket // 64, (), np.array([bucket], np.uint16), intents={of: found})
        self.copy.apply_piece(sent(piece))
        return found

    def die(self) -> None:
        """The copy takes over; a new one is made of it."""
        self.store, self.copy = self.copy, self._empty()
        for bucket in sorted(self.sim.used() & set(self.buckets)):
            self.copy.take_image(sent(self.store.image(bucket)))
        if self.sim.rng.random() < 0.7:
            self.inbox.clear()


class Line:
    """The connection of a trainer to the Master."""

    def __init__(self, sim: RecordSim, trainer: Trainer) -> None:
        self.sim, self.trainer = sim, trainer
        self.heard: Any = None

    def say(self, text: str, number: int) -> None:
        self.sim.flight.append((self.trainer, text))

    def listen(self, dataset: str, heard: Any) -> None:
        self.heard = heard

    def listens(self, dataset: str, heard: Any) -> bool:
        return True

    def forget(self, dataset: str, heard: Any) -> None:
        self.heard = None


@dataclass
class Work:
    """One push: its batches, and under which number it was made before."""

    batches: list[Batch]
    redo: LostTrainer | None = None


@dataclass(eq=False)
class Trainer:
    """One process: what it does next is a generator."""

    sim: RecordSim
    caller: Caller
    number: int
    alive: bool = True
    silent: int = 0
    seq: int = 0
    said: dict[int, tuple[int, str]] = field(default_factory=dict)
    leases: list[Given] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = LeaseClient(Line(self.sim, self), NAME, 1, 0, lambda: "", lambda: (1, self.caller.slot))
        self.life = self.live()

    def wait(self, asked: PendingRequest) -> Any:
        while not asked.done.is_set():
            yield
        return asked.answer

    def ask_server(self, server: Pserver, action: Callable[[], Any]) -> Any:
        """A request that is repeated when it is lost, until it is answered."""
        box: list[Any] = []

        def arrive() -> None:
            box.append(action())

        while not box:
            if arrive not in server.inbox:
                server.inbox.append(arrive)
            yield
        return box[0]

    def live(self) -> Any:
        sim, client = self.sim, self.client
        trainers.number = self.number
        if self.caller.slot == 0:
            yield from self.wait(client.register(sim.manifest.encode(), sim.options))
        trainers.number = self.number
        opened = yield from self.wait(client.open(0, ""))
        assert isinstance(opened, Opened), opened
        epoch = opened.epoch
        while epoch < sim.epochs:
            granted = yield from self.wait(client.lease(epoch, sim.rng.randint(1, 3)))
            yield from self.take_over(epoch, granted)
            while self.works or self.leases:
                work = self.works.pop(0) if self.works else self.cut()
                done = yield from self.push(epoch, work)
                if not done:
                    self.sim.end(self)
                    return
            if granted.state == "finished":
                asked = client.next_epoch(epoch + 1, 0, True)
                assert asked is not None
                answer = yield from self.wait(asked)
                epoch = max(epoch, getattr(answer, "epoch", epoch))
            yield

    def take_over(self, epoch: int, granted: Any) -> Any:
        ended = []
        for number in granted.ended if granted.leases else ():
            if number not in self.said:
                server = self.sim.server_of(home(number))
                found = yield from self.ask_server(server, self.sim.fencing(server, number))
                self.said[number] = found
            one = replay.decode(self.said[number][1], NAME, epoch, number, self.said[number][0])
            ended += [one] if one else []
        plan = replay.plan(granted.leases, ended)
        if plan.acks:
            self.client.ack(epoch, tuple(plan.acks))
        self.works += [Work(list(one.batches), one) for one in plan.redos]
        self.leases += plan.leases

    def cut(self) -> Work:
        """Some batches, each of a few records, often of two shards."""
        batches = []
        for _ in range(self.sim.rng.choice((1, 1, 2, 3))):
            pieces, left = [], self.sim.rng.randint(1, 4)
            while left and self.leases:
                given = self.leases[0]
                size = given.shard.end - given.shard.begin
                upto = min(size, given.upto + left)
                left -= upto - given.upto
                pieces.append(RecordRange(given.shard, given.upto, upto, upto == size))
                if upto == size:
                    self.leases.pop(0)
                else:
                    self.leases[0] = Given(given.shard, upto)
            batches += [tuple(pieces)] if pieces else []
        return Work(batches)

    def push(self, epoch: int, work: Work) -> Any:
        sim = self.sim
        self.seq += 1
        name = (self.number, self.seq)
        if work.redo is not None:
            name = (work.redo.trainer, work.redo.seq)
        else:
            text = replay.encode(NAME, epoch, self.client.unkept(), work.batches)
            server = sim.server_of(home(self.number))
            good = yield from self.ask_server(server, sim.declaring(server, self.number, self.seq, text))
            if not good:
                return False
        keys = np.array([key for batch in work.batches for piece in batch for key in sim.keys(piece)], np.int64)
        owners = np.array([sim.place_of(bucket) for bucket in buckets_of(keys)])
        waiting = [
            self.ask_server(server, sim.pushing(server, name, keys[owners == place]))
            for place, server in enumerate(sim.servers)
            if (owners == place).any()
        ]
        while waiting:
            for one in list(waiting):
                try:
                    next(one)
                except StopIteration:
                    waiting.remove(one)
            yield
        for shards in self.acks(work):  # one by one: it may die after any of them
            self.client.ack(epoch, (shards,))
            if self.sim.rng.random() < 0.5:
                yield
        return True

    def acks(self, work: Work) -> tuple[tuple[int, int, bool], ...]:
        if work.redo is not None:
            _, upto, complete = work.redo.span(work.redo.home) or (0, 0, False)
            return ((work.redo.home, upto, complete),)
        return tuple((piece.ref.index, piece.upto, piece.complete) for batch in work.batches for piece in batch)


class RecordSim:
    """A random history of trainers that replay pushes."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        PROCESS.numbers._last = rng.randrange(1, 1 << 40)
        builder = ManifestBuilder("ipc")
        builder.file("file", 100)
        begin = 0
        for _ in range(rng.randint(3, 8)):
            records = rng.randint(1, 9)
            builder.shard(begin, begin + records, records)
            begin += records
        self.records = begin
        self.manifest = builder.build()
        self.options = DataSetOptions(rng.randrange(100), True, messages.INDEPENDENT)
        self.epochs = rng.randint(1, 2)
        self.faults = rng.choice((0.002, 0.01, 0.03))
        self.servers = [Pserver(self, range(0, BUCKETS // 2)), Pserver(self, range(BUCKETS // 2, BUCKETS))]
        self.flight: list[tuple[Trainer, str]] = []
        self.answers: list[tuple[Caller, str]] = []
        self.shell = Shell(rng, lambda caller, body: self.answers.append((caller, body)))
        self.world = world_of(1, [rng.randint(2, 3)])
        self.shell.feed(WorldBegan(self.world))
        self.numbers = 0
        self.kills = 0
        self.people: dict[Caller, Trainer] = {}
        for slot in range(self.world.members[0].slots):
            self.begin(Caller(NodeId("n0"), slot))

    def begin(self, caller: Caller) -> None:
        self.numbers += 1
        self.people[caller] = Trainer(self, caller, self.numbers)

    def end(self, trainer: Trainer) -> None:
        """The trainer dies, and another one takes its place."""
        trainer.alive = False
        if self.people.get(trainer.caller) is trainer:
            if self.rng.random() < 0.5:
                self.flight = [one for one in self.flight if one[0] is not trainer]
            self.answers = [one for one in self.answers if one[0] != trainer.caller]
            self.begin(trainer.caller)

    def used(self) -> set[int]:
        """Buckets in which there can be anything."""
        keys = np.array([*range(-SHARED, self.records)])
        return {int(one) for one in buckets_of(keys)} | {home(one) for one in range(1, self.numbers + 1)}

    # --- pservers ----------------------------------------------------------------------------------------------------

    def place_of(self, bucket: int) -> int:
        return next(place for place, one in enumerate(self.servers) if int(bucket) in one.buckets)

    def server_of(self, bucket: int) -> Pserver:
        return self.servers[self.place_of(bucket)]

    def fencing(self, server: Pserver, number: int) -> Callable[[], tuple[int, str]]:
        def action() -> tuple[int, str]:
            found = server.intent(number, lambda: server.store.intents.fence(number))
            return found.seq, found.text

        return action

    def declaring(self, server: Pserver, number: int, seq: int, text: str) -> Callable[[], bool]:
        def action() -> bool:
            try:
                server.intent(number, lambda: server.store.intents.declare(number, seq, text))
            except IntentFenced:
                return False
            return True

        return action

    def pushing(self, server: Pserver, name: tuple[int, int], keys: Any) -> Callable[[], bool]:
        def action() -> bool:
            server.push(TrainerPush(*name, [TablePush("t", keys, np.ones((len(keys), 1), np.float32))]))
            return True

        return action

    def keys(self, piece: RecordRange) -> list[int]:
        """Two of each record: its own, and one that it shares."""
        first = piece.ref.begin
        own = range(first + piece.begin, first + piece.upto)
        return [*own, *(-1 - record % SHARED for record in own)]

    # --- a history ---------------------------------------------------------------------------------------------------

    def play(self) -> RecordSim:
        """Faults for a while, then none until all epochs are over."""
        for _ in range(3000):
            if self.over():
                break
            if self.rng.random() < self.faults:
                self.fault()
            self.act()
        self.faults = 0.0
        for _ in range(60_000):
            if self.over() and not any(server.inbox for server in self.servers):
                break
            self.act()
        else:
            raise Violation(f"no end: {self.shell.machine.report()}")
        self.check()
        return self

    def over(self) -> bool:
        data = self.shell.machine.sets.get(NAME)
        return data is not None and data.table is not None and data.table.epoch >= self.epochs

    def act(self) -> None:
        kind = self.rng.random()
        if kind < 0.3 and self.flight:
            self.deliver(self.flight.pop(0))
        elif kind < 0.5 and self.answers:
            caller, body = self.answers.pop(0)
            trainer = self.people[caller]
            if trainer.client._transport.heard is not None:  # type: ignore[attr-defined]
                trainer.client._transport.heard(messages.decode(body))  # type: ignore[attr-defined]
        elif kind < 0.55:
            self.shell.pass_time(self.rng.choice((0.01, 0.1, 1.0, 3.0)))
        elif kind < 0.75:
            server = self.rng.choice(self.servers)
            server.stalled -= 1
            if server.inbox and server.stalled <= 0:
                server.inbox.pop(self.rng.randrange(len(server.inbox)))()
        else:
            trainer = self.rng.choice(list(self.people.values()))
            trainer.silent -= 1
            if trainer.silent <= 0:
                next(trainer.life, None)

    def deliver(self, said: tuple[Trainer, str], dies: str = "") -> None:
        trainer, text = said
        self.shell.say(trainer.caller, 1, text, dies)

    def fault(self) -> None:
        kind = self.rng.choice(["trainer", "trainer", "trainer", "stall", "stall", "pserver", "master", "silent"])
        trainer = self.rng.choice(list(self.people.values()))
        server = self.rng.choice(self.servers)
        self.kills += kind in ("trainer", "pserver", "master")
        if kind == "trainer":
            self.end(trainer)
        elif kind == "stall":
            server.stalled = self.rng.choice((20, 100, 400))
        elif kind == "pserver":
            server.die()
        elif kind == "silent":
            trainer.silent = self.rng.choice((20, 200))
            self.shell.pass_time(self.rng.choice((1.0, 40.0)))
        else:
            if self.flight and self.rng.random() < 0.7:
                self.deliver(self.flight.pop(0), self.rng.choice(("before", "between")))
            self.flight, self.answers = [], []
            self.shell.start(self.world)
            for one in self.people.values():
                if one.client._transport.heard is not None:  # type: ignore[attr-defined]
                    one.client._transport.heard(None)  # type: ignore[attr-defined]

    def check(self) -> None:
        """Every record is in its row exactly once an epoch."""
        own, shared = np.arange(self.records), -1 - np.arange(SHARED)
        expected = np.bincount(own % SHARED, minlength=SHARED) * self.epochs
        for keys, wanted in ((own, np.full(self.records, self.epochs)), (shared, expected)):
            out = np.empty((len(keys), 1), np.float32)
            for server in self.servers:
                mine = np.isin(buckets_of(keys), np.array(server.buckets))
                if mine.any():
                    some = np.empty((int(mine.sum()), 1), np.float32)
                    server.store.pull("t", keys[mine], some, step=1, insert=False)
                    out[mine] = some
            if (-out[:, 0] != wanted).any():
                bad = {
                    int(key): float(-row[0])
                    for key, row, want in zip(keys, out, wanted, strict=True)
                    if -row[0] != want
                }
                raise Violation(f"records that are not there exactly {self.epochs} times: {bad}")
