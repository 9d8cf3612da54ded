"""Independent mode in the loader: opening data sets and waiting for batches while worlds change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from data_service.ledger import Ledger
from data_service.loader.current_step import CurrentStep
from data_service.loader.deps import PROCESS, LoaderDeps
from data_service.loader.lease_client import LeaseClient
from data_service.loader.loader_config import LoaderConfig
from data_service.loader.prefetcher import Prefetcher
from data_service.loader.replay import encode
from data_service.loader.unacknowledged import UnacknowledgedBatches
from data_service.loader.worker_context import RankAssignment, WorkerContext
from data_service.protocol.messages import Done, Opened, ReadRate
from edl.worker.session import note

IDLE_S = 0.2
"""Seconds without a batch after which the parameter servers are notified."""
SAY_S = 10.0
"""Seconds after which the user is notified, if this worker is the one that is waited for."""


class BatchWait:
    """The wait for one batch. A long wait is reported, to parameter servers first and then to the user."""

    def __init__(self, name: str, unacknowledged: UnacknowledgedBatches, deps: LoaderDeps) -> None:
        self._name = name
        self._clock = deps.clock
        self._trainers = deps.trainers
        self._unacknowledged = unacknowledged
        self._began_s = self._clock.now_s()
        self._idle = self._said = False

    def look(self) -> None:
        """Called periodically while there is no batch."""
        waited_s = self._clock.now_s() - self._began_s
        if waited_s >= IDLE_S and not self._idle:
            self._idle = True
            self._trainers.idle()
        if waited_s >= SAY_S and len(self._unacknowledged) and not self._said:
            self._said = True
            note(
                f"data set {self._name}: no batches left except {len(self._unacknowledged)} which this worker received "
                "and did not acknowledge. They count when their push is acknowledged; without pushes create the data "
                'set with acknowledge="next", or call done()'
            )


class IndependentLoader:
    """The base of ``Loader``: its place in the world, and the interface of independent mode for scripts and parameter
    servers. See ``data_service.loader.trainers``."""

    _deps = PROCESS

    def __init__(self, name: str, config: LoaderConfig, context: WorkerContext) -> None:
        self._name = name
        self._config = config
        self._independent = config.independent
        self._context = context.independent() if config.independent else context
        self._place: RankAssignment | None = None
        """The last assignment with which the data set was opened."""
        self._client: LeaseClient | None = None
        """The client of this round; None unless the data set is open."""
        self._prefetcher: Prefetcher | None = None
        self._step: CurrentStep | None = None
        self._unacknowledged = UnacknowledgedBatches()

    def _connect(self) -> tuple[RankAssignment, LeaseClient]:
        """Join the current round, and open the data set if that has not been done."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Name of the data set."""
        return self._name

    @property
    def used(self) -> bool:
        """True if the data set is open."""
        return self._client is not None

    @property
    def rank(self) -> int:
        """This worker's rank in the current world."""
        where = self._context.where()
        return self._context.place().rank if where is None else where[1]

    @property
    def held(self) -> bool:
        """True if batches only count when ``done`` is called."""
        acknowledge = self._config.acknowledge
        return self._deps.trainers.held if acknowledge is None else acknowledge == "done"

    @property
    def handed_out(self) -> int:
        """Number of batches that the script has received; an argument for ``done``."""
        return self._unacknowledged.count

    @property
    def records(self) -> tuple[str, tuple[int, int] | None]:
        """The unacknowledged batches: encoded, or as the push that is being repeated."""
        waiting, client = self._unacknowledged.waiting(), self._client
        pushes = {one.redo.push if one.redo is not None else None for one in waiting}
        epochs = {one.epoch for one in waiting}
        if client is None or len(pushes) != 1 or len(epochs) != 1:
            return "", None
        push = pushes.pop()
        if push is not None:
            return "", push
        return encode(self._name, epochs.pop(), client.unkept(), [one.pieces for one in waiting]), None

    @property
    def redoing(self) -> bool:
        """True if a repeated push still needs batches that come next."""
        return self._unacknowledged.redoing

    def done(self, upto: int | None = None) -> None:
        """Mark received batches as used: all, or the first ``upto`` (see ``handed_out``). The Master is notified
        asynchronously. Thread-safe."""
        for epoch, shards in self._unacknowledged.take(upto):
            if self._client is not None:
                self._client.ack(epoch, shards)

    def settle(self) -> None:
        """Wait until the Master has counted everything that is done."""
        client = self._client
        if client is not None and self._place is not None:
            number = self._place.round
            client.all_counted(lambda: self._context.check(number))

    def name_position(self, name: str) -> str:
        """Store the present position under a name on the Master. Returns the position itself, to start from it where
        the name is unknown. Raises ``DataError``."""
        place, client = self._connect()
        return client.wait(client.commit(name), lambda: self._context.check(place.round), Done).ledger

    def position_when_closed(self) -> Callable[[str], str]:
        """``name_position`` for the time when the data set is closed. Does not keep this object alive."""
        return functools.partial(_name_closed, self._name, self._context, self._deps)

    def peek(self) -> Any:
        """The next batch if it is ready, else None. It stays in the queue and must not be modified."""
        if self._step is not None:
            return self._step.first
        return None if self._prefetcher is None else self._prefetcher.first()

    def say_alive(self) -> None:
        """Report that this worker is alive while it waits for something else, so it keeps its shards. Thread-safe."""
        if self._client is not None:
            self._client.tell(ReadRate(0, self._name, 0.0))


def _name_closed(dataset: str, context: WorkerContext, deps: LoaderDeps, name: str) -> str:
    """Name the position of a data set without opening it, because other workers may still read it."""
    place = context.place()
    where = context.where if context.where() is not None else None
    at = context.transport(), dataset, place.round, place.rank
    client = LeaseClient(*at, str, where, deps, independent=True)  # type: ignore[arg-type]
    try:
        return client.wait(client.commit(name), lambda: context.check(place.round), Done).ledger
    finally:
        client.close()


class _First(Exception):
    """This worker has become rank 0 and must register the files."""


def open_lasting(
    data: IndependentLoader,
    client: LeaseClient,
    registered: bool,
    register: Callable[[], None],
    check: Callable[[], None],
) -> Opened:
    """Open a data set, from the position in the checkpoint that the parameters were restored from, if any."""
    trainers = client.deps.trainers
    trainers.opening()
    trainers.add(data)
    opened = _open(data, client, registered, register, check)
    beginning = trainers.beginning
    if beginning is not None:
        options = opened.options
        ledger = beginning.ledgers.get(data.name, "") or (
            Ledger(opened.digest, opened.shards, seed=options.seed, shuffle=options.shuffle).encode()
        )
        client.wait(client.rollback(beginning.name, ledger, beginning.history), check, Done)
        opened = client.wait(client.open(opened.epoch, opened.digest), check, Opened)
    trainers.opened(data.name, data.position_when_closed())
    return opened


def _open(
    data: IndependentLoader,
    client: LeaseClient,
    registered: bool,
    register: Callable[[], None],
    check: Callable[[], None],
) -> Opened:
    def look() -> None:
        check()
        if not registered and data.rank == 0:
            raise _First

    while True:
        asked = client.open(0, "")
        try:
            return client.wait(asked, look, Opened)
        except _First:
            client.withdraw(asked)
            register()
            registered = True
