"""A pserver's part in checkpoints: finding, marking, writing, completing, restoring; each phase once a cut.

A mark is drawn at once, in the thread that follows orders. Everything that reads or writes files happens in one thread
of its own, one thing after the other, while training goes on.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edl.errors import CheckpointError, EdlError
from edl.ports import Clock, Files
from ps.checkpoint.directory import CheckpointDirectory
from ps.checkpoint.reader import Loaded
from ps.checkpoint.writer import Pace
from ps.checkpoint.writer import Taken as TakenPart
from ps.protocol.messages import Cut, CutDone, Orders
from ps.protocol.replication import part_of
from ps.rows import Piece, Rows
from ps.spec import BUCKETS
from ps.store.snapshot import Snapshot
from ps.store.store import SHARDS, Store

log = logging.getLogger(__name__)

NOWHERE = "there is no checkpoint directory: its launcher needs --checkpoint-dir, as all of the job do, pservers' too"

SLACK = 8
"""A restore may exceed the limit by such a part: tables grow in leaps, and what fitted once has to fit again."""


class CheckpointTaskDeps(Protocol):
    """What this needs of the pserver."""

    def say(self, word: Any) -> None:
        """To the Master."""
        ...

    def owned(self) -> NDArray[np.uint8]:
        """Not 0 for the buckets that orders give to this pserver, by bucket."""
        ...

    def restored(self, number: int, buckets: tuple[int, ...]) -> None:
        """They are loaded."""
        ...


@dataclass(slots=True)
class _Mark:
    number: int
    owned: NDArray[np.uint8]
    snapshot: Snapshot


class CheckpointTask:
    """See the module."""

    def __init__(
        self,
        store: Store,
        files: Files | None,
        job: str,
        around: CheckpointTaskDeps,
        clock: Clock,
        bytes_per_s: float = 0.0,
    ) -> None:
        self._store, self._files, self._job, self._around, self._clock = store, files, job, around, clock
        self._bytes_per_s = bytes_per_s
        self._directory: CheckpointDirectory | None = None
        self._mark: _Mark | None = None
        self._begun: set[tuple[int, str]] = set()
        self._said: dict[tuple[int, str], Any] = {}
        self._lives = 0
        """How often the rows have gone: what was to be loaded before that is nothing to this pserver any more."""
        self._number = 0
        """Of the newest cut; what was said of earlier ones need not be said again."""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="edl-ps-cuts", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self) -> None:
        """When what is being done is done."""
        self._work.put(None)

    def orders(self, orders: Orders) -> None:
        """What they say of a cut, if it is new."""
        cut = orders.cut
        if cut is None or (cut.number, cut.phase) in self._begun or cut.phase == "restore":
            return
        if cut.number != self._number:
            self._number = cut.number
            self._begun = {one for one in self._begun if one[0] == cut.number}
            self._said = {name: word for name, word in self._said.items() if name[0] == cut.number}
        self._begun.add((cut.number, cut.phase))
        if cut.phase == "mark":
            self._attempt(cut, lambda: self._draw(cut))
        elif cut.phase in ("find", "write", "complete"):
            steps = {"find": self._find, "write": self._write, "complete": self._complete}
            self._work.put(lambda: self._attempt(cut, lambda: steps[cut.phase](cut, orders)))

    def again(self) -> None:
        """A new line to the Master: what was said of the newest cut may be lost."""
        for word in list(self._said.values()):
            self._around.say(word)

    def restore(self, orders: Orders, cut: Cut, buckets: tuple[int, ...]) -> None:
        """Load these buckets in the background."""
        life = self._lives
        self._work.put(lambda: self._attempt(cut, lambda: self._restore(orders, cut, buckets, life)))

    def evicted(self, table: str, rows: Rows) -> None:
        """Have these written, in the background."""

        def write() -> None:
            try:
                self._opened(0).evicted(table, rows)
            except EdlError as error:
                log.warning("Parameter server: evicted rows of table %s: %s", table, error)

        if len(rows) and self._files is not None:
            self._work.put(write)

    def reset(self) -> None:
        """The rows are gone: so is what was marked of them."""
        self._lives += 1
        self._let_go()

    # --- phases ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if work is None:
                return
            work()

    def _attempt(self, cut: Cut, phase: Callable[[], Any]) -> None:
        """Do it, and say what came of it."""
        try:
            word = phase()
        except (EdlError, OSError, MemoryError) as error:
            log.warning("Parameter server: checkpoint %d, %s: %s", cut.number, cut.phase, error)
            failed = str(error) or type(error).__name__
            word = CutDone(cut.number, cut.phase, failed=failed, lasting=isinstance(error, _Lasting))
        except Exception as error:
            log.exception("Parameter server: checkpoint %d, %s", cut.number, cut.phase)
            word = CutDone(cut.number, cut.phase, failed=repr(error))
        if word is not None:
            self._said[(cut.number, cut.phase)] = word
            self._around.say(word)

    def _opened(self, number: int) -> CheckpointDirectory:
        if self._files is None:
            raise _Lasting(NOWHERE)
        if self._directory is None:
            pace = Pace(bytes_per_s=self._bytes_per_s, now_s=self._clock.now_s)
            self._directory = CheckpointDirectory(self._files, self._job, number, pace=pace, say=log.warning)
        if number:
            self._directory.server = number
        return self._directory

    def _find(self, cut: Cut, orders: Orders) -> Any:
        from ps.protocol.messages import Found

        return Found(0) if self._files is None else self._opened(orders.you).find()

    def _draw(self, cut: Cut) -> CutDone:
        self._let_go()
        if self._files is None:
            raise _Lasting(NOWHERE)
        self._mark = _Mark(cut.number, self._around.owned(), self._store.snapshot(cut.number))
        return CutDone(cut.number, cut.phase)

    def _write(self, cut: Cut, orders: Orders) -> CutDone:
        mark = self._mark
        if mark is None or mark.number != cut.number:
            raise CheckpointError(f"checkpoint {cut.number} was not marked here, or given up since")
        directory = self._opened(orders.you)
        since = directory.since(cut.run)

        def taken() -> Iterator[TakenPart]:
            for shard in range(SHARDS):
                found = mark.snapshot.take(shard, since)
                yield TakenPart(shard, found.rows, found.gone, found.whole)

        try:
            told = directory.write(cut.number, orders.chart.history, mark.owned, taken(), since=since)
        finally:
            if self._mark is mark:
                self._let_go()
        log.info("Parameter server: checkpoint %d written: %s", cut.number, told)
        return CutDone(cut.number, cut.phase, told=told)

    def _complete(self, cut: Cut, orders: Orders) -> CutDone:
        return CutDone(cut.number, cut.phase, told=self._opened(orders.you).complete(cut, orders))

    def _restore(self, orders: Orders, cut: Cut, buckets: tuple[int, ...], life: int) -> None:
        if life != self._lives:
            return
        mine = np.zeros(BUCKETS, np.uint8)
        mine[list(buckets)] = 1
        self._store.drop(buckets)
        done: list[int] = []

        def put(loaded: Loaded) -> None:
            self._put(loaded, life)
            done.extend(loaded.buckets)
            self._check_room(len(done), len(buckets))

        told = self._opened(orders.you).restore(cut.run, mine, put)
        if life == self._lives:
            log.info("Parameter server: %d buckets restored from %s: %s", len(buckets), cut.run, told)
            self._around.restored(cut.number, buckets)

    def _put(self, loaded: Loaded, life: int) -> None:
        piece = Piece(loaded.shard, (), np.array(loaded.buckets, np.uint16), dict(loaded.rows))
        with self._store.lock(shard=loaded.shard):  # what orders have given to others meanwhile is left out
            if life == self._lives:
                self._store.apply_piece(part_of(piece, self._around.owned() != 0))

    def _check_room(self, done: int, of_all: int) -> None:
        """Rows that were saved are never left out; where they do not fit, nothing is restored."""
        most, size = self._store.budget.most, self._store.bytes()
        if most and size > most + most // SLACK:
            raise _Lasting(
                f"its memory is too small: {of_all} buckets of the checkpoint take about {size * of_all // done:,}"
                f" bytes, --pserver-memory allows {most:,}. Start more pservers, or give them more memory"
            )

    def _let_go(self) -> None:
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.snapshot.close()


class _Lasting(EdlError):
    """It would fail again, and so would any other cut."""
