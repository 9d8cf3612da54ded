"""Shared by both simulations of leases: the Master's shell with its store, and a lossy network."""

from __future__ import annotations

import random
from collections.abc import Callable

from data_service.leases.lease_table import BACK, DONE, LEASED, QUARANTINED, LeaseTable
from data_service.leases.machine import LeaseMachine
from data_service.leases.shard_order import FRESH
from data_service.manifest import Manifest, ManifestBuilder
from edl.master.service import AddToHistory, Caller, Event, Keep, ReportFlaw, Said, TellWorker, Tick, WakeAt, WorldBegan
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.messages import Member, World

MOST_KEPT_BYTES = 1_000_000


class Violation(AssertionError):
    """An invariant is violated."""


def made_up(rng: random.Random, format: str) -> Manifest:
    """A few files of a few shards of a few records; also empty ones."""
    builder = ManifestBuilder(format)
    for file in range(rng.randint(1, 3)):
        builder.file(f"file-{file}", 100)
        begin = 0
        for _ in range(rng.randint(1, 5)):
            records = rng.choice((0, 1, 2, 3, 5, 8))
            builder.shard(begin, begin + records, records if format == "ipc" else -1)
            begin += records
    return builder.build()


def grown(rng: random.Random, format: str, number: int) -> Manifest:
    """A manifest of one or two files that are not listed yet."""
    builder = ManifestBuilder(format)
    for file in range(rng.randint(1, 2)):
        builder.file(f"more-{number}-{file}", 100)
        begin = 0
        for _ in range(rng.randint(0, 2)):
            records = rng.choice((0, 1, 3, 5))
            builder.shard(begin, begin + records, records if format == "ipc" else -1)
            begin += records
    return builder.build()


def world_of(number: int, slots: list[int]) -> World:
    """Nodes with so many slots each."""
    members, first = [], 0
    for node, count in enumerate(slots):
        members.append(Member(NodeId(f"n{node}"), Incarnation(1), "host", count, Rank(first), (1,)))
        first += count
    return World(Round(number), tuple(members), 0)


def table_violations(table: LeaseTable) -> list[str]:
    """Contradictions within a lease table."""
    states = [table.state(shard) for shard in range(table.ledger.shards)]
    held = {shard for hand in table.leases.values() for shard in hand}
    found = []
    if held != set(table.holders) or held != {shard for shard, state in enumerate(states) if state == LEASED}:
        found.append(f"in hand {sorted(held)}, holders {sorted(table.holders)}, states {states}")
    if any(shard not in table.leases[holder] for shard, holder in table.holders.items()):
        found.append("a shard is in another hand than its holder's")
    if {shard for shard, state in enumerate(states) if state == BACK} != set(table.back):
        found.append(f"back {sorted(table.back)}, states {states}")
    if table.pending != sum(state in (FRESH, BACK) for state in states):
        found.append(f"{table.pending} pending, states {states}")
    if {shard for shard, state in enumerate(states) if state == DONE} != {
        shard for shard in range(len(states)) if table.ledger.is_done(shard)
    }:
        found.append("done ones are not those of the ledger")
    if table.quarantined != sum(state == QUARANTINED for state in states):
        found.append("quarantined ones are miscounted")
    return found


class Shell:
    """A Master's shell: steps the machine, writes what it wants kept, then sends. It can die in between."""

    def __init__(self, rng: random.Random, deliver: Callable[[Caller, str], None]) -> None:
        self.rng = rng
        self.now_s = 1000.0
        self.store: dict[str, bytes] = {}
        self.notes: list[str] = []
        self.flaws: dict[str, str] = {}
        self.wake_s: float | None = None
        self._deliver = deliver
        self.machine = LeaseMachine()
        self.lives = 0
        self.start()

    def start(self, world: World | None = None) -> None:
        """Start a new Master."""
        self.machine = LeaseMachine()
        self.lives += 1
        self.wake_s = None
        self._do(self.machine.load(dict(self.store), self.now_s))
        if world is not None:
            self.feed(WorldBegan(world, taken_over=True))

    def feed(self, event: Event, dies: str = "") -> None:
        """One event. ``dies``: "before" it is written, or "between" writing and sending."""
        effects = self.machine.step(event, self.now_s)
        for data in self.machine.sets.values():
            if data.table is not None:
                for violation in table_violations(data.table):
                    raise Violation(f"{data.name}: {violation}")
            if data.opened != sum(client.opened for client in data.clients.values()):
                raise Violation(f"{data.name}: {data.opened} opened")
        if dies == "before":
            return
        self._do(effects, tell=dies != "between")

    def pass_time(self, by_s: float) -> None:
        """Time passes, ticks come when they were asked for."""
        end_s = self.now_s + by_s
        ticks = 0
        while self.wake_s is not None and self.wake_s <= end_s:
            self.now_s = max(self.now_s, self.wake_s)
            self.wake_s = None
            self.feed(Tick())
            ticks += 1
            if ticks > 100:
                raise Violation("it wants to be woken again and again")
        self.now_s = end_s

    def say(self, caller: Caller, number: int, body: str, dies: str = "") -> None:
        """Deliver a worker's message."""
        self.feed(Said(caller, Round(number), body), dies)

    def _do(self, effects: tuple[object, ...], tell: bool = True) -> None:
        for effect in effects:
            match effect:
                case Keep(name, value):
                    if len(value) > MOST_KEPT_BYTES:
                        raise Violation(f"{name}: {len(value)} bytes at once")
                    if value:
                        self.store[name] = value
                    else:
                        self.store.pop(name, None)
                case AddToHistory(text):
                    self.notes.append(text)
                case ReportFlaw(name, text):
                    self.flaws[name] = text
                case WakeAt(at_s):
                    self.wake_s = at_s if self.wake_s is None else min(self.wake_s, at_s)
        for effect in effects:
            if isinstance(effect, TellWorker) and tell:
                self._deliver(effect.caller, effect.body)
