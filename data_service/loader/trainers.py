"""The link between independent data sets and parameter servers in a trainer's process.

A batch counts as used when the push of its gradients is acknowledged. A checkpoint stores the data positions of that
moment, and a trainer that starts from the checkpoint starts from these. The parameter-server client calls the functions
here, for all data sets of the process.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from data_service.loader.replay import LostTrainer, decode


class IndependentData(Protocol):
    """A data set in independent mode; see ``data_service.loader.independent.IndependentLoader``."""

    @property
    def name(self) -> str:
        """Name of the data set."""
        ...

    @property
    def used(self) -> bool:
        """True if the data set is open."""
        ...

    @property
    def held(self) -> bool:
        """True if batches only count when ``done`` is called."""
        ...

    @property
    def handed_out(self) -> int:
        """Number of batches that the script has received."""
        ...

    @property
    def records(self) -> tuple[str, tuple[int, int] | None]:
        """The records of the next push; see ``records`` below."""
        ...

    @property
    def redoing(self) -> bool:
        """True if a repeated push still needs batches that come next."""
        ...

    def done(self, upto: int | None = None) -> None:
        """Mark batches as used: all, or the first ``upto``."""
        ...

    def settle(self) -> None:
        """Wait until the Master has counted all that is done."""
        ...

    def name_position(self, name: str) -> str:
        """Store the present position on the Master under a name; return the position."""
        ...

    def say_alive(self) -> None:
        """Report that this worker is alive, so it keeps its shards."""
        ...


Mark = Mapping[IndependentData, int]
"""The number of batches that each data set has returned."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """The positions to start from."""

    name: str
    """Name of the positions in the checkpoint."""
    history: int
    """History of the parameters."""
    ledgers: Mapping[str, str]
    """Positions by data set."""


class TrainerDataSets:
    """The registry of a process: its data sets and callbacks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sets: weakref.WeakSet[IndependentData] = weakref.WeakSet()
        self._idle: Callable[[], object] | None = None
        self._opening: Callable[[], object] | None = None
        self._push: Callable[[], object] | None = None
        self._fence: Callable[[int], tuple[int, str]] | None = None
        self._land: Callable[[], object] | None = None
        self._said: dict[int, tuple[int, str]] = {}
        """By lost trainer: the number and the intent of its last push."""
        self._named: dict[str, frozenset[int]] = {}
        """By data set: the lost trainers that the Master last named. Only their intents are kept."""
        self._name_closed: dict[str, Callable[[str], str]] = {}
        """By data set that was opened here, now closed or not: names the position of a closed one."""
        self.number = 0
        """This process's number in the parameter servers; 0 if it has none."""
        self.held = False
        """True if batches count when they are reported as pushed, instead of when the next one is requested."""
        self.beginning: Beginning | None = None

    def add(self, data: IndependentData) -> None:
        """Register an open data set of this process."""
        with self._lock:
            self._sets.add(data)

    def opened(self, dataset: str, name_closed: Callable[[str], str]) -> None:
        """A data set has been opened. ``name_closed`` names its position once it is closed."""
        with self._lock:
            self._name_closed[dataset] = name_closed

    def name_positions(self, name: str) -> dict[str, str]:
        """Name the positions; see the function ``name_positions``."""
        found = dict(self.beginning.ledgers) if self.beginning is not None else {}
        in_use = {data.name: data.name_position for data in self.all() if data.used}
        with self._lock:
            calls = {**self._name_closed, **in_use}
        return {**found, **{dataset: call(name) for dataset, call in calls.items()}}

    def all(self) -> list[IndependentData]:
        """The open data sets, by name."""
        with self._lock:
            return sorted(self._sets, key=lambda data: data.name)

    def idle(self) -> None:
        """The script waits for data that other workers hold."""
        if self._idle is not None:
            self._idle()

    def on_idle(self, call: Callable[[], object] | None) -> None:
        """Set the callback for long waits; see the function ``on_idle``."""
        self._idle = call

    def opening(self) -> None:
        """A data set is about to be opened."""
        if self._opening is not None:
            self._opening()

    def on_opening(self, call: Callable[[], object] | None) -> None:
        """Set the callback for opening; see the function ``on_opening``."""
        self._opening = call

    def push(self) -> None:
        """Push the gradients of received batches before anything else."""
        if self._push is not None:
            self._push()

    def land(self) -> None:
        """Wait for a push that is on its way, so that its batches count."""
        if self._land is not None:
            self._land()

    def joined(
        self,
        number: int,
        push: Callable[[], object],
        fence: Callable[[int], tuple[int, str]],
        land: Callable[[], object] | None = None,
    ) -> None:
        """This process is a trainer now; see the function ``joined``."""
        self.number, self._push, self._fence, self._land = number, push, fence, land

    def ended(self, trainers_gone: Iterable[int], name: str, epoch: int) -> list[LostTrainer]:
        """The last intents of lost trainers for a data set; these trainers can push nothing new from now on.
        Thread-safe."""
        found, said = [], dict[int, tuple[int, str]]()
        for trainer in trainers_gone:
            last = self._said.get(trainer)
            if last is None and self._fence is not None:
                last = self._fence(trainer)
            if last is not None:
                said[trainer] = last
                one = decode(last[1], name, epoch, trainer, last[0])
                found += [one] if one is not None else []
        with self._lock:
            self._named[name] = frozenset(said)
            known = {**self._said, **said}
            self._said = {trainer: known[trainer] for trainer in frozenset().union(*self._named.values())}
        return found

    def records(self) -> tuple[str, tuple[int, int] | None]:
        """The records of the next push; see the function ``records``."""
        used = [data for data in self.all() if data.held and data.used]
        found = [one for one in (data.records for data in used) if one != ("", None)]
        return found[0] if len(found) == 1 else ("", None)

    def redoing(self) -> bool:
        """True if the next push needs more batches first; see the function ``redoing``."""
        return any(data.redoing for data in self.all() if data.held and data.used)

    def pushed(self, upto: Mark | None = None) -> None:
        """Batches have been applied to the parameters; see the function ``pushed``."""
        for data in self.all():
            if data.held and (upto is None or data in upto):
                data.done(None if upto is None else upto[data])


