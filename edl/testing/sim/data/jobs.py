"""Simulated jobs whose workers read data, in step or independently."""

from __future__ import annotations

import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from collections.abc import Mapping
from typing import Any, Protocol

from data_service.loader.transport import SERVICE
from edl.testing.sim.data.dataset import SimDataSet
from edl.testing.sim.data.readers import DataReader, Exchange, Fed
from edl.testing.sim.data.rows import SimRows
from edl.testing.sim.independent_job import SHORTEST_S, IndependentJob
from edl.testing.sim.stepping import Crew, Stepper, SteppingJob
from edl.testing.sim.timeline import Timeline
from edl.testing.sim.workers import SimWorker
from edl.types import Rank
from edl.wire.records import NO_STATE, Version, World

DELIVERY_S = 0.0003


class Account(Protocol):
    """Accounting of the records that workers read."""

    def stepped(self, world: World, commit: int, fed: Mapping[Rank, Fed]) -> None:
        """All workers of a world have taken a step."""
        ...

    def state(self, version: Version) -> Mapping[str, Any]:
        """The data position in a commit."""
        ...

    def used(self, reader: DataReader, epoch: int, records: tuple[int, ...]) -> None:
        """An independent worker has used records."""
        ...

    def named(self, name: str, ledger: str) -> None:
        """An independent worker has named a position."""
        ...

    def opened(self, reader: DataReader) -> None:
        """A worker process starts to read."""
        ...


class Readers:
    """The processes of a job that read data."""

    def __init__(self, data: SimDataSet, account: Account, timeline: Timeline, rng: random.Random) -> None:
        self.data = data
        self.account = account
        self.timeline = timeline
        self.rng = rng
        self.by_worker: dict[int, DataReader] = {}
        """Readers by the ``id`` of their worker."""
        self.gathered: dict[tuple[int, int], Exchange] = {}

    def of(self, worker: SimWorker) -> DataReader | None:
        """A worker's reader, if it has one."""
        return self.by_worker.get(id(worker))

    def make(self, worker: SimWorker, job: ReadingSteps | ReadingIndependently) -> DataReader:
        """A worker's reader; created if it has none."""
        reader = self.of(worker)
        if reader is None:
            parts = self.timeline, self.rng, job.watcher.fail, job.looked, self.gathered
            reader = self.by_worker[id(worker)] = DataReader(self.data, worker, *parts)
            self.account.opened(reader)
        return reader

    def service_message(self, worker: SimWorker, service: str, body: str | None) -> None:
        """Deliver a message of the Master to a worker's reader."""
        reader = self.of(worker)
        if reader is not None and service in (SERVICE, ""):
            self.timeline.after(DELIVERY_S, reader.hear, body)

    def close(self) -> None:
        """End the threads of all readers."""
        for reader in self.by_worker.values():
            reader.kill()


class ReadingSteps(SteppingJob):
    """Workers that read in step: a step begins when every worker has its batch."""

    readers: Readers

    # --- overridden for data ------------------------------------------------------------------------------------------

    @property
    def left_s(self) -> float:
        """Upper bound of the seconds that a healthy world still needs."""
        return 0.0 if self.finished else self.longest_s

    @property
    def longest_s(self) -> float:
        """Upper bound of the seconds that a healthy world needs from the beginning."""
        data = self.readers.data
        return data.epochs * data.most_steps * (self.script.step_s + 2 * data.read_s + 0.1)

    @property
    def may_keep_failing(self) -> bool:
        """Whether an epoch may have no step: a requested batch may have more records than the data set."""
        return self.readers.data.tail == "drop"

    def shorten(self, left_s: float) -> None:
        """Make the present epoch the last."""
        loaders = [reader.loader for reader in self.readers.by_worker.values() if reader.loader is not None]
        self.readers.data.epochs = min(self.readers.data.epochs, 1 + max((one.epoch for one in loaders), default=0))

    def looked(self, reader: DataReader) -> None:
        """A worker has a new batch, has read everything, or must end."""
        worker = reader.worker
        if reader.broken and worker.alive and not worker.frozen:
            self.watcher.worker_failed()
            self.end(worker, 1)
        elif isinstance(worker, Stepper) and worker.crew is not None:
            worker.crew.look()

    def _fed(self, crew: Crew) -> dict[Rank, DataReader]:
        readers = {rank: self.readers.of(worker) for rank, worker in crew.members.items()}
        return {rank: reader for rank, reader in readers.items() if reader is not None}

    def over(self, crew: Crew) -> bool:
        """Whether all workers have read all epochs."""
        readers = self._fed(crew).values()
        ended = {reader.finished for reader in readers if reader.finished or reader.fed is not None}
        if len(ended) == 2:
            self.watcher.fail(f"round {crew.world.round}: some workers have read everything, and others read on")
        return len(readers) == crew.world.size and all(reader.finished for reader in readers)

    def ready(self, crew: Crew) -> bool:
        """Whether every worker has its batch."""
        readers = self._fed(crew).values()
        return len(readers) == crew.world.size and all(reader.fed is not None for reader in readers)

    def stepped(self, world: World, commit: int) -> None:
        """All ranks of a round have completed a step."""
        super().stepped(world, commit)
        fed = {rank: reader.fed for rank, reader in self._fed(self.rounds[world.round]).items()}
        self.readers.account.stepped(world, commit, {rank: one for rank, one in fed.items() if one is not None})

    def began(self, worker: Stepper, world: World) -> None:
        """Start to read from the restored position."""
        state = None if world.restore == NO_STATE else self.readers.account.state(world.restore)
        self.readers.make(worker, self).begin(world, state)

    def went_on(self, worker: Stepper) -> None:
        """Get the worker's next batch."""
        reader = self.readers.of(worker)
        if reader is not None:
            reader.go_on()

    def left(self, worker: Stepper, world: World) -> None:
        """Stop reading in a world that the worker has left."""
        reader = self.readers.of(worker)
        if reader is not None:
            reader.leave(world.round)

    # --- life cycle ---------------------------------------------------------------------------------------------------

    def service_message(self, worker: SimWorker, service: str, body: str | None) -> None:
        """Deliver a message of the Master."""
        self.readers.service_message(worker, service, body)

    def end(self, worker: SimWorker, code: int, peer_loss: bool = False) -> None:
        """End a worker process."""
        super().end(worker, code, peer_loss)
        _ended(self.readers, worker)

    def freeze(self, worker: SimWorker) -> None:
        """Stop a worker as SIGSTOP does."""
        super().freeze(worker)
        _frozen(self.readers, worker)

    def thaw(self, worker: SimWorker) -> None:
        """Continue a worker as SIGCONT does."""
        _thawed(self.readers, worker)
        super().thaw(worker)
        reader = self.readers.of(worker)
        if reader is not None and reader.broken:
            self.looked(reader)


