"""Data as a plugin of a simulated job: the lease machine in each Master, workers that read, faults and accounting.

Invariants: in step, the commits that lead to a job's end contain each record of an epoch once. With independent
workers, each record of an epoch is used and acknowledged, and no record is confirmed to two workers. With parameter
servers, the rows contain each record of an epoch once. A record may be missing only if its shard was skipped, and then
the job ends as incomplete.
"""

from __future__ import annotations

import enum
import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_service.leases.machine import LeaseMachine
from data_service.leases.state import DataSet as Leased
from data_service.loader.trainers import Beginning
from data_service.protocol import add_request
from data_service.protocol.file_list_messages import NEXT_EPOCH, NOW
from data_service.protocol.messages import Lease, LeasesGranted, ReadRate, decode, encode
from edl.errors import FencedOut
from edl.exit_codes import ExitCode
from edl.master.service import Effect, Event, Keep, Service, Tick
from edl.ports import Delete
from edl.testing.sim.checks import Checks
from edl.testing.sim.data.dataset import NAME, SimDataSet
from edl.testing.sim.data.independent_account import IndependentAccount, Record
from edl.testing.sim.data.jobs import Readers, ReadingIndependently, ReadingSteps
from edl.testing.sim.data.readers import DataReader, Fed
from edl.testing.sim.data.rows import SimRows
from edl.testing.sim.data.tables import table_violations
from edl.testing.sim.plugins import Plugin
from edl.testing.sim.stepping import Script
from edl.testing.sim.workers import Job
from edl.testing.sim.world import SimWorld
from edl.types import Rank
from edl.wire.messages import Asked
from edl.wire.purpose import Purpose
from edl.wire.records import NO_STATE, Version, World

STOPPED_S = 60.0
"""Seconds; longer than a worker may leave its shards without a message."""
MOST_TICKS = 100
MOST_KEPT_BYTES = 1_000_000


class DataFaultKind(enum.Enum):
    """Faults of data sets, in addition to those of the schedule."""

    GROW = "grow"
    """Add a file, as ``edl data add`` does."""
    SLOW = "slow"
    """Reads are slow for a while."""
    NONSENSE = "nonsense"
    """A worker sends a message that is invalid or unknown."""
    LOSE = "lose"
    """Messages between a worker and the Master are lost for a while; then the agent reports it."""
    STOP = "stop"
    """A worker is stopped by SIGSTOP until the faults are over: others get its shards."""
    DEPOSE = "depose"
    """The Master's key is deleted from the store: another term begins, and the world continues."""
    DEPOSE_ON_KEEP = "depose-on-keep"
    """The Master's key is deleted when the lease machine has made a decision that is not stored yet."""
    END = "end"
    """A worker process that pushes to parameter servers is killed, often during a push."""
    STALL = "stall"
    """A parameter server hangs for a while: requests may arrive after their senders have died."""
    LOSE_ROWS = "lose-rows"
    """A parameter server dies, and its replica takes over."""
    NAME = "name"
    """An independent worker names its present position, as for a checkpoint."""
    ROLL_BACK = "roll-back"
    """All workers begin again from a named position, as after a restore of the parameters."""


ROW_FAULTS = (DataFaultKind.END, DataFaultKind.STALL, DataFaultKind.LOSE_ROWS)
"""Only with parameter servers."""
ROLLBACKS = (DataFaultKind.NAME, DataFaultKind.NAME, DataFaultKind.ROLL_BACK)
"""Only with independent workers."""


@dataclass(frozen=True, slots=True)
class DataFault:
    """A fault and its time. ``pick``, from 0 to 1, selects the target."""

    at_s: float
    kind: DataFaultKind
    pick: float = 0.0


