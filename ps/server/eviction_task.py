"""Evictions, in the background: each table's share of its row cap, and rows that nobody has asked for in a while."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from edl.errors import EdlError
from ps.net.connection import now_s
from ps.rows import Rows
from ps.server.bucket_shell import BucketShell
from ps.spec import BUCKETS
from ps.store.store import Store

log = logging.getLogger(__name__)

SWEEP_S = 1.0
"""Between two looks at all tables."""
SWEEP_SHARE = 0.05
"""Of a processor, at most: looking at large tables takes a while, and is done less often."""


class EvictionTask:
    """One thread."""

    def __init__(
        self,
        store: Store,
        bucket_shell: BucketShell,
        evicted: Callable[[str, Rows], None],
        failed: Callable[[str], None],
    ) -> None:
        """``evicted``: takes the rows of tables that export them."""
        self._store, self._bucket_shell, self._evicted, self._failed = store, bucket_shell, evicted, failed
        self._share = 0.0
        """Of all buckets: those that it owns."""
        self._now = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="edl-ps-sweeps", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """After what is being done."""
        self._over = True
        self._now.set()

    def holds(self, owned: int, copies: int) -> None:
        """This pserver owns so many buckets, and has copies of so many others: its share of all caps."""
        self._share = owned / BUCKETS
        for name, table in list(self._store.tables.items()):
            if table.spec.eviction.any:
                both = round(table.spec.eviction.most_rows * (owned + copies) / BUCKETS)
                self._store.cap(name, max(1, both) if table.spec.eviction.most_rows else 0, self._bucket_shell.served)

    def make_room(self, tables: Collection[str]) -> bool:
        """Sweep at once; False when none of these tables ever loses rows: what others lose is no room for them."""
        if not any(table.spec.eviction.any for name, table in list(self._store.tables.items()) if name in tables):
            return False
        self._now.set()
        return True

    def _part(self, of_all: int) -> int:
        """This pserver's share of a number that holds for all of them together."""
        return max(1, round(of_all * self._share)) if of_all else 0

    def _run(self) -> None:
        pause_s = SWEEP_S
        while not self._over:
            self._now.wait(pause_s)
            self._now.clear()
            began_s = now_s()
            for name in list(self._store.tables):
                try:
                    self.sweep(name)
                except EdlError as error:
                    log.warning("Parameter server: evicting rows of table %s: %s", name, error)
                except Exception:
                    log.exception("Parameter server: evicting rows of table %s", name)
                    self._failed(f"evicting rows of table {name}")
                    return
            pause_s = max(SWEEP_S, (now_s() - began_s) / SWEEP_SHARE)

    def sweep(self, name: str) -> int:
        """Evict what is due of one table; how many rows that were."""
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
            log.info("Parameter server: %d rows of table %s evicted", len(rows), name)
            if eviction.export:
                self._evicted(name, rows)
        return len(rows)
