"""A pserver's part in checkpoints: finding, marking, writing, completing and restoring. Each phase runs once per
checkpoint.

A mark is made at once, on the thread that carries out orders. Everything that accesses files runs on a thread of its
own, one item at a time, while training continues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edl.adapters.system_threads import SYSTEM_THREADS
from edl.errors import CheckpointError, EdlError
from edl.ports import Clock, Files
from edl.threads import ThreadQueue, Threads
from ps.checkpoint.directory import RESTORE_THREADS, CheckpointDirectory
from ps.checkpoint.reader import Loaded
from ps.checkpoint.writer import Taken as TakenPart
from ps.checkpoint.writer import WriteRate
from ps.protocol.messages import CheckpointOrder, CheckpointPhaseDone, FoundCheckpoints, Orders
from ps.protocol.replication import part_of
from ps.rows import Rows, ShardChange
from ps.spec import BUCKETS
from ps.store.snapshot import StoreSnapshot
from ps.store.store import SHARDS, RowStore

log = logging.getLogger(__name__)

NOWHERE = (
    "no checkpoint directory is set: every launcher of the job needs --checkpoint-dir, including those of pservers"
)

FIND = (0, "find")
"""Number and phase of the search for checkpoints."""
SLACK = 8
"""A restore may exceed the memory limit by this fraction (1/8): tables grow in large steps, and what fitted once must
fit again."""


class CheckpointTaskDeps(Protocol):
    """Dependencies of the task on the pserver."""

    def say(self, message: Any) -> None:
        """Send a message to the Master."""
        ...

    def owned(self) -> NDArray[np.uint8]:
        """Mask by bucket: nonzero for those that the orders assign to this pserver."""
        ...

    def restored(self, number: int, buckets: tuple[int, ...]) -> None:
        """Report that the buckets have been loaded."""
        ...


@dataclass(slots=True)
class _Mark:
    number: int
    owned: NDArray[np.uint8]
    snapshot: StoreSnapshot


class CheckpointTask:
    """Runs this pserver's phases of checkpoints."""

    def __init__(
        self,
        store: RowStore,
        files: Files | None,
        job: str,
        deps: CheckpointTaskDeps,
        clock: Clock,
        bytes_per_s: float = 0.0,
        threads: Threads = SYSTEM_THREADS,
        restore_threads: int = RESTORE_THREADS,
    ) -> None:
        self._store, self._deps = store, deps
        self._threads, self._restore_threads = threads, restore_threads
        self._directory: CheckpointDirectory | None = None
        if files is not None:
            pace = WriteRate(bytes_per_s, self._pause, clock.now_s)
            self._directory = CheckpointDirectory(files, job, pace=pace, say=_warn)
        self._over = False
        self._write_queued = False
        """Evicted rows are about to be written."""
        self._mark: _Mark | None = None
        self._begun: set[tuple[int, str]] = set()
        self._reports: dict[tuple[int, str], Any] = {}
        self._resets = 0
        """Number of resets. Loads requested before the last one are obsolete."""
        self._number = 0
        """Number of the newest checkpoint; reports about earlier ones are not repeated."""
        self._work: ThreadQueue[Callable[[], None] | None] = threads.queue()

    def start(self) -> None:
        """Start the thread that writes checkpoints."""
        self._thread = self._threads.start(self._run, name="edl-ps-checkpoints")

    def stop(self) -> None:
        """Stop after the queued items, and after writing the evicted rows that have been kept back. A checkpoint that
        is being written ends soon: the Master would not hear of it."""
        self._over = True
        self._drop_mark()
        self._work.put(self._write_evicted)
        self._work.put(None)

    def finish(self, wait_s: float) -> None:
        """After ``stop``, wait at most ``wait_s`` seconds for the last item."""
        self._thread.join(wait_s)

    def orders(self, orders: Orders) -> None:
        """Start the phase in the orders' checkpoint, if it is new. A marked one that is not in them is abandoned."""
        checkpoint = orders.checkpoint
        if self._mark is not None and (checkpoint is None or checkpoint.number != self._mark.number):
            self._drop_mark()
        if checkpoint is None or (checkpoint.number, checkpoint.phase) in self._begun or checkpoint.phase == "restore":
            return
        if checkpoint.number != self._number:
            self._number = checkpoint.number
            self._begun = {one for one in list(self._begun) if one[0] == checkpoint.number}
            self._reports = {
                name: message for name, message in list(self._reports.items()) if name[0] == checkpoint.number
            }
        self._begun.add((checkpoint.number, checkpoint.phase))
        if checkpoint.phase == "mark":
            self._attempt(checkpoint, lambda: self._take_mark(checkpoint))
        elif checkpoint.phase in ("find", "write", "complete"):
            steps = {"find": self._find, "write": self._write, "complete": self._complete}
            self._work.put(lambda: self._attempt(checkpoint, lambda: steps[checkpoint.phase](checkpoint, orders)))

    def again(self) -> None:
        """There is a new connection to the Master: repeat the reports about the newest checkpoint."""
        for message in list(self._reports.values()):
            self._deps.say(message)

    def restore(self, orders: Orders, checkpoint: CheckpointOrder, buckets: tuple[int, ...]) -> None:
        """Load these buckets in the background."""
        resets = self._resets
        self._work.put(lambda: self._attempt(checkpoint, lambda: self._restore(orders, checkpoint, buckets, resets)))

    def evicted(self, table: str, rows: Rows) -> None:
        """Keep evicted rows until there are enough of them, then write them in the background."""
        if self._directory is None or not len(rows):
            return
        if self._directory.evicted.add(table, rows) and not self._write_queued:
            self._write_queued = True
            self._work.put(self._write_if_full)

    def _write_if_full(self) -> None:
        self._write_queued = False
        if self._directory is not None and self._directory.evicted.full:
            self._write_evicted()

    def _write_evicted(self) -> None:
        if self._directory is not None:
            try:
                self._directory.write_evicted()
            except (OSError, MemoryError) as error:
                why = str(error) or type(error).__name__
                log.warning("Parameter server: cannot write evicted rows, will retry: %s", why)

    def reset(self) -> None:
        """All rows were discarded: drop the mark and obsolete the loads under way. The Master may repeat the search for
        checkpoints, whose phase has the same name each time."""
        self._resets += 1
        self._begun.discard(FIND)
        self._reports.pop(FIND, None)
        self._drop_mark()

    # --- phases ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if work is None:
                return
            try:
                work()
            except Exception:  # the next item, such as a restore, has nobody else to do it
                log.exception("Parameter server: background work on checkpoints failed")

    def _attempt(self, checkpoint: CheckpointOrder, phase: Callable[[], Any]) -> None:
        """Run a phase and report its result."""
        try:
            message = phase()
        except (EdlError, OSError, MemoryError) as error:
            log.warning(
                "Parameter server: checkpoint %d failed in phase %s: %s", checkpoint.number, checkpoint.phase, error
            )
            failed = str(error) or type(error).__name__
            message = CheckpointPhaseDone(
                checkpoint.number, checkpoint.phase, failed=failed, lasting=isinstance(error, _Lasting)
            )
        except Exception as error:
            log.exception("Parameter server: checkpoint %d failed in phase %s", checkpoint.number, checkpoint.phase)
            message = CheckpointPhaseDone(checkpoint.number, checkpoint.phase, failed=repr(error))
        if message is not None:
            if (checkpoint.number, checkpoint.phase) == FIND and isinstance(message, CheckpointPhaseDone):
                self._begun.discard(FIND)  # it has failed; the Master will repeat its orders when it knows
            self._reports[(checkpoint.number, checkpoint.phase)] = message
            self._deps.say(message)

    def _pause(self, seconds: float) -> None:
        if not self._over:  # at the end there is little time
            self._threads.sleep(seconds)

    def _opened(self, number: int) -> CheckpointDirectory:
        if self._directory is None:
            raise _Lasting(NOWHERE)
        self._directory.server = number
        return self._directory

    def _find(self, checkpoint: CheckpointOrder, orders: Orders) -> Any:
        return FoundCheckpoints(0) if self._directory is None else self._opened(orders.you).find()

    def _take_mark(self, checkpoint: CheckpointOrder) -> CheckpointPhaseDone:
        self._drop_mark()
        if self._directory is None:
            raise _Lasting(NOWHERE)
        self._mark = _Mark(checkpoint.number, self._deps.owned(), self._store.snapshot(checkpoint.number))
        return CheckpointPhaseDone(checkpoint.number, checkpoint.phase)

    def _write(self, checkpoint: CheckpointOrder, orders: Orders) -> CheckpointPhaseDone:
        mark = self._mark
        if mark is None or mark.number != checkpoint.number:
            raise CheckpointError(
                f"checkpoint {checkpoint.number} was not marked on this pserver, or has been abandoned"
            )
        directory = self._opened(orders.you)
        since = directory.since(checkpoint.run)
        if since is not None:
            mark.snapshot.take_whole(directory.taken_over(since, mark.owned))

        def taken() -> Iterator[TakenPart]:
            for shard in range(SHARDS):
                self._write_if_full()
                found = mark.snapshot.take(shard, since)
                if not mark.snapshot.open:
                    raise CheckpointError(f"checkpoint {checkpoint.number} has been abandoned")
                yield TakenPart(shard, found.rows, found.gone, found.whole)

        try:
            report = directory.write(checkpoint.number, orders.placement.history, mark.owned, taken(), since=since)
        finally:
            if self._mark is mark:
                self._drop_mark()
        log.info("Parameter server: checkpoint %d written: %s", checkpoint.number, report)
        return CheckpointPhaseDone(checkpoint.number, checkpoint.phase, report=report)

    def _complete(self, checkpoint: CheckpointOrder, orders: Orders) -> CheckpointPhaseDone:
        return CheckpointPhaseDone(
            checkpoint.number, checkpoint.phase, report=self._opened(orders.you).complete(checkpoint, orders)
        )

    def _restore(self, orders: Orders, checkpoint: CheckpointOrder, buckets: tuple[int, ...], resets: int) -> None:
        if resets != self._resets:
            return
        mine = np.zeros(BUCKETS, np.uint8)
        mine[list(buckets)] = 1
        self._store.drop(buckets)
        done: list[int] = []

        def put(loaded: Loaded) -> None:
            self._put(loaded, resets)
            done.extend(loaded.buckets)
            self._check_room(len(done), len(buckets))

        report = self._opened(orders.you).restore(checkpoint.run, mine, put, threads=self._restore_threads)
        if resets == self._resets:
            log.info("Parameter server: %d buckets restored from %s: %s", len(buckets), checkpoint.run, report)
            self._deps.restored(checkpoint.number, buckets)

    def _put(self, loaded: Loaded, resets: int) -> None:
        piece = ShardChange(loaded.shard, (), np.array(loaded.buckets, np.uint16), dict(loaded.rows))
        with self._store.lock(shard=loaded.shard):  # skips buckets that orders have moved meanwhile
            if resets == self._resets:
                self._store.apply_piece(part_of(piece, self._deps.owned() != 0))

    def _check_room(self, done: int, of_all: int) -> None:
        """Raise if the restored rows do not fit into memory; saved rows are never left out."""
        most, size = self._store.budget.most, self._store.bytes()
        if most and size > most + most // SLACK:
            raise _Lasting(
                f"not enough memory: {of_all} buckets of the checkpoint need about {size * of_all // done:,}"
                f" bytes, --pserver-memory allows {most:,}. Start more pservers, or give them more memory"
            )

    def _drop_mark(self) -> None:
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.snapshot.close()


def _warn(text: str) -> None:
    log.warning("Parameter server: %s", text)


class _Lasting(EdlError):
    """A failure that would recur with any other checkpoint."""
