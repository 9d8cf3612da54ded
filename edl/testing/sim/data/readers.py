"""Worker processes that read data: the shipped loader on simulated threads, connected to the agent of its node."""

from __future__ import annotations

import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from data_service.loader.batching import StepSizes
from data_service.loader.deps import LoaderDeps, RequestNumbers
from data_service.loader.lease_client import LeaseClient
from data_service.loader.loader import Loader
from data_service.loader.source import SettledData
from data_service.loader.trainers import TrainerDataSets
from data_service.loader.transport import SERVICE, Dispatcher
from data_service.loader.worker_context import RankAssignment
from data_service.protocol.messages import INDEPENDENT, LeasesGranted, decode
from edl.arithmetic.hyper import StepPlan, step_plan
from edl.errors import DataError
from edl.testing.sim.data.dataset import NAME, SimDataSet, SimSource, SimTable
from edl.testing.sim.data.rows import Fenced, RowTrainer, SimRows
from edl.testing.sim.stepping import Stepper
from edl.testing.sim.threads import SimThread, SimThreads
from edl.testing.sim.timeline import Timeline
from edl.testing.sim.workers import SimWorker
from edl.threads import ThreadEvent
from edl.types import Round
from edl.wire.messages import ServiceFromWorker
from edl.wire.records import NO_SETTINGS, World
from edl.worker.boundary import RoundOver

LOOK_S = 0.2
"""Seconds between two checks of a waiting worker whether its round is over."""
SLOWEST_WORD_S = 0.002
"""Longest delay in seconds of a message between a worker and its agent."""
EXCHANGE_S = 0.002
NOTHING = "fills a whole step"
"""Part of the loader's error about an epoch in which ``tail="drop"`` leaves no step."""


class ReaderHome:
    """A worker process, as its threads see it: its clock, and whether it is stopped."""

    def __init__(self, timeline: Timeline, offset_s: float) -> None:
        self._timeline = timeline
        self._offset_s = offset_s
        self.stopped = False
        """Whether it is stopped by SIGSTOP."""
        self._kept: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def now_s(self) -> float:
        """The time on this process's clock, in seconds."""
        return self._timeline.now_s + self._offset_s

    def run(self, call: Callable[..., None], *args: Any) -> None:
        """Call now, or once the process continues if it is stopped."""
        if self.stopped:
            self._kept.append((call, args))
        else:
            call(*args)

    def go_on(self) -> None:
        """Continue as SIGCONT does."""
        self.stopped = False
        kept, self._kept = self._kept, []
        for call, args in kept:
            call(*args)


def is_grant(text: str) -> bool:
    """Whether this message grants leases."""
    if '"granted"' not in text:
        return False
    message = decode(text)
    return isinstance(message, LeasesGranted) and bool(message.leases)


class WorkerTransport(Dispatcher):
    """``data_service.loader.transport.LinkTransport`` without a socket."""

    def __init__(self, reader: DataReader) -> None:
        super().__init__()
        self._reader = reader
        self._said_s = 0.0
        self.lose_until_s = 0.0
        """Until then its agent has no stream to the Master: messages in both directions are lost."""
        self.loses_grant = False
        """Whether the stream ends before the next leases arrive."""
        self.reset: Callable[[], None] = lambda: None
        """Called when it ends for this reason."""
        self.said: Callable[[str], None] = lambda text: None
        """Called with each message that is sent."""
        self.heard: Callable[[str], None] = lambda text: None
        """Called with each message that arrives, before it is dispatched."""
        self.taken: Callable[[str], None] = lambda text: None
        """Called with each message after it was dispatched."""

    def say(self, text: str, number: int) -> None:
        """Send a message to the agent, which passes it on to the Master or drops it."""
        reader = self._reader
        timeline, worker = reader.threads.timeline, reader.worker
        self.said(text)
        if timeline.now_s < self.lose_until_s:
            return
        reader.asks()
        self._said_s = max(self._said_s, timeline.now_s + reader.rng.uniform(0.0002, SLOWEST_WORD_S))
        said = ServiceFromWorker(SERVICE, worker.slot, Round(number), text)
        timeline.at(self._said_s, worker.parent.run, worker.parent.relay, said)

    def hear(self, text: str | None) -> None:
        """Dispatch a message from the Master."""
        if text is not None:
            if self._reader.threads.timeline.now_s < self.lose_until_s:
                return
            if self.loses_grant and is_grant(text):
                self.loses_grant = False
                self.reset()
                return
            self.heard(text)
        super().hear(text)
        if text is not None:
            self.taken(text)


@dataclass
class Exchange:
    """An all-gather that is under way."""

    parts: dict[int, bytes] = field(default_factory=dict)
    waiting: list[ThreadEvent] = field(default_factory=list)
    """One event for each worker; all are set when it is complete."""


