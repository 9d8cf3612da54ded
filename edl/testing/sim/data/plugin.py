"""Data as a part of a simulated job: the lease machine in each Master, workers that read, faults, and the account.

What must hold: in step, the commits that a job's end rests on contain each record of an epoch once. Alone, each record
of an epoch is used and acknowledged, and no two workers get the same record confirmed.
A record may only be missing where its shard has been skipped, and then the job ends as incomplete.
"""

from __future__ import annotations

import enum
import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from data_service.leases.machine import LeaseMachine
from data_service.leases.state import DataSet as Leased
from data_service.loader.batching import order_of
from data_service.protocol import add_request
from data_service.protocol.file_list_messages import NEXT_EPOCH, NOW
from data_service.protocol.messages import Ack, Done, Lease, LeasesGranted, Open, Opened, ReadRate, decode, encode
from edl.arithmetic.permutation import Permutation
from edl.errors import FencedOut
from edl.exit_codes import ExitCode
from edl.master.service import Effect, Event, Keep, Service, Tick
from edl.ports import Delete
from edl.testing.sim.checks import Checks
from edl.testing.sim.data.dataset import NAME, SimDataSet
from edl.testing.sim.data.jobs import Readers, ReadingAlone, ReadingSteps
from edl.testing.sim.data.readers import DataReader, Fed
from edl.testing.sim.data.tables import table_violations
from edl.testing.sim.plugins import Plugin
from edl.testing.sim.stepping import Script
from edl.testing.sim.workers import Job
from edl.testing.sim.world import SimWorld
from edl.types import Rank
from edl.wire.messages import NO_STATE, Asked, Purpose, Version, World

STOPPED_S = 60.0
"""Longer than a worker may be silent about its shards."""
MOST_TICKS = 100
MOST_KEPT_BYTES = 1_000_000
Record = tuple[int, int]
"""Epoch and number."""


class DataFaultKind(enum.Enum):
    """What may happen to data, beside the faults of the schedule."""

    GROW = "grow"
    """Somebody adds a file (``edl data add``)."""
    SLOW = "slow"
    """Reading takes long for a while."""
    NONSENSE = "nonsense"
    """A worker of another version says what nobody understands."""
    LOSE = "lose"
    """A worker's words are not passed on for a while: its agent loses them, and then says so."""
    STOP = "stop"
    """A worker is stopped (SIGSTOP) until the faults are over: it is silent, and others get its shards."""
    DEPOSE = "depose"
    """The Master's key disappears from the store: another term begins, and the world goes on."""
    DEPOSE_ON_KEEP = "depose-on-keep"
    """The same, at the moment when the lease machine has decided something that is not stored yet."""


@dataclass(frozen=True, slots=True)
class DataFault:
    """One of them."""

    at_s: float
    kind: DataFaultKind
    pick: float = 0.0


class ObservedLeases(LeaseMachine):
    """The lease machine of one Master, looked at after each event."""

    def __init__(self, plugin: DataPlugin) -> None:
        super().__init__()
        self._plugin = plugin

    def step(self, event: Event, now_s: float) -> tuple[Effect, ...]:
        """See ``LeaseMachine.step``."""
        effects = super().step(event, now_s)
        self._plugin.woken(event, effects)
        for data in self.sets.values():
            if data.table is not None:
                for violation in table_violations(data.table):
                    self._plugin.fail(f"{data.name}: {violation}")
            if data.opened != sum(client.opened for client in data.clients.values()):
                self._plugin.fail(f"{data.name}: {data.opened} opened")
        self._plugin.stepped_machine(self)
        return effects


@dataclass
class Acknowledged:
    """What one worker process has acknowledged, as its client understands the Master's promises."""

    asked: dict[int, Ack | Open] = field(default_factory=dict)
    """By number of the request."""
    waiting: list[tuple[int, int, tuple[tuple[int, int, bool], ...]]] = field(default_factory=list)
    """Epoch, the Master's number (0: not known yet), shards: not known to be in the store."""