class ReadingIndependently(IndependentJob):
    """Independent workers that read data: each exits when it has read all epochs."""

    readers: Readers
    rows: SimRows | None = None
    """Parameter servers that the workers push to."""
    step_s = 0.1

    @property
    def left_s(self) -> float:
        """Upper bound of the seconds that are still needed."""
        return 0.0 if any(reader.finished for reader in self.readers.by_worker.values()) else self.longest_s

    @property
    def longest_s(self) -> float:
        """Upper bound of the seconds that one worker needs from the beginning."""
        data = self.readers.data
        return data.epochs * data.most_steps * (self.step_s + data.read_s + 0.1) + SHORTEST_S

    def shorten(self, left_s: float) -> None:
        """Make the present epoch the last."""
        loaders = [reader.loader for reader in self.readers.by_worker.values() if reader.loader is not None]
        epochs = [one._ledger.epoch for one in loaders if one._ledger is not None]
        self.readers.data.epochs = min(self.readers.data.epochs, 1 + max(epochs, default=0))

    def looked(self, reader: DataReader) -> None:
        """A worker has read everything, or must restart because others took over its records."""
        worker = reader.worker
        if reader.broken and worker.alive and not worker.frozen:
            self.watcher.worker_failed()
            self.end(worker, 1)
        elif worker.alive and reader.finished and not worker.frozen:
            worker.done = True
            self.end(worker, 0)

    def give_place(self, worker: SimWorker, world: World) -> None:
        """Update a running worker's place; it then reports again to the Master."""
        super().give_place(worker, world)
        self.readers.service_message(worker, SERVICE, None)

    def _go_on(self, worker: SimWorker) -> None:
        if not worker.alive or not worker.up or worker.frozen or self.readers.of(worker) is not None:
            return
        reader = self.readers.make(worker, self)
        account = self.readers.account
        reader.begin_independent(
            self.step_s, lambda epoch, records: account.used(reader, epoch, records), account.named, self.rows
        )

    def service_message(self, worker: SimWorker, service: str, body: str | None) -> None:
        """Deliver a message of the Master."""
        self.readers.service_message(worker, service, body)

    def end(self, worker: SimWorker, code: int, peer_loss: bool = False) -> None:
        """End a worker process."""
        super().end(worker, code, peer_loss)
        _ended(self.readers, worker)

    def freeze(self, worker: SimWorker) -> None:
        """Stop a worker as SIGSTOP does."""
        super().freeze(worker)
        _frozen(self.readers, worker)

    def thaw(self, worker: SimWorker) -> None:
        """Continue a worker as SIGCONT does."""
        super().thaw(worker)
        _thawed(self.readers, worker)
        reader = self.readers.of(worker)
        if reader is not None and (reader.finished or reader.broken):
            self.looked(reader)


def _ended(readers: Readers, worker: SimWorker) -> None:
    reader = readers.of(worker)
    if reader is not None and not worker.alive:
        reader.kill()


def _frozen(readers: Readers, worker: SimWorker) -> None:
    reader = readers.of(worker)
    if reader is not None and worker.alive:
        reader.freeze()


def _thawed(readers: Readers, worker: SimWorker) -> None:
    reader = readers.of(worker)
    if reader is not None and worker.alive:
        reader.thaw()