class SimContext:
    """``data_service.loader.worker_context.WorkerContext`` of a simulated worker."""

    def __init__(self, reader: DataReader) -> None:
        self._reader = reader

    def place(self) -> RankAssignment:
        """The worker's rank assignment."""
        reader = self._reader
        size = reader.world.size if reader.world is not None else 1
        return RankAssignment(reader.worker.round, reader.worker.rank, size)

    def transport(self) -> WorkerTransport:
        """The connection of the process."""
        return self._reader.transport

    def check(self, number: int) -> None:
        """Raises ``RoundOver`` if the round is over."""
        if self.over(number):
            raise RoundOver("the round is over")

    def over(self, number: int) -> bool:
        """Whether the round is over for this worker."""
        return not self._reader.independent and number <= self._reader.over_upto

    def exchange(self, data: bytes) -> list[bytes]:
        """Gather data from all ranks."""
        return self._reader.exchange(data)

    def settings(self) -> int:
        """Number of the current settings."""
        worker = self._reader.worker
        return worker.boundary.settings.number if isinstance(worker, Stepper) else 0

    def step_sizes(self, batch_size: int, place: RankAssignment) -> tuple[StepSizes, StepPlan]:
        """The sizes that ``SessionContext``, or ``IndependentContext``, would return."""
        worker = self._reader.worker
        if not isinstance(worker, Stepper):
            return StepSizes((batch_size,)), step_plan(NO_SETTINGS, batch_size, 1)
        plan = step_plan(worker.boundary.settings, batch_size, place.world_size)
        return StepSizes(plan.sizes(place.rank), worker.boundary.settings.number), plan

    def environment(self) -> Mapping[str, str]:
        """The variables of the process: always none."""
        return {}

    def waited(self, duration_s: float) -> None:
        """Ignored."""

    def delivered(self, samples: int) -> None:
        """Ignored."""

    def restart_leases(self) -> bool:
        """Always false: the lease machine is not in this process."""
        return False

    def independent(self) -> SimContext:
        """This object, which serves both modes."""
        return self

    def where(self) -> tuple[int, int] | None:
        """Round and rank of an independent worker, else ``None``."""
        worker = self._reader.worker
        return (worker.round, worker.rank) if self._reader.independent else None


class SimData(Loader):
    """The loader of a simulated script."""

    def __init__(self, reader: DataReader) -> None:
        data = reader.data
        self._reader_process = reader
        self._deps = reader.deps
        self.own = True
        """Whether the last step had new records rather than repeated ones."""
        super().__init__(
            NAME,
            list(data.first),
            batch_size=data.batch_size,
            format=data.format,
            shuffle=data.shuffle,
            seed=data.seed,
            tail=data.tail,
            prefetch=2,
            shuffle_shards=data.mixed,
            mode=data.mode,
            failures=data.failures,
        )

    def _make_context(self) -> SimContext:
        return self._reader_process.context

    def _tensor(self, array: Any) -> Any:
        return array

    def _settle(self) -> SettledData:
        fresh = self._settled is None
        settled = super()._settle()
        if fresh:
            source = SimSource(self._reader_process.data, self._reader_process.threads)
            self._settled = settled = replace(settled, source=source)  # type: ignore[arg-type]
        return settled

    def _columns(self, table: Any) -> Any:
        assert isinstance(table, SimTable)  # noqa: S101 - its readers give no others
        return table.columns()

    def _begin_step(self) -> bool:
        found = super()._begin_step()
        self.own = self._step is not None and self._step.ready is not None
        return found


@dataclass(frozen=True)
class Fed:
    """A worker's batch for one step."""

    epoch: int
    records: tuple[int, ...]
    """Empty if the batch is repeated or padding."""
    position: str
    """The data position of all workers after this step."""
    state: Mapping[str, Any]