trainers = TrainerDataSets()


def hold() -> None:
    """From now on batches count when ``pushed`` is called, not when the next one is requested, except for data sets
    created with ``acknowledge="next"``."""
    trainers.held = True


def mark() -> Mark:
    """The batches returned so far, as an argument for ``pushed``."""
    return {data: data.handed_out for data in trainers.all()}


def joined(
    number: int,
    push: Callable[[], object],
    fence: Callable[[int], tuple[int, str]],
    land: Callable[[], object] | None = None,
) -> None:
    """Register this process as trainer ``number`` of the parameter servers. ``push()`` ends a step with the batches
    returned so far. ``fence(number)`` stops a lost trainer from pushing anything new, and returns the number and the
    intent of its last push. ``land()`` waits for a push that is on its way, and reports its batches as ``pushed``."""
    trainers.joined(number, push, fence, land)


def records() -> tuple[str, tuple[int, int] | None]:
    """The records of the next push, encoded for a possible replay, or the trainer and number of the push that is being
    replayed. Empty for pushes from several data sets."""
    return trainers.records()


def redoing() -> bool:
    """True if the next push is a replay that needs more batches first. A replayed push must be sent as a whole: a
    second part under the old number would be skipped wherever the first was applied."""
    return trainers.redoing()


def pushed(upto: Mark | None = None) -> None:
    """All batches returned so far, or up to ``upto``, have been applied to the parameters. Thread-safe; does not
    block."""
    trainers.pushed(upto)


def settle() -> None:
    """Wait until the Master has counted everything reported as pushed. Called when all trainers have stopped, before
    positions are named."""
    for data in trainers.all():
        data.settle()


def name_positions(name: str) -> dict[str, str]:
    """Store the present position of each data set on the Master under a name; return the positions by data set. One
    trainer calls it after all have stopped and settled. A data set that this process has not opened keeps its position
    of the checkpoint that the parameters were restored from. Raises ``DataError``."""
    return trainers.name_positions(name)


def begin_from(name: str, ledgers: Mapping[str, str], history: int) -> None:
    """Start the data sets from the positions of the checkpoint that the parameters were restored from. Every trainer
    must call it before its first batch; it takes effect once for each ``history``. A data set that is not in
    ``ledgers`` starts from the beginning."""
    trainers.beginning = Beginning(name, history, dict(ledgers))


def waiting() -> None:
    """Report that the script is alive while it waits for a pserver. Call it every few seconds: a silent worker would
    lose its shards. Thread-safe."""
    for data in trainers.all():
        data.say_alive()


def on_idle(call: Callable[[], object] | None) -> None:
    """Set a callback for when a script has waited for its next batch for a while; called once per wait, on the waiting
    thread."""
    trainers.on_idle(call)


def on_opening(call: Callable[[], object] | None) -> None:
    """Set a callback for before a data set is opened, on the thread that wants data: the place to join and call
    ``begin_from``."""
    trainers.on_opening(call)
