"""Data sets in independent mode of a trainer whose parameters lie in parameter servers: what both have to agree on.

A batch is used when the push of its gradients is acknowledged, a checkpoint names the positions of that moment, and
who begins from a checkpoint begins from those. Whoever pushes says so here, for all data sets of the process.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from data_service.loader.replay import LostTrainer, decode


class IndependentData(Protocol):
    """A data set in independent mode, see ``data_service.loader.independent.Lone``."""

    @property
    def name(self) -> str:
        """The data set's."""
        ...

    @property
    def used(self) -> bool:
        """Whether it is open."""
        ...

    @property
    def held(self) -> bool:
        """Batches count only when ``done`` is called."""
        ...

    @property
    def handed_out(self) -> int:
        """Batches that the script has got."""
        ...

    @property
    def records(self) -> tuple[str, tuple[int, int] | None]:
        """What the next push is made of, see ``records`` below."""
        ...

    @property
    def redoing(self) -> bool:
        """A push that is made again lacks batches that come next."""
        ...

    def done(self, upto: int | None = None) -> None:
        """They are used: all, or the first so many."""
        ...

    def settle(self) -> None:
        """Wait until the Master has counted all that is done."""
        ...

    def name_position(self, name: str) -> str:
        """Have the Master remember the position; gives it."""
        ...

    def say_alive(self) -> None:
        """This worker keeps its shards."""
        ...


Mark = Mapping[IndependentData, int]
"""How many batches each data set has handed out."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where to begin."""

    name: str
    """Of the positions, as the checkpoint named them."""
    history: int
    """Of the parameters."""
    ledgers: Mapping[str, str]
    """By data set, its position."""


class Trainers:
    """One for each process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sets: weakref.WeakSet[IndependentData] = weakref.WeakSet()
        self._idle: Callable[[], object] | None = None
        self._opening: Callable[[], object] | None = None
        self._push: Callable[[], object] | None = None
        self._fence: Callable[[int], tuple[int, str]] | None = None
        self._said: dict[int, tuple[int, str]] = {}
        """By trainer that is gone: the number of its last push, and what it had said of it."""
        self.number = 0
        """This process's in the parameter servers; 0: it has none."""
        self.held = False
        """Batches count when they are said to be pushed, and not when the next one is asked for."""
        self.beginning: Beginning | None = None

    def add(self, data: IndependentData) -> None:
        """A data set of this process that is used."""
        with self._lock:
            self._sets.add(data)

    def all(self) -> list[IndependentData]:
        """Those that are used."""
        with self._lock:
            return sorted(self._sets, key=lambda data: data.name)

    def idle(self) -> None:
        """The script waits for data that others have."""
        if self._idle is not None:
            self._idle()

    def on_idle(self, call: Callable[[], object] | None) -> None:
        """See the function."""
        self._idle = call

    def opening(self) -> None:
        """A data set is about to be opened."""
        if self._opening is not None:
            self._opening()

    def on_opening(self, call: Callable[[], object] | None) -> None:
        """See the function."""
        self._opening = call

    def push(self) -> None:
        """What has been handed out has to be pushed before anything else is."""
        if self._push is not None:
            self._push()

    def joined(self, number: int, push: Callable[[], object], fence: Callable[[int], tuple[int, str]]) -> None:
        """See the function."""
        self.number, self._push, self._fence = number, push, fence

    def ended(self, trainers_gone: Iterable[int], name: str, epoch: int) -> list[LostTrainer]:
        """What these trainers had said last of a data set; they push nothing new from now on. Any thread."""
        found = []
        for trainer in trainers_gone:
            if trainer not in self._said and self._fence is not None:
                self._said[trainer] = self._fence(trainer)
            seq, text = self._said.get(trainer, (-1, ""))
            one = decode(text, name, epoch, trainer, seq)
            found += [one] if one is not None else []
        return found


trainers = Trainers()


def hold() -> None:
    """From now on batches count when ``pushed`` is called, and not when the next one is asked for; but not those of
    data sets made with ``acknowledge="next"``."""
    trainers.held = True


def mark() -> Mark:
    """What has been handed out so far, for ``pushed``."""
    return {data: data.handed_out for data in trainers.all()}


def joined(number: int, push: Callable[[], object], fence: Callable[[int], tuple[int, str]]) -> None:
    """This process is trainer ``number`` of the parameter servers. ``push()`` ends a step with what has been handed out
    so far. ``fence(number)`` keeps a trainer that is gone from pushing anything new; it gives the number of its last
    push and what it had said of it."""
    trainers.joined(number, push, fence)


def records() -> tuple[str, tuple[int, int] | None]:
    """What the next push is made of: a text for whoever has to make it again; or the trainer and the number of the push
    that is being made again. Nothing is known of pushes that are made of several data sets."""
    used = [data for data in trainers.all() if data.held and data.used]
    found = [one for one in (data.records for data in used) if one != ("", None)]
    return found[0] if len(found) == 1 else ("", None)


def redoing() -> bool:
    """Whether to collect more before the next push: it is one that is made again, of all its records or not at all.
    Under its old number a second half would be left out wherever the first is."""
    return any(data.redoing for data in trainers.all() if data.held and data.used)


def pushed(upto: Mark | None = None) -> None:
    """What has been handed out so far, or up to a mark, is in the parameters now. Any thread; does not wait."""
    for data in trainers.all():
        if data.held and (upto is None or data in upto):
            data.done(None if upto is None else upto[data])


def settle() -> None:
    """Wait until the Master has counted all that was said to be pushed. Call it where all trainers have stopped, before
    positions are named."""
    for data in trainers.all():
        data.settle()


def name_positions(name: str) -> dict[str, str]:
    """Have the Master give the present position of each data set of this process a name. Returns the positions, by data
    set. One trainer does it while all have stopped and have settled. Raises ``DataError``."""
    return {data.name: data.name_position(name) for data in trainers.all() if data.used}


def begin_from(name: str, ledgers: Mapping[str, str], history: int) -> None:
    """The parameters come from a checkpoint: data sets begin from its positions. To be called by every trainer before
    it takes the first batch; it is done once for each ``history``, whoever is first. A data set that is not in
    ``ledgers`` begins anew."""
    trainers.beginning = Beginning(name, history, dict(ledgers))


def waiting() -> None:
    """The script is not dead: it waits for a pserver. To be called every few seconds while it does; a worker that says
    nothing for long would lose its shards to others. Any thread."""
    for data in trainers.all():
        data.say_alive()


def on_idle(call: Callable[[], object] | None) -> None:
    """``call`` is called when a script waits for its next batch and there has been none for a while; once each time, on
    the thread that waits."""
    trainers.on_idle(call)


def on_opening(call: Callable[[], object] | None) -> None:
    """``call`` is called each time before a data set is opened, on the thread that wants data: the time to join, and to
    say ``begin_from``."""
    trainers.on_opening(call)