class DataPlugin(Plugin):
    """Data of one schedule."""

    def __init__(self, seed: int, *, alone: bool, stops: bool = False) -> None:
        """``stops``: one of the workers that need no others is stopped for long."""
        self.rng = rng = random.Random(f"data {seed}")  # noqa: S311 - not for secrets
        self.alone = alone
        self.data = SimDataSet.draw(rng, alone=alone)
        self.grows = rng.random() < 0.4 and self.data.tail != "drop"
        self.faults = tuple(_drawn(rng) for _ in range(rng.choice((0, 2, 5, 10))))
        if stops:
            self.faults += (DataFault(rng.uniform(2.0, 6.0), DataFaultKind.STOP, rng.random()),)
        self.machine: LeaseMachine | None = None
        """Of the latest Master."""
        self.states: dict[Version, Fed] = {}
        self.steps: dict[Version, dict[Rank, Fed]] = {}
        self.eras: dict[int, World] = {}
        self.used_by: dict[Record, list[DataReader]] = {}
        """Alone: who has used it."""
        self.settled_for: dict[Record, DataReader] = {}
        """Independent workers: the one whose use of the record is confirmed as stored."""
        self.lists: dict[int, int] = {}
        """Number of shards in an epoch that has ended, or is under way."""
        self.left_out: set[int] = set()
        self._ticks: list[float] = []
        self._depose_on_keep = False
        self._acks: dict[int, Acknowledged] = {}
        self._counted: set[Record] = set()

    def fail(self, text: str) -> None:
        """Report a violation."""
        self._checks.fail(f"data: {text}")

    # --- Plugin ------------------------------------------------------------------------------------------------------

    def job(self, world: SimWorld, total_s: float, script: Script | None) -> Job | None:
        """Workers that read."""
        self._world, self._checks = world, world.checks
        parts = world.timeline, world.rng, world.checks, world.directory, total_s
        readers = self._readers = Readers(self.data, self, world.timeline, world.rng)
        if self.alone:
            alone = ReadingAlone(*parts, lambda: world.checks.record.world if world.checks.record else None)
            alone.readers, alone.step_s = readers, self.rng.choice((0.05, 0.3))
            return alone
        steps = ReadingSteps(*parts, script or Script())
        steps.readers = readers
        return steps

    _world: SimWorld
    _checks: Checks
    _readers: Readers

    def start(self, world: SimWorld) -> None:
        """Plan the faults."""
        for fault in self.faults:
            world.timeline.at(fault.at_s, self._strike, fault)

    def services(self) -> Sequence[Service]:
        """The lease machine of a new Master."""
        self.machine = ObservedLeases(self)
        return (self.machine,)

    def heal(self) -> None:
        """Reading is fast again, and no word is lost."""
        self.data.slow_until_s = 0.0
        self._depose_on_keep = False

    def close(self) -> None:
        """End all threads."""
        self._readers.close()

    # --- faults ------------------------------------------------------------------------------------------------------

    def _strike(self, fault: DataFault) -> None:
        alive = [one for one in self._readers.by_worker.values() if one.worker.alive and not one.worker.frozen]
        match fault.kind:
            case DataFaultKind.GROW if self.grows and not self._world.ended():
                self._add(NOW if fault.pick < 0.7 else NEXT_EPOCH)
            case DataFaultKind.SLOW:
                self.data.slow_until_s = self._world.timeline.now_s + 20.0 * fault.pick
                self.data.slow_s = self.rng.choice((0.5, 5.0, 40.0)) if self.alone else 1.0
            case DataFaultKind.NONSENSE if alive:
                reader = alive[int(fault.pick * len(alive))]
                bodies = ["", "{}", "[1]", '{"word":"lease","id":"x"}', encode(ReadRate(0, NAME, 5.0))]
                bodies.append(encode(Lease(1 << 50, NAME, 0, 5)))
                body = self.rng.choice(bodies)
                reader.transport.say(body, reader.worker.round - (body == bodies[-1]))
            case DataFaultKind.LOSE if alive:
                reader = alive[int(fault.pick * len(alive))]
                reader.transport.lose_until_s = self._world.timeline.now_s + 0.5
                self._world.timeline.after(0.6, self._readers.service_message, reader.worker, "", None)

            case DataFaultKind.STOP if alive:
                self._world.checks.worker_failures += 1
                self._world.freeze(alive[int(fault.pick * len(alive))].worker, STOPPED_S)
            case DataFaultKind.DEPOSE if self._world.master is not None:
                self._depose()
            case DataFaultKind.DEPOSE_ON_KEEP:
                self._depose_on_keep = True

    def _depose(self) -> None:
        key = self._world.deps.keys.master
        self._world.store.do(lambda memory: memory.write_now([Delete(key)]))

    def woken(self, event: Event, effects: Sequence[Effect]) -> None:
        """A Master's machine has had an event: it must not tick in vain, nor store too much at once."""
        now_s = self._world.timeline.now_s
        if isinstance(event, Tick):
            self._ticks = [at_s for at_s in self._ticks if at_s > now_s - 1.0] + [now_s]
            if len(self._ticks) > MOST_TICKS:
                self.fail(f"the lease machine wants to be woken more than {MOST_TICKS} times in a second")
        kept = [one for one in effects if isinstance(one, Keep)]
        for one in kept:
            if len(one.value) > MOST_KEPT_BYTES:
                self.fail(f"{one.name}: {len(one.value)} bytes are stored at once")
        if kept and self._depose_on_keep:
            self._depose_on_keep = False
            self._world.timeline.after(0.0, self._depose)

    def _add(self, when: str) -> None:
        master = self._world.master
        shell = master.master_shell if master is not None else None
        if master is None or shell is None or not shell.serving:
            return
        body = add_request.encode(add_request.AddRequest(NAME, (self.data.grow(self.rng),), when))

        async def order() -> None:
            try:
                await shell.order(Asked(Purpose.DATA, "somebody", body))
            except FencedOut:
                return

        master.loop.create_task(order())

    # --- account -----------------------------------------------------------------------------------------------------

    def state(self, version: Version) -> Mapping[str, Any]:
        """The position in a commit."""
        found = self.states.get(version)
        if found is None:
            self.fail(f"workers restore {version}, whose position nobody has committed")
        assert found is not None  # noqa: S101 - as above
        return found.state

    def stepped(self, world: World, commit: int, fed: Mapping[Rank, Fed]) -> None:
        """All workers of a world have taken a step."""
        version = Version(world.era, commit)
        self.eras[world.era] = world
        positions = {one.position for one in fed.values()}
        if len(positions) > 1:
            self.fail(f"workers have different positions at {version}: {sorted(positions)}")
        self.steps[version] = dict(fed)
        self.states[version] = fed[self.rng.choice(sorted(fed))]

    def opened(self, reader: DataReader) -> None:
        """A worker process begins to read."""
        if self.alone:
            self._acks[id(reader)] = Acknowledged()
            reader.transport.said = lambda text: self._said(reader, text)
            reader.transport.heard = lambda text: self._heard(reader, text)

    def used(self, reader: DataReader, epoch: int, records: tuple[int, ...]) -> None:
        """A worker that is alone has used records."""
        for number in records:
            self.used_by.setdefault((epoch, number), []).append(reader)

    def _said(self, reader: DataReader, text: str) -> None:
        if not text.startswith("{") or '"id":"x"' in text:
            return
        message, acks = decode(text) if len(text) > 2 else None, self._acks[id(reader)]
        if isinstance(message, Ack):
            acks.asked[message.id] = message
            acks.waiting.append((message.epoch, 0, message.shards))
        elif isinstance(message, Open):
            acks.asked[message.id] = message

    def _heard(self, reader: DataReader, text: str) -> None:
        message, acks = decode(text), self._acks[id(reader)]
        if not isinstance(message, Opened | Done | LeasesGranted):
            return
        asked = acks.asked.pop(message.id, None)
        gone = {shard for shard, _ in message.refused}
        left = []
        for epoch, number, shards in acks.waiting:
            answered = isinstance(asked, Open) or (isinstance(asked, Ack) and asked.shards == shards)
            kept = tuple(one for one in shards if one[0] not in gone) if answered else shards
            left.append((epoch, message.number if answered and not number else number, kept))
        acks.waiting = []
        for epoch, number, shards in left:
            if number and number <= message.kept:
                self._settled(reader, epoch, shards)
            elif shards:
                acks.waiting.append((epoch, number, shards))

    def _settled(self, reader: DataReader, epoch: int, shards: tuple[tuple[int, int, bool], ...]) -> None:
        """The worker need not remember these: they are counted and stored, and were not refused."""
        for shard, upto, _ in shards:
            for record in self._first(epoch, shard, upto):
                mine = reader in self.used_by.get(record, ())
                other = self.settled_for.get(record)
                if mine and other is not None and other is not reader:
                    self.fail(f"{other.worker} and {reader.worker} both got {record} confirmed")
                if mine:
                    self.settled_for[record] = reader

    def _leased(self) -> Leased | None:
        return self.machine.sets.get(NAME) if self.machine is not None else None

    def _first(self, epoch: int, shard: int, upto: int) -> list[Record]:
        """The records that ``upto`` of a shard stand for."""
        leased = self._leased()
        if leased is None or leased.files is None or shard >= len(leased.known):
            return []
        records = self.data.records(leased.known.ref(shard))
        upto = min(upto, len(records))
        if not self.data.shuffle or not upto:
            return [(epoch, one) for one in records[:upto]]
        rows = Permutation(len(records), order_of(self.data.seed, epoch, shard)).array(0, upto)
        return [(epoch, records[int(row)]) for row in rows]

    def stepped_machine(self, machine: LeaseMachine) -> None:
        """A Master's machine has had an event."""
        data = machine.sets.get(NAME)
        if data is None or data.table is None or machine is not self.machine:
            return
        self.lists[data.table.epoch] = data.listed.at(data.table.epoch).shards
        self.left_out = set(data.quarantine)
        if not self.alone:
            return
        ledger = data.table.ledger
        for shard in range(ledger.shards):
            size = len(self.data.records(data.known.ref(shard)))
            for record in self._first(ledger.epoch, shard, size if ledger.is_done(shard) else ledger.count(shard)):
                if record not in self._counted:
                    self._counted.add(record)
                    if record not in self.used_by:
                        self.fail(f"{record} is counted, and no worker has used it")

    # --- the end -----------------------------------------------------------------------------------------------------

    @property
    def excused(self) -> bool:  # type: ignore[override]
        """Shards have been skipped."""
        return bool(self.left_out)

    def finish(self) -> None:
        """Every record of each epoch, once."""
        record = self._checks.record
        assert record is not None and record.outcome is not None  # noqa: S101 - ended
        whole = record.outcome.exit_code in (ExitCode.OK, ExitCode.INCOMPLETE)
        if whole and self.left_out and record.outcome.exit_code == ExitCode.OK:
            self.fail(f"shards {sorted(self.left_out)} were skipped, and the job ends well")
        leased = self._leased()
        if leased is None or leased.files is None or not whole:
            return
        wrongly = [shard for shard in self.left_out if not self.data.is_poison(leased.known.ref(shard))]
        if wrongly:
            self.fail(f"shards {wrongly} were skipped and can be read")
        counted = Counter(self.used_by.keys()) if self.alone else self._committed()
        for epoch in range(self.data.epochs):
            self._judge_epoch(epoch, counted, leased)

    def _judge_epoch(self, epoch: int, counted: Counter[Record], leased: Leased) -> None:
        shards = leased.listed.at(epoch).shards
        due = {one: shard for shard in range(shards) for one in self.data.records(leased.known.ref(shard))}
        for (at, one), times in counted.items():
            if at == epoch and one not in due:
                self.fail(f"epoch {epoch}: record {one} of a file that joins later")
            if at == epoch and times > 1:
                self.fail(f"epoch {epoch}: record {one} counts {times} times")
        missing = [one for one, shard in due.items() if not counted[epoch, one] and shard not in self.left_out]
        if missing and self.data.tail != "drop":
            self.fail(f"epoch {epoch}: records {missing} are lost")

    def _committed(self) -> Counter[Record]:
        """What the last commit rests on."""
        counted: Counter[Record] = Counter()
        version = max(self.steps, default=NO_STATE)
        while version != NO_STATE:
            for one in self.steps[version].values():
                counted.update((one.epoch, number) for number in one.records)
            restore = self.eras[version.era].restore
            version = Version(version.era, version.commit - 1) if version.commit - 1 > restore.commit else restore
        return counted


def _drawn(rng: random.Random) -> DataFault:
    kinds = [kind for kind in DataFaultKind if kind is not DataFaultKind.STOP]
    return DataFault(rng.uniform(1.0, 30.0), rng.choice(kinds), rng.random())