class ObservedLeases(LeaseMachine):
    """The lease machine of one Master, with checks after each event."""

    def __init__(self, plugin: DataPlugin) -> None:
        super().__init__()
        self._plugin = plugin

    def step(self, event: Event, now_s: float) -> tuple[Effect, ...]:
        """Handle an event, then check the machine's state."""
        effects = super().step(event, now_s)
        self._plugin.woken(event, effects)
        for data in self.sets.values():
            if data.table is not None:
                for violation in table_violations(data.table):
                    self._plugin.fail(f"{data.name}: {violation}")
            for shard, attempts in data.failures.items():
                if len(attempts) >= data.options.failures:
                    self._plugin.fail(f"{data.name}: shard {shard} is tried again after {attempts}")
            if data.opened != sum(client.opened for client in data.clients.values()):
                self._plugin.fail(f"{data.name}: {data.opened} opened")
        self._plugin.stepped_machine(self)
        return effects


class DataPlugin(Plugin):
    """The data of one schedule."""

    def __init__(self, seed: int, *, independent: bool, stops: bool = False, rows: bool = False) -> None:
        """``stops``: an independent worker is stopped for long. ``rows``: the workers push to parameter servers."""
        self.rng = rng = random.Random(f"data {seed}")  # noqa: S311 - not for secrets
        self.independent = independent
        self.data = SimDataSet.draw(rng, independent=independent)
        self.grows = rng.random() < 0.4 and self.data.tail != "drop"
        self.faults = tuple(_drawn(rng) for _ in range(rng.choice((0, 2, 5, 10))))
        if stops:
            self.faults += (DataFault(rng.uniform(2.0, 6.0), DataFaultKind.STOP, rng.random()),)
        self.rows: SimRows | None = None
        self._with_rows = rows
        if rows:
            chances = (3, 3, 1)
            kinds = rng.choices(ROW_FAULTS, chances, k=rng.choice((2, 5, 10)))
            self.faults += tuple(DataFault(rng.uniform(1.0, 20.0), kind, rng.random()) for kind in kinds)
        self.later_faults: tuple[DataFault, ...] = ()
        """Faults at times relative to when the first worker started to read."""
        if independent and not rows:
            again = random.Random(f"positions {seed}")  # noqa: S311 - not for secrets
            kinds = again.choices(ROLLBACKS, k=again.choice((0, 6, 12)))
            self.later_faults = tuple(DataFault(again.uniform(0.1, 6.0), kind, again.random()) for kind in kinds)
        self.machine: LeaseMachine | None = None
        """The lease machine of the latest Master."""
        self.states: dict[Version, Fed] = {}
        self.steps: dict[Version, dict[Rank, Fed]] = {}
        self.eras: dict[int, World] = {}
        self.independent_account = IndependentAccount(self.data, self._leased, rows)
        self.lists: dict[int, int] = {}
        """Number of shards in each epoch that has ended or is under way."""
        self.left_out: set[int] = set()
        self._ticks: list[float] = []
        self._depose_on_keep = False

    def fail(self, text: str) -> None:
        """Report a violation found by the data checks and raise it."""
        self._checks.fail(f"data: {text}")

    # --- Plugin -------------------------------------------------------------------------------------------------------

    def job(self, world: SimWorld, total_s: float, script: Script | None) -> Job | None:
        """The job whose workers read the data."""
        self._world, self._checks = world, world.checks
        self.independent_account.fail = self.fail
        parts = world.timeline, world.rng, world.checks, world.directory, total_s
        readers = self._readers = Readers(self.data, self, world.timeline, world.rng)
        if self.independent:
            readers_job = ReadingIndependently(
                *parts, lambda: world.checks.record.world if world.checks.record else None
            )
            readers_job.readers, readers_job.step_s = readers, self.rng.choice((0.05, 0.3))
            if self._with_rows:
                self.rows = readers_job.rows = SimRows(world.timeline, self.rng)
            return readers_job
        steps = ReadingSteps(*parts, script or Script())
        steps.readers = readers
        return steps

    _world: SimWorld
    _checks: Checks
    _readers: Readers

    def start(self, world: SimWorld) -> None:
        """Schedule the planned faults in virtual time."""
        for fault in self.faults:
            world.timeline.at(fault.at_s, self._strike, fault)

    def services(self) -> Sequence[Service]:
        """The lease machine of a new Master."""
        self.machine = ObservedLeases(self)
        return (self.machine,)

    def heal(self) -> None:
        """End slow reads, lost messages and hanging parameter servers."""
        self.data.slow_until_s = 0.0
        self._depose_on_keep = False
        for reader in self._readers.by_worker.values():
            reader.transport.loses_grant = False
        for server in self.rows.servers if self.rows is not None else ():
            server.stalled_until_s = 0.0

    def close(self) -> None:
        """End the threads of all simulated readers."""
        self._readers.close()

    # --- faults -------------------------------------------------------------------------------------------------------

    def _strike(self, fault: DataFault) -> None:
        alive = [one for one in self._readers.by_worker.values() if one.worker.alive and not one.worker.frozen]
        match fault.kind:
            case DataFaultKind.GROW if self.grows and not self._world.ended():
                self._add(NOW if fault.pick < 0.7 else NEXT_EPOCH)
            case DataFaultKind.SLOW:
                self.data.slow_until_s = self._world.timeline.now_s + 20.0 * fault.pick
                self.data.slow_s = self.rng.choice((0.5, 5.0, 40.0)) if self.independent else 1.0
            case DataFaultKind.NONSENSE if alive:
                reader = alive[int(fault.pick * len(alive))]
                bodies = ["", "{}", "[1]", '{"word":"lease","id":"x"}', encode(ReadRate(0, NAME, 5.0))]
                bodies.append(encode(Lease(1 << 50, NAME, 0, 5)))
                body = self.rng.choice(bodies)
                reader.transport.say(body, reader.worker.round - (body == bodies[-1]))
            case DataFaultKind.LOSE if alive:
                reader, pick = alive[int(fault.pick * len(alive))], fault.pick * len(alive) % 1.0
                if pick < 0.5:
                    self._cut(reader)
                else:
                    reader.transport.reset = lambda: self._cut(reader)
                    reader.transport.loses_grant = True

            case DataFaultKind.STOP if alive:
                self._world.checks.worker_failures += 1
                self._world.freeze(alive[int(fault.pick * len(alive))].worker, STOPPED_S)
            case DataFaultKind.DEPOSE if self._world.master is not None:
                self._depose()
            case DataFaultKind.DEPOSE_ON_KEEP:
                self._depose_on_keep = True

            case DataFaultKind.END if alive:
                self._world.checks.worker_failures += 1
                self._world.training.end(alive[int(fault.pick * len(alive))].worker, -9)
            case DataFaultKind.STALL if self.rows is not None:
                server = self.rows.servers[int(fault.pick * 2)]
                server.stalled_until_s = self._world.timeline.now_s + self.rng.choice((0.5, 3.0, 12.0))
            case DataFaultKind.LOSE_ROWS if self.rows is not None:
                self.rows.servers[int(fault.pick * 2)].die()
            case DataFaultKind.NAME if alive:
                alive[int(fault.pick * len(alive))].names.append(f"at-{self._world.timeline.now_s:.3f}")
            case DataFaultKind.ROLL_BACK if self.independent_account.positions:
                positions = self.independent_account.positions[-4:]
                self._roll_back(positions[int(fault.pick * len(positions))])

    def _roll_back(self, position: Beginning) -> None:
        self.independent_account.roll_back(position)
        for reader in self._readers.by_worker.values():
            if reader.worker.alive:
                self._world.checks.worker_failures += 1
                self._world.training.end(reader.worker, -9)

    def _cut(self, reader: DataReader) -> None:
        reader.transport.lose_until_s = self._world.timeline.now_s + 0.5
        self._world.timeline.after(0.6, self._readers.service_message, reader.worker, "", None)

    def _depose(self) -> None:
        key = self._world.deps.keys.master
        self._world.store.do(lambda memory: memory.write_now([Delete(key)]))

    def woken(self, event: Event, effects: Sequence[Effect]) -> None:
        """Check after an event that the machine neither ticks too often nor stores too much at once."""
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

    # --- account ------------------------------------------------------------------------------------------------------

    def state(self, version: Version) -> Mapping[str, Any]:
        """The data position in a commit."""
        found = self.states.get(version)
        if found is None:
            self.fail(f"workers restore {version}, whose position was not committed")
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
        """A worker process starts to read."""
        if self.independent:
            self.independent_account.opened(reader)
        else:
            failed: dict[int, set[int]] = {}
            reader.transport.said = lambda text: self._asked(failed, text)
            reader.transport.taken = lambda text: self._granted(failed, text)
        faults, self.later_faults = self.later_faults, ()
        for fault in faults:
            self._world.timeline.after(fault.at_s, self._strike, fault)

    def _asked(self, failed: dict[int, set[int]], text: str) -> None:
        """Observe a message of a worker in step. ``failed``: the shards that it could not read, by request."""
        message = decode(text) if '"word":"lease"' in text and '"id":"x"' not in text else None
        if isinstance(message, Lease):
            failed[message.id] = {shard for shard, _, _ in message.failed}

    def _granted(self, failed: dict[int, set[int]], text: str) -> None:
        """Check a message to a worker in step: no shard is leased to two workers, and no record that was read is
        refused."""
        message = decode(text)
        if not isinstance(message, LeasesGranted):
            return
        refused = [one for one in message.refused if one[0] not in failed.get(message.id, ())]
        if refused:
            self.fail(f"the Master refuses {refused} to a worker in step")
        hands: dict[tuple[int, int, int], DataReader] = {}
        for reader in self._readers.by_worker.values():
            client = reader.client
            if client is None or client._closed or client._open is None or not reader.worker.alive:
                continue
            for shard in client._granted:
                other = hands.setdefault((client._number, client._open.epoch, shard), reader)
                if other is not reader:
                    self.fail(f"shard {shard} is in the hands of {other.worker} and {reader.worker}")

    def used(self, reader: DataReader, epoch: int, records: tuple[int, ...]) -> None:
        """An independent worker has used records."""
        self.independent_account.used(reader, epoch, records)

    def named(self, name: str, ledger: str) -> None:
        """An independent worker has named a position."""
        self.independent_account.named(name, ledger)

    def _leased(self) -> Leased | None:
        return self.machine.sets.get(NAME) if self.machine is not None else None

    def stepped_machine(self, machine: LeaseMachine) -> None:
        """Check a Master's machine after an event."""
        data = machine.sets.get(NAME)
        if data is None or data.table is None or machine is not self.machine:
            return
        self.lists[data.table.epoch] = data.listed.at(data.table.epoch).shards
        self.left_out = set(data.quarantine)
        if self.independent:
            self.independent_account.stepped(machine, data, data.table)

    # --- the end ------------------------------------------------------------------------------------------------------

    @property
    def excused(self) -> bool:  # type: ignore[override]
        """Whether shards were skipped."""
        return bool(self.left_out)

    def finish(self) -> None:
        """Check that every record of each epoch counts once."""
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
        counted = self.independent_account.whole(leased) if self.independent else self._committed()
        if self.rows is not None:
            counted = self._pushed(self.rows, counted)
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

    def _pushed(self, rows: SimRows, used: Counter[Record]) -> Counter[Record]:
        """How often each record is in the rows, late pushes included."""
        for server in rows.servers:
            server.flush()
        counted = rows.counted(used)
        problem = rows.miscounted(counted)
        if problem:
            self.fail(problem)
        return +counted

    def _committed(self) -> Counter[Record]:
        """How often each record is in the steps that the last commit is based on."""
        counted: Counter[Record] = Counter()
        version = max(self.steps, default=NO_STATE)
        while version != NO_STATE:
            for one in self.steps[version].values():
                counted.update((one.epoch, number) for number in one.records)
            restore = self.eras[version.era].restore
            version = Version(version.era, version.commit - 1) if version.commit - 1 > restore.commit else restore
        return counted


def _drawn(rng: random.Random) -> DataFault:
    kinds = [kind for kind in DataFaultKind if kind not in (DataFaultKind.STOP, *ROW_FAULTS, *ROLLBACKS)]
    return DataFault(rng.uniform(1.0, 30.0), rng.choice(kinds), rng.random())
