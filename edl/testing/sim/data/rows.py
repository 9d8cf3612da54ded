"""Simulated parameter servers for independent workers: real rows and intents behind a simulated network.

For each epoch, every record adds 1 to its own row and to a shared one. Requests are delayed, their answers may be lost,
and a request may arrive after its sender has died. Every change is replicated before it is answered; the replica takes
over when a server dies.
"""

from __future__ import annotations

import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from data_service.loader.trainers import TrainerDataSets
from edl.testing.sim.threads import SimThreads
from edl.testing.sim.timeline import Timeline
from ps.hashing import buckets_of
from ps.intents import IntentFenced, home
from ps.protocol.replication import pack, unpack
from ps.rows import ShardChange, TablePush, TrainerPush
from ps.spec import BUCKETS, Initial, InitMethod, Optimizer, TableSpec, UpdateRule
from ps.store.store import RowStore

SHARED = 5
EPOCH = 1_000_000
"""Key offset between epochs; greater than any record number."""
TABLE = TableSpec("t", 1, Optimizer(UpdateRule.SGD, lr=1.0), Initial(InitMethod.ZEROS))
ASK_AGAIN_S = 1.0
REQUEST_S = 0.005
LOST_ANSWERS = 0.02
LOST_REQUESTS = 0.7
"""Share of the requests under way that are lost when their parameter server dies."""
ALIVE_S = 5.0


def _sent(content: Any) -> Any:
    """The content after encoding and decoding."""
    heads, arrays = pack([(1, content)])
    body = b"".join(bytes(memoryview(one).cast("B")) for one in arrays)
    return next(iter(unpack(heads, memoryview(body))))[1]


def _empty() -> RowStore:
    store = RowStore(kernels="numpy")
    store.define(TABLE)
    return store


