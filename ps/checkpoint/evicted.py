"""Rows that were evicted from tables that export them: buffered, then written beside the checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from edl.ports import Files
from edl.wire.snapshot import Meta
from ps.checkpoint import manifest as layout
from ps.checkpoint.writer import FORMAT_NAME, RowsFile, Taken, Throttle, WriteRate
from ps.rows import Rows
from ps.spec import BUCKETS

EVICTED_BYTES = 8 << 20
"""Evicted rows are buffered up to this many bytes, then written."""
EVICTED_MOST_BYTES = 256 << 20
"""Evicted rows that cannot be written are kept up to this many bytes, then dropped."""


class EvictedRows:
    """Evicted rows that have not been written. ``add`` may be called from any thread, ``write`` from one."""

    def __init__(self, files: Files, job: str, tag: str, pace: WriteRate, say: Callable[[str], None]) -> None:
        """``tag`` is part of the file names; ``say`` receives warnings."""
        self._files, self._job, self._tag, self._pace, self._say = files, job, tag, pace, say
        self._lock = threading.Lock()
        self._rows: dict[str, list[Rows]] = {}
        self._bytes = 0
        """Size of the buffered rows, and of those being written."""
        self._written = 0
        """Number of files written."""

    @property
    def full(self) -> bool:
        """True if there are enough rows for a file."""
        return self._bytes >= EVICTED_BYTES

    def add(self, table: str, rows: Rows) -> bool:
        """Buffer rows; drop all buffered ones if there are too many. Returns ``full``."""
        with self._lock:
            self._rows.setdefault(table, []).append(rows)
            self._bytes += _size([rows])
            self._bound()
            return self.full

    def write(self, server: int) -> None:
        """Write all rows, one file for each table. ``server``: the number of this pserver. Raises ``OSError``; what has
        not been written then stays in the buffer."""
        with self._lock:
            taken, self._rows = self._rows, {}
        try:
            for table in list(taken):
                self._write(server, table, taken[table])
                with self._lock:
                    self._bytes -= _size(taken.pop(table))
        finally:
            with self._lock:
                for table, several in taken.items():
                    self._rows[table] = several + self._rows.get(table, [])
                self._bound()

    def _write(self, server: int, table: str, several: Sequence[Rows]) -> None:
        file = RowsFile()
        for rows in several:
            file.add(Taken(0, {table: rows}), np.ones(BUCKETS, np.uint8))
        name = layout.file_name(server, self._tag, self._written)
        meta = Meta(self._job, 0, 0, 0, 0, 1, FORMAT_NAME)
        path = f"{layout.job_folder(self._job)}/{layout.EVICTED}/{table}/{name}"
        file.write(self._files, path, meta, {"evicted": file.rows}, Throttle(self._pace))
        self._written += 1

    def _bound(self) -> None:
        """Drop what is buffered if it is too much. Requires the lock."""
        if self._bytes <= EVICTED_MOST_BYTES or not self._rows:
            return
        dropped, self._rows = [rows for several in self._rows.values() for rows in several], {}
        size = _size(dropped)
        self._bytes -= size
        count = sum(map(len, dropped))
        self._say(f"dropping {count:,} evicted rows, which take {size:,} bytes and cannot be written, or not in time")


def _size(several: Sequence[Rows]) -> int:
    return sum(rows.weights.nbytes + rows.state.nbytes + rows.keys.nbytes for rows in several)
