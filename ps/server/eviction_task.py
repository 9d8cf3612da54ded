"""Background eviction: enforces each table's share of its row cap, and removes rows not used for a while."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from edl.adapters.system_threads import SYSTEM_THREADS
from edl.errors import EdlError
from edl.threads import ThreadHandle, Threads
from ps.rows import Rows
from ps.server.bucket_shell import BucketShell
from ps.spec import BUCKETS
from ps.store.store import RowStore

log = logging.getLogger(__name__)

SWEEP_S = 1.0
"""Seconds between two sweeps of all tables."""
STOP_S = 1.0
"""Most seconds that ``stop`` waits for a sweep under way."""
SWEEP_SHARE = 0.05
"""Most processor time spent on sweeps, as a fraction; sweeps of large tables become less frequent."""


class EvictionTask:
    """A thread that evicts rows from all tables periodically, and on demand when memory is full."""

    def __init__(
        self,
        store: RowStore,
        bucket_shell: BucketShell,
        evicted: Callable[[str, Rows], None],
        failed: Callable[[str], None],
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        """``evicted`` receives the rows of tables that export them; ``failed`` is called when the thread dies."""
        self._store, self._bucket_shell, self._evicted, self._failed = store, bucket_shell, evicted, failed
        self._threads = threads
        self._share = 0.0
        """Fraction of all buckets that this pserver owns."""
        self._now = threads.event()
        self._over = False
        self._thread: ThreadHandle | None = None

    def start(self) -> None:
        """Start the thread that evicts rows."""
        self._thread = self._threads.start(self._run, name="edl-ps-sweeps")

    def stop(self) -> None:
        """Stop after the current sweep, and pass on the rows that were evicted to make room since the last one."""
        self._over = True
        self._now.set()
        if self._thread is not None and self._thread is not self._threads.current():
            self._thread.join(STOP_S)
        for name, table in list(self._store.tables.items()):
            if table.spec.eviction.export:
                self._evicted(name, table.made_room())

    def exports(self) -> bool:
        """True if evicted rows of some table are to be written."""
        return any(table.spec.eviction.export for table in list(self._store.tables.values()))

    def holds(self, owned: int, copies: int) -> None:
        """Set the number of owned and replicated buckets, from which this pserver's share of all caps follows."""
        self._share = owned / BUCKETS
        for name, table in list(self._store.tables.items()):
            if table.spec.eviction.any:
                both = round(table.spec.eviction.most_rows * (owned + copies) / BUCKETS)
                self._store.cap(name, max(1, both) if table.spec.eviction.most_rows else 0, self._bucket_shell.served)

    def make_room(self, tables: Collection[str]) -> bool:
        """Sweep at once. Returns False if none of these tables evicts rows: room in other tables would not help."""
        if not any(table.spec.eviction.any for name, table in list(self._store.tables.items()) if name in tables):
            return False
        self._now.set()
        return True

    def _part(self, of_all: int) -> int:
        """This pserver's share of a global number, at least 1; 0 stays 0."""
        return max(1, round(of_all * self._share)) if of_all else 0

    def _run(self) -> None:
        now_s, pause_s = self._threads.now_s, SWEEP_S
        while not self._over:
            self._now.wait(pause_s)
            self._now.clear()
            began_s = now_s()
            for name in list(self._store.tables):
                try:
                    self.sweep(name)
                except EdlError as error:
                    log.warning("Parameter server: cannot evict rows of table %s: %s", name, error)
                except Exception:
                    log.exception("Parameter server: eviction from table %s failed", name)
                    self._failed(f"eviction from table {name} failed")
                    return
            pause_s = max(SWEEP_S, (now_s() - began_s) / SWEEP_SHARE)

    def sweep(self, name: str) -> int:
        """Evict what is due from one table; return the number of rows."""
        eviction = self._store.tables[name].spec.eviction
        if not eviction.any or not self._share or self._over:
            return 0
        rows = self._store.sweep(
            name,
            step=self._store.most_seen_step,
            most=self._part(eviction.most_rows),
            least=self._part(eviction.least_rows),
            each=self._bucket_shell.spread,
        )
        if len(rows):
            log.info("Parameter server: evicted %d rows of table %s", len(rows), name)
            if eviction.export:
                self._evicted(name, rows)
        return len(rows)
