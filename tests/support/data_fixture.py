"""Loaders of several workers, each on a thread, over one real lease machine: worlds come and go, Masters too."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_service.leases.machine import LeaseMachine
from data_service.loader.batching import StepSizes
from data_service.loader.loader import Loader
from data_service.loader.transport import Dispatcher, MasterTransport
from data_service.loader.worker_context import RankAssignment
from edl.arithmetic.hyper import StepPlan, step_plan
from edl.master.service import (
    AddToHistory,
    Caller,
    Effect,
    Event,
    Fail,
    Keep,
    ReportFlaw,
    Said,
    TellWorker,
    WorldBegan,
    WorldEnded,
)
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.records import NO_SETTINGS, Member, Settings, World
from edl.worker.boundary import RoundOver

NODE = NodeId("n")
LIMIT_S = 60.0


class Board(Dispatcher):
    """The connection of one worker."""

    def __init__(self, bench: Bench, slot: int) -> None:
        super().__init__()
        self.bench = bench
        self.slot = slot
        self.coming: deque[tuple[LeaseMachine, str | None]] = deque()
        """What the worker is about to hear, in order, and from which Master."""
        self.hearing = False

    def say(self, text: str, number: int) -> None:
        self.bench.said(self.slot, text, number)

    def deliver(self) -> None:
        """One after the other, as a stream does, unless another thread is at it. Nothing comes from a Master that has
        been replaced."""
        while True:
            with self.bench.lock:
                if self.hearing or not self.coming:
                    return
                self.hearing = True
                machine, text = self.coming.popleft()
                stale = machine is not self.bench.machine
            try:
                if not stale:
                    self.hear(text)
            finally:
                self.hearing = False


class Bench:
    """The Master's side, and what breaks rounds."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.machine = LeaseMachine()
        self.machine.load({}, 0.0)
        self.kept: dict[str, bytes] = {}
        self.boards = [Board(self, slot) for slot in range(8)]
        self.round = 0
        self.size = 0
        self.broken = 0
        self.barrier = threading.Barrier(1)
        self.parts: dict[int, bytes] = {}
        self.settings: Settings = NO_SETTINGS
        self.notes: list[str] = []
        self.flaws: dict[str, str] = {}
        self.failed: Callable[[str], None] = lambda text: None
        """Takes why the job ends."""
        self.words = 0
        self.now_s = 0.0
        self.lose: Callable[[], bool] = lambda: False
        """Whether a word is lost on its way."""

    def begin(self, size: int) -> None:
        """Begin a round with this many workers."""
        if self.round:
            self.broken = self.round
            self.do(WorldEnded(Round(self.round), "test"))
        self.round, self.size = self.round + 1, size
        self.barrier, self.parts = threading.Barrier(size), {}
        self.do(WorldBegan(self.world()))

    def world(self) -> World:
        return World(Round(self.round), (Member(NODE, Incarnation(0), "h", self.size, Rank(0), ()),), 0)

    def end(self) -> None:
        """Break the round."""
        self.broken = self.round
        self.barrier.abort()

    def replace_master(self) -> None:
        """Another one takes over: it has what was kept, and all else must be said again."""
        with self.lock:
            self.machine = LeaseMachine()
            effects = self.machine.load(dict(self.kept), 0.0)
            effects += self.machine.step(WorldBegan(self.world(), taken_over=True), 0.0)
            self._take(effects)
            self._attach()
        self._deliver()

    def reattach(self) -> None:
        """All streams break and are there again."""
        with self.lock:
            self._attach()
        self._deliver()

    def _attach(self) -> None:
        for board in self.attached():
            board.coming.append((self.machine, None))

    def attached(self) -> list[Board]:
        """The boards of the world, in the order in which they attach to another Master."""
        return self.boards[: self.size]

    def said(self, slot: int, text: str, number: int) -> None:
        self.words += 1
        if not self.lose():
            self.do(Said(Caller(NODE, slot), Round(number), text))

    def do(self, event: Event) -> tuple[Effect, ...]:
        """Step the machine, and carry out its effects, which are returned."""
        with self.lock:
            effects = self.machine.step(event, self.now_s)
            self._take(effects)
        self._deliver()
        return effects

    def _deliver(self) -> None:
        for board in self.boards:
            board.deliver()

    def _take(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case Keep(name, b""):
                    self.kept.pop(name, None)
                case Keep(name, value):
                    self.kept[name] = value
                case TellWorker(caller, body):
                    if not self.lose():
                        self.boards[caller.slot].coming.append((self.machine, body))
                case AddToHistory(text):
                    self.notes.append(text)
                case ReportFlaw(name, text):
                    self.flaws[name] = text
                case Fail(text):
                    self.failed(text)

    def gather(self, rank: int, data: bytes) -> list[bytes]:
        """Simulate an all-gather of bytes."""
        barrier = self.barrier
        try:
            self.parts[rank] = data
            barrier.wait(LIMIT_S)
            found = [self.parts[one] for one in range(self.size)]
            barrier.wait(LIMIT_S)
        except threading.BrokenBarrierError:
            raise RoundOver("broken") from None
        return found


class BenchContext:
    """A ``data_service.loader.worker_context.Post`` that is connected to a ``Bench``."""

    def __init__(self, bench: Bench, slot: int, environment: Mapping[str, str] | None = None) -> None:
        self.bench = bench
        self.slot = slot
        self.variables = environment or {}
        self.exchanges = 0

    def place(self) -> RankAssignment:
        return RankAssignment(self.bench.round, self.slot, self.bench.size)

    def transport(self) -> MasterTransport:
        return self.bench.boards[self.slot]

    def check(self, number: int) -> None:
        if self.over(number):
            raise RoundOver("broken")

    def over(self, number: int) -> bool:
        return self.bench.broken >= number

    def exchange(self, data: bytes) -> list[bytes]:
        self.exchanges += 1
        return self.bench.gather(self.slot, data)

    def settings(self) -> int:
        return self.bench.settings.number

    def step_sizes(self, batch_size: int, place: RankAssignment) -> tuple[StepSizes, StepPlan]:
        plan = step_plan(self.bench.settings, batch_size, place.world_size)
        return StepSizes(plan.sizes(place.rank), self.bench.settings.number), plan

    def environment(self) -> Mapping[str, str]:
        return self.variables

    def waited(self, duration_s: float) -> None:
        """Ignored."""

    def delivered(self, samples: int) -> None:
        """Ignored."""

    def restart_leases(self) -> bool:
        return False

    def independent(self) -> BenchContext:
        return self

    def where(self) -> tuple[int, int] | None:
        return None


class ArrayData(Loader):
    """A ``Data`` class that returns numpy arrays."""

    def __init__(self, bench: Bench, slot: int, *arguments: Any, **named: Any) -> None:
        self.bench_context = BenchContext(bench, slot, named.pop("environment", None))
        super().__init__(*arguments, **named)

    def _make_context(self) -> BenchContext:
        return self.bench_context

    def _tensor(self, array: Any) -> Any:
        return array


def write_ipc(path: Path, first: int, count: int) -> None:
    """Write an Arrow file with consecutive values in the column ``id``."""
    table = pa.table({"id": np.arange(first, first + count), "x": np.arange(count, dtype=np.float32)})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def on_threads(size: int, work: Callable[[int], Any]) -> list[Any]:
    """``work(rank)`` of all ranks at once; what each returned or raised."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    return results


@dataclass
class Lineage:
    """Committed progress of a training run: per commit, its epoch, the records of its step, and the state."""

    steps: list[tuple[int, list[int]]] = field(default_factory=list)
    state: dict[str, Any] | None = None

    def epochs(self) -> dict[int, list[int]]:
        """Records by epoch, in order of consumption."""
        found: dict[int, list[int]] = {}
        for epoch, records in self.steps:
            found.setdefault(epoch, []).extend(records)
        return found


class Training:
    """Workers that take batches, commit, and are broken off and started again."""

    def __init__(self, bench: Bench, make: Callable[[int], ArrayData], epochs: int) -> None:
        self.bench = bench
        self.make = make
        self.epochs = epochs
        self.loaders: dict[int, ArrayData] = {}
        self.lineage = Lineage()
        self.disturb: Callable[[int, int], None] = lambda rank, commit: None
        """Called by each rank before each commit."""
        self.counted = 0

    def world(self, size: int, keep: int = 0) -> list[Any]:
        """One round; the first ``keep`` workers are those of the round before. What each returned or raised."""
        self.bench.begin(size)
        for slot in list(self.loaders):
            if slot >= min(keep, size):
                self.loaders.pop(slot)._detach()
        for slot in range(size):
            loader = self.loaders.get(slot)
            if loader is None:
                loader = self.loaders[slot] = self.make(slot)
            if self.lineage.state is not None:
                loader.load_state_dict(self.lineage.state)
        return on_threads(size, self._run)

    def _run(self, rank: int) -> str:
        try:
            return self._train(rank)
        except BaseException:
            self.bench.end()
            raise

    def _train(self, rank: int) -> str:
        loader = self.loaders[rank]
        while loader.epoch < self.epochs:
            for batch, share in loader.shares():
                new = share.samples and loader.bench_context.bench is self.bench
                records = [int(one) for one in batch["id"]] if new else []
                self.disturb(rank, len(self.lineage.steps))
                self._commit(rank, loader, records)
        return "done"

    def _commit(self, rank: int, loader: ArrayData, records: list[int]) -> None:
        state = loader.state_dict()
        everybody = self.bench.gather(rank, repr((state, records)).encode())
        if rank == 0:
            gathered = [eval(one) for one in everybody]  # noqa: S307 - our own words
            assert all(one[0] == gathered[0][0] for one in gathered), "the position is the same on all ranks"
            step = [record for one in gathered for record in one[1]]
            self.lineage.steps.append((loader.epoch, step))
            self.lineage.state = state
        self.bench.gather(rank, b"")


def exactly_once(lineage: Lineage, records: int, epochs: int) -> None:
    """Each record once in each epoch."""
    found = lineage.epochs()
    assert sorted(found) == list(range(epochs))
    for epoch, seen in found.items():
        assert sorted(seen) == list(range(records)), f"epoch {epoch}: {len(seen)} records, {len(set(seen))} different"


def drawn(seed: int) -> random.Random:
    return random.Random(seed)