class SimPserver:
    """A parameter server that owns some buckets, and its replica."""

    def __init__(self, buckets: range, timeline: Timeline, rng: random.Random) -> None:
        self.buckets = buckets
        self.stalled_until_s = 0.0
        self._timeline, self._rng = timeline, rng
        self._store, self._copy = _empty(), _empty()
        self._used: set[int] = set()
        self._under_way: dict[int, Callable[[], None]] = {}
        self._sent = 0

    def send(self, arrive: Callable[[], None]) -> None:
        """Deliver a request after a delay."""
        self._sent += 1
        self._under_way[self._sent] = arrive
        self._timeline.after(self._rng.uniform(0.0, REQUEST_S), self._arrive, self._sent)

    def _arrive(self, number: int) -> None:
        left_s = self.stalled_until_s - self._timeline.now_s
        if left_s > 0:
            self._timeline.after(left_s + self._rng.uniform(0.0, REQUEST_S), self._arrive, number)
        elif number in self._under_way:
            self._under_way.pop(number)()

    def flush(self) -> None:
        """Deliver all requests that are under way."""
        while self._under_way:
            self._under_way.pop(next(iter(self._under_way)))()

    def die(self) -> None:
        """Let the replica take over and create a new one. Most requests under way are lost."""
        self._store, self._copy = self._copy, _empty()
        for bucket in sorted(self._used):
            self._copy.take_image(_sent(self._store.image(bucket)))
        self._under_way = {n: one for n, one in self._under_way.items() if self._rng.random() > LOST_REQUESTS}

    def push(self, push: TrainerPush) -> None:
        """Apply this server's part of a push."""
        for part in push.parts:
            self._used |= {int(one) for one in buckets_of(part.keys)}
        self._store.push([push], step=1, each=lambda piece: self._copy.apply_piece(_sent(piece)))

    def declare(self, trainer: int, seq: int, text: str) -> bool:
        """Record the intent of a push; returns false if the trainer is fenced."""
        try:
            self._intent(trainer, lambda: self._store.intents.declare(trainer, seq, text))
        except IntentFenced:
            return False
        return True

    def fence(self, trainer: int) -> tuple[int, str]:
        """Refuse new pushes of a trainer from now on; returns its last intent."""
        found = self._intent(trainer, lambda: self._store.intents.fence(trainer))
        return found.seq, found.text

    def _intent(self, trainer: int, action: Callable[[], Any]) -> Any:
        found, bucket = action(), home(trainer)
        self._used.add(bucket)
        piece = ShardChange(bucket // 64, (), np.array([bucket], np.uint16), intents={trainer: found})
        self._copy.apply_piece(_sent(piece))
        return found

    def counts(self, keys: Any) -> Any:
        """How often each of these rows was added to."""
        out = np.empty((len(keys), 1), np.float32)
        self._store.pull("t", keys, out, step=1, insert=False)
        return -out[:, 0]


class SimRows:
    """The parameter servers of a job."""

    def __init__(self, timeline: Timeline, rng: random.Random) -> None:
        self.timeline, self.rng = timeline, rng
        halves = range(BUCKETS // 2), range(BUCKETS // 2, BUCKETS)
        self.servers = [SimPserver(buckets, timeline, rng) for buckets in halves]
        self._trainers = 0

    def join(self) -> int:
        """Register a trainer; returns its number."""
        self._trainers += 1
        return self._trainers

    def home(self, trainer: int) -> SimPserver:
        """The parameter server that has the intents of a trainer."""
        return next(one for one in self.servers if home(trainer) in one.buckets)

    def split(self, keys: Any) -> list[tuple[SimPserver, Any]]:
        """The keys by parameter server."""
        owned = [(server, keys[np.isin(buckets_of(keys), np.array(server.buckets))]) for server in self.servers]
        return [(server, mine) for server, mine in owned if len(mine)]

    def miscounted(self, due: Counter[tuple[int, int]]) -> str:
        """Shared rows whose count differs from that of the records in ``due``; empty if there is none."""
        shared = -1 - np.arange(SHARED)
        expected = Counter[int]()
        for (_, record), times in due.items():
            expected[-1 - record % SHARED] += times
        found = {
            int(key): int(n)
            for server, keys in self.split(shared)
            for key, n in zip(keys, server.counts(keys), strict=True)
        }
        bad = {key: (n, expected[key]) for key, n in found.items() if n != expected[key]}
        return f"shared rows with their counts, and those of their records: {bad}" if bad else ""

    def counted(self, records: Iterable[tuple[int, int]]) -> Counter[tuple[int, int]]:
        """How often each record of an epoch is in its row."""
        keys = np.array([epoch * EPOCH + record for epoch, record in records], np.int64)
        found = Counter[tuple[int, int]]()
        for server, mine in self.split(keys):
            for key, times in zip(mine, server.counts(mine), strict=True):
                found[int(key) // EPOCH, int(key) % EPOCH] = int(times)
        return found


class Fenced(Exception):
    """Other trainers have taken over this trainer's records: its process must restart."""


class RowTrainer:
    """The part of ``ps.step`` that concerns data, for one process."""

    def __init__(self, rows: SimRows, threads: SimThreads, registry: TrainerDataSets) -> None:
        self._rows, self._threads, self._registry = rows, threads, registry
        self._number, self._seq = rows.join(), 0
        self._collected: list[tuple[int, int]] = []
        registry.held = True
        registry.joined(self._number, self.step, self._fence)

    def collect(self, epoch: int, records: Iterable[int]) -> None:
        """Add records to the next push."""
        self._collected += [(epoch, one) for one in records]

    def step(self) -> None:
        """Push the collected records. Raises ``Fenced``."""
        if self._registry.redoing() or not self._collected:
            return
        text, redo = self._registry.records()
        self._seq += 1
        if redo is None and text:
            home_server = self._rows.home(self._number)
            if not self._ask(home_server, lambda: home_server.declare(self._number, self._seq, text)):
                raise Fenced
        keys = [epoch * EPOCH + one for epoch, one in self._collected] + [
            -1 - one % SHARED for _, one in self._collected
        ]
        name = redo or (self._number, self._seq)
        for server, mine in self._rows.split(np.array(keys, np.int64)):
            push = TrainerPush(*name, [TablePush("t", mine, np.ones((len(mine), 1), np.float32))])
            self._ask(server, partial(server.push, push))
        self._collected = []
        self._registry.pushed()

    def _fence(self, trainer: int) -> tuple[int, str]:
        server = self._rows.home(trainer)
        found: tuple[int, str] = self._ask(server, lambda: server.fence(trainer))
        return found

    def _ask(self, server: SimPserver, action: Callable[[], Any]) -> Any:
        """Repeat a request until it is answered."""
        answers: list[Any] = []
        done, rng, timeline = self._threads.event(), self._rows.rng, self._rows.timeline
        alive_s = timeline.now_s + ALIVE_S

        def answer(found: Any) -> None:
            answers.append(found)
            done.set()

        def arrive() -> None:
            found = action()
            if rng.random() > LOST_ANSWERS:
                timeline.after(rng.uniform(0.0, REQUEST_S), answer, found)

        while True:
            server.send(arrive)
            if done.wait(ASK_AGAIN_S):
                return answers[0]
            if timeline.now_s >= alive_s:
                alive_s = timeline.now_s + ALIVE_S
                for data in self._registry.all():
                    data.say_alive()
