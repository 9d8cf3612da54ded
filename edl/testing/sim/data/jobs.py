"""The jobs of workers that read data: in step, and alone."""

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
from edl.wire.messages import NO_STATE, Version, World

DELIVERY_S = 0.0003


class Account(Protocol):
    """Owner of the accounting of records read."""

    def stepped(self, world: World, commit: int, fed: Mapping[Rank, Fed]) -> None:
        """All workers of a world have taken a step."""
        ...

    def state(self, version: Version) -> Mapping[str, Any]:
        """The position in a commit."""
        ...

    def used(self, reader: DataReader, epoch: int, records: tuple[int, ...]) -> None:
        """A worker that is alone has used records."""
        ...

    def named(self, name: str, ledger: str) -> None:
        """A worker that is alone has stored a position."""
        ...

    def opened(self, reader: DataReader) -> None:
        """A worker process begins to read."""
        ...


class Readers:
    """The reading processes of a job."""

    def __init__(self, data: SimDataSet, account: Account, timeline: Timeline, rng: random.Random) -> None:
        self.data = data
        self.account = account
        self.timeline = timeline
        self.rng = rng
        self.by_worker: dict[int, DataReader] = {}
        """By the ``id`` of the worker."""
        self.gathered: dict[tuple[int, int], Exchange] = {}

    def of(self, worker: SimWorker) -> DataReader | None:
        """A worker's process, once it reads."""
        return self.by_worker.get(id(worker))

    def make(self, worker: SimWorker, job: ReadingSteps | ReadingAlone) -> DataReader:
        """A worker's process, which may read already."""
        reader = self.of(worker)
        if reader is None:
            parts = self.timeline, self.rng, job.watcher.fail, job.looked, self.gathered
            reader = self.by_worker[id(worker)] = DataReader(self.data, worker, *parts)
            self.account.opened(reader)
        return reader

    def service_message(self, worker: SimWorker, service: str, body: str | None) -> None:
        """The Master has said something."""
        reader = self.of(worker)
        if reader is not None and service in (SERVICE, ""):
            self.timeline.after(DELIVERY_S, reader.hear, body)

    def close(self) -> None:
        """End all threads."""
        for reader in self.by_worker.values():
            reader.kill()


class ReadingSteps(SteppingJob):
    """Workers in step: a step begins when every worker has its batch."""

    readers: Readers

    # --- what a script with data does otherwise ----------------------------------------------------------------------

    @property
    def left_s(self) -> float:
        """Time a healthy world still needs, at most."""
        return 0.0 if self.finished else self.longest_s

    @property
    def longest_s(self) -> float:
        """Time a healthy world needs that begins from nothing, at most."""
        data = self.readers.data
        return data.epochs * data.most_steps * (self.script.step_s + 2 * data.read_s + 0.1)

    def shorten(self, left_s: float) -> None:
        """The present epoch is the last."""
        loaders = [reader.loader for reader in self.readers.by_worker.values() if reader.loader is not None]
        self.readers.data.epochs = min(self.readers.data.epochs, 1 + max((one.epoch for one in loaders), default=0))

    def looked(self, reader: DataReader) -> None:
        """A worker has something new."""
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
        """All ranks of a round have finished a step together."""
        super().stepped(world, commit)
        fed = {rank: reader.fed for rank, reader in self._fed(self.rounds[world.round]).items()}
        self.readers.account.stepped(world, commit, {rank: one for rank, one in fed.items() if one is not None})

    def began(self, worker: Stepper, world: World) -> None:
        """A worker has its place in a world, and its state."""
        state = None if world.restore == NO_STATE else self.readers.account.state(world.restore)
        self.readers.make(worker, self).begin(world, state)

    def went_on(self, worker: Stepper) -> None:
        """A worker has passed a boundary, and wants its next batch."""
        reader = self.readers.of(worker)
        if reader is not None:
            reader.go_on()

    def left(self, worker: Stepper, world: World) -> None:
        """A worker is no longer in a world."""
        reader = self.readers.of(worker)
        if reader is not None:
            reader.leave(world.round)

    # --- what happens to it ------------------------------------------------------------------------------------------

    def service_message(self, worker: SimWorker, service: str, body: str | None) -> None:
        """The Master has said something."""
        self.readers.service_message(worker, service, body)

    def end(self, worker: SimWorker, code: int, peer_loss: bool = False) -> None:
        """A worker process ends."""
        super().end(worker, code, peer_loss)
        _ended(self.readers, worker)

    def freeze(self, worker: SimWorker) -> None:
        """SIGSTOP."""
        super().freeze(worker)
        _frozen(self.readers, worker)

    def thaw(self, worker: SimWorker) -> None:
        """SIGCONT."""
        _thawed(self.readers, worker)
        super().thaw(worker)
        reader = self.readers.of(worker)
        if reader is not None and reader.broken:
            self.looked(reader)


class ReadingAlone(IndependentJob):
    """Workers that need no others: each ends when the epochs are over."""

    readers: Readers
    rows: SimRows | None = None
    """Pservers that the workers push to."""
    step_s = 0.1

    @property
    def left_s(self) -> float:
        """Time that is needed, at most."""
        return 0.0 if any(reader.finished for reader in self.readers.by_worker.values()) else self.longest_s

    @property
    def longest_s(self) -> float:
        """Time that one worker needs from the beginning, at most."""
        data = self.readers.data
        return data.epochs * data.most_steps * (self.step_s + data.read_s + 0.1) + SHORTEST_S

    def shorten(self, left_s: float) -> None:
        """The present epoch is the last."""
        loaders = [reader.loader for reader in self.readers.by_worker.values() if reader.loader is not None]
        epochs = [one._ledger.epoch for one in loaders if one._ledger is not None]
        self.readers.data.epochs = min(self.readers.data.epochs, 1 + max(epochs, default=0))

    def looked(self, reader: DataReader) -> None:
        """A worker has read everything, or has to restart because others have taken over its records."""
        worker = reader.worker
        if reader.broken and worker.alive and not worker.frozen:
            self.watcher.worker_failed()
            self.end(worker, 1)
        elif worker.alive and reader.finished and not worker.frozen:
            worker.done = True
            self.end(worker, 0)

    def give_place(self, worker: SimWorker, world: World) -> None:
        """The world changes around it: it says again who it is."""
        super().give_place(worker, world)
        self.readers.service_message(worker, SERVICE, None)

    def _go_on(self, worker: SimWorker) -> None:
        if not worker.alive or not worker.up or worker.frozen or self.readers.of(worker) is not None:
            return
        reader = self.readers.make(worker, self)
        account = self.readers.account
        reader.begin_alone(
            self.step_s, lambda epoch, records: account.used(reader, epoch, records), account.named, self.rows
        )

    def service_message(self, worker: SimWorker, service: str, body: str | None) -> None:
        """The Master has said something."""
        self.readers.service_message(worker, service, body)

    def end(self, worker: SimWorker, code: int, peer_loss: bool = False) -> None:
        """A worker process ends."""
        super().end(worker, code, peer_loss)
        _ended(self.readers, worker)

    def freeze(self, worker: SimWorker) -> None:
        """SIGSTOP."""
        super().freeze(worker)
        _frozen(self.readers, worker)

    def thaw(self, worker: SimWorker) -> None:
        """SIGCONT."""
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