class DataReader:
    """A worker process with its loader. ``looked`` is called when its state changes."""

    def __init__(
        self,
        data: SimDataSet,
        worker: SimWorker,
        timeline: Timeline,
        rng: random.Random,
        failed: Callable[[str], None],
        looked: Callable[[DataReader], None],
        gathered: dict[tuple[int, int], Exchange],
    ) -> None:
        self.data = data
        self.worker = worker
        self.rng = rng
        self.independent = data.mode == INDEPENDENT
        self.home = ReaderHome(timeline, rng.uniform(0.0, 1e5))
        self.threads = SimThreads(self.home, timeline, rng, lambda name, error: failed(f"{worker}, {name}: {error!r}"))
        self.deps = LoaderDeps(self.threads, self.home, RequestNumbers(rng.randrange(1, 1 << 40)), TrainerDataSets())
        self.transport = WorkerTransport(self)
        self.context = SimContext(self)
        self.world: World | None = None
        self.over_upto = 0
        """The last round that is over for it."""
        self.fed: Fed | None = None
        """Its batch for the next step, once it is read."""
        self.finished = False
        """Whether it has read all epochs."""
        self.broken = False
        """Whether its script has failed."""
        self.loader: SimData | None = None
        self.names: list[str] = []
        """Independent: names for positions, to be stored after the next step."""
        self.asks: Callable[[], None] = lambda: None
        """Called for each message to the Master."""
        self._looked = looked
        self._gathered = gathered
        self._exchanges = 0
        self._go = self.threads.event()
        self._main: SimThread | None = None

    # --- the script, in step ------------------------------------------------------------------------------------------

    def begin(self, world: World, state: Mapping[str, Any] | None) -> None:
        """Start to read in a world. ``state``: the restored data position; ``None`` if the job starts from nothing."""
        before = self._main
        self.world, self.fed, self.finished, self._exchanges = world, None, False, 0
        self._go = self.threads.event()
        self._main = self.threads.start(self._train, before, world, state, name="train")

    def _train(self, before: SimThread | None, world: World, state: Mapping[str, Any] | None) -> None:
        if before is not None:
            before.join()
        try:
            self._read(world, state)
        except RoundOver:
            return
        except DataError as error:
            if NOTHING not in str(error):
                raise
            self.broken = True  # the script ends with it
            self._look()

    def _read(self, world: World, state: Mapping[str, Any] | None) -> None:
        self.context.check(world.round)
        loader = self.loader = self.loader or SimData(self)
        loader.load_state_dict(state or {"version": 2, "dataset": NAME, "ledger": None, "files": b""})
        while loader.epoch < self.data.epochs:
            epoch, records = loader.epoch, list[int]()
            for batch, share in loader.shares():
                records += [int(one) for one in batch["id"][: share.samples]] if loader.own else []
                if share.micro + 1 == share.micros:
                    self._step(world, loader, epoch, records)
                    records = []
        self.finished = True
        self._look()

    def _step(self, world: World, loader: SimData, epoch: int, records: list[int]) -> None:
        ledger = loader._ledger
        assert ledger is not None  # noqa: S101 - it has given a batch
        self.fed = Fed(epoch, tuple(records), ledger.encode(), loader.state_dict())
        self._look()
        go = self._go
        while not go.wait(LOOK_S):
            self.context.check(world.round)
        self.context.check(world.round)

    def _look(self) -> None:
        self.threads.timeline.after(0.0, self._looked, self)

    def go_on(self) -> None:
        """Continue after a committed step."""
        self.fed = None
        go, self._go = self._go, self.threads.event()
        go.set()

    def exchange(self, data: bytes) -> list[bytes]:
        """All-gather, on the training thread."""
        world, worker = self.world, self.worker
        assert world is not None  # noqa: S101 - it reads
        self._exchanges += 1
        one = self._gathered.setdefault((world.round, self._exchanges), Exchange())
        one.parts[worker.rank] = data
        complete = self.threads.event()
        one.waiting.append(complete)
        if len(one.parts) == world.size:
            for event in one.waiting:
                event.set()
        while not complete.wait(LOOK_S):
            self.context.check(world.round)
        self.threads.sleep(self.rng.uniform(0.0, EXCHANGE_S))
        self.context.check(world.round)
        return [one.parts[rank] for rank in range(world.size)]

    # --- the script, independent --------------------------------------------------------------------------------------

    def begin_independent(
        self,
        step_s: float,
        used: Callable[[int, tuple[int, ...]], None],
        named: Callable[[str, str], None],
        rows: SimRows | None = None,
    ) -> None:
        """Start an independent worker. ``used``: called with the records of a step. ``named``: called with the name and
        the ledger of a position. ``rows``: parameter servers, to which it pushes after every few batches."""

        def train() -> None:
            trainer, every = None, self.rng.randint(1, 3)
            if rows is not None:
                trainer = RowTrainer(rows, self.threads, self.deps.trainers)
            loader = self.loader = SimData(self)
            while loader.epoch < self.data.epochs:
                for step, batch in enumerate(loader):
                    self.threads.sleep(self.rng.uniform(0.2, 1.0) * step_s)
                    records = tuple(int(one) for one in batch["id"])
                    used(loader.epoch, records)
                    if trainer is not None:
                        trainer.collect(loader.epoch, records)
                        if step % every == 0:
                            trainer.step()
                    if self.names:
                        name = self.names.pop()
                        named(name, loader.name_position(name))
            loader.close()
            self.finished = True
            self._look()

        def script() -> None:
            try:
                train()
            except Fenced:
                self.broken = True
                self._look()

        self._main = self.threads.start(script, name="train")

    # --- life cycle ---------------------------------------------------------------------------------------------------

    @property
    def client(self) -> LeaseClient | None:
        """The lease client of its loader; None before there is a loader."""
        return self.loader._client if self.loader is not None else None

    def hear(self, body: str | None) -> None:
        """Deliver a message from the Master, or ``None`` when earlier ones may be lost."""
        self.home.run(self._hear, body)

    def _hear(self, body: str | None) -> None:
        if not self.threads.dead:
            self.transport.hear(body)

    def leave(self, number: int) -> None:
        """End a round for this worker."""
        self.over_upto = max(self.over_upto, number)
        self._go.set()

    def freeze(self) -> None:
        """Stop the process as SIGSTOP does."""
        self.home.stopped = True

    def thaw(self) -> None:
        """Continue the process as SIGCONT does."""
        self.home.go_on()

    def kill(self) -> None:
        """End the threads of the simulated process, as SIGKILL would."""
        self.threads.end()
