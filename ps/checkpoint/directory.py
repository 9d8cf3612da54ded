"""The checkpoints of the parameter servers, as one pserver uses them. Layout and texts: ``ps.checkpoint.manifest``.

Every pserver writes a part; one of them then writes the marker, without which a cut counts for nothing. A cut may hold
only what has changed since another one, and then needs it. Everything here blocks, and is called from one thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edl.adapters.clock import SystemClock, wall_clock_s
from edl.checkpoint.directory import manifest as texts
from edl.checkpoint.directory.failures import cannot_read, cannot_write, why
from edl.checkpoint.directory.manifest import Sum
from edl.errors import CheckpointError
from edl.ports import Files
from edl.wire.snapshot import Meta
from ps.checkpoint import manifest
from ps.checkpoint.manifest import CHAIN, MARKER_FILE, Marker, Part, Told, cut_name, cut_number, job_folder
from ps.checkpoint.reader import Complete, Loaded, Reader
from ps.checkpoint.writer import FILE_BYTES, FORMAT_NAME, Pace, PartWriter, RowsFile, Taken, Throttle
from ps.protocol.messages import Cut, Found, FoundCut, Orders
from ps.rows import Rows
from ps.spec import BUCKETS

KEEP = 3
THREADS = min(4, os.cpu_count() or 1)
"""That put rows where they belong while others are read."""
CANDIDATES = 3
EVICTED_BYTES = 8 << 20
"""Evicted rows are collected until there are so many."""
_CLOCK = SystemClock()


class CheckpointDirectory:
    """One job's cuts in a checkpoint directory."""

    def __init__(
        self,
        files: Files,
        job: str,
        server: int = 0,
        *,
        keep: int = KEEP,
        pace: Pace | None = None,
        file_bytes: int = FILE_BYTES,
        wall_s: Callable[[], float] = wall_clock_s,
        now_s: Callable[[], float] = _CLOCK.now_s,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``server``: the number of this pserver; 0 for one that only reads. ``say`` takes warnings."""
        self._files = files
        self._job = job
        self._folder = job_folder(job)
        self.server = server
        self._keep = max(2, keep)
        self._pace = pace or Pace(now_s=now_s)
        self._file_bytes = file_bytes
        self._wall_s, self._now_s, self._say = wall_s, now_s, say
        self._tag = secrets.token_hex(4)
        self._seen: dict[str, Complete] = {}
        """Complete cuts that have been looked at."""
        self._bad: dict[str, str] = {}
        """Cuts whose rows were found to be wrong."""
        self._restored = ""
        self._completed = 0
        self._written: set[int] = set()
        """Cuts that this pserver has been marked for, since it restored."""
        self._whole_bytes = self._changed_bytes = 0
        """Of the last part that was written in full, and of those after it."""
        self._evicted: dict[str, list[Rows]] = {}
        self._evicted_bytes = self._evicted_files = 0

    def run(self, cut: int) -> str:
        """A cut's folder, below the checkpoint directory."""
        return f"{self._folder}/{cut_name(cut)}"

    # --- finding -----------------------------------------------------------------------------------------------------

    def find(self) -> Found:
        """What lies there. The rows are not read."""
        try:
            numbers = sorted(self._numbers(), reverse=True)
        except OSError as error:
            raise cannot_read(self._files, error) from error
        cuts: list[FoundCut] = []
        refused: list[str] = []
        for number in numbers:
            run = self.run(number)
            try:
                chain = self.chain(run) if self._marked(run) else []
            except (CheckpointError, OSError) as error:
                reason = f"unreadable: {why(error)}" if isinstance(error, OSError) else str(error)
                refused.append(f"{self._files.path(run)}: {reason}")
                self._say(f"checkpoint {self._files.path(run)} is not used: {reason}")
                continue
            if chain:
                marker = chain[0].marker
                cuts.append(FoundCut(run, number, marker.step, marker.tables, json.dumps(marker.extra)))
            if len(cuts) == CANDIDATES:
                break
        return Found(max(numbers, default=0), tuple(cuts), tuple(refused))

    def chain(self, run: str) -> list[Complete]:
        """A cut and those that it needs, newest first. Raises ``CheckpointError`` when any of them is not right."""
        found: list[Complete] = []
        while run:
            if any(one.run == run for one in found) or len(found) > CHAIN + 1:
                raise CheckpointError(f"it goes on from itself over {len(found)} others")
            try:
                found.append(self._look(run))
            except (CheckpointError, OSError) as error:
                if not found:
                    raise
                reason = f"unreadable: {why(error)}" if isinstance(error, OSError) else str(error)
                raise CheckpointError(f"it needs {run}, which cannot be used: {reason}") from None
            run = found[-1].marker.base
        return found

    def _look(self, run: str) -> Complete:
        if run in self._bad:
            raise CheckpointError(self._bad[run])
        sizes = {entry.name: entry.size for entry in self._files.entries(run) if not entry.folder}
        known = self._seen.get(run)
        if known is None:
            if MARKER_FILE not in sizes:
                raise CheckpointError(f"{MARKER_FILE} is missing: it was never completed")
            marker = manifest.parse_marker(self._files.read(f"{run}/{MARKER_FILE}"))
            if marker.cut != cut_number(run.rpartition("/")[2]):
                raise CheckpointError(f"its marker says {cut_name(marker.cut)}")
            if marker.job != run.split("/")[-2]:
                raise CheckpointError(f"written by job {marker.job}, not by {run.split('/')[-2]}")
            known = Complete(run, marker, {name: self._part(run, name, one) for name, one in marker.parts.items()})
        for part in known.parts.values():
            for name, sums in part.files.items():
                if name not in sizes:
                    raise CheckpointError(f"{name} is missing")
                if sizes[name] != sums.bytes:
                    word = "truncated" if sizes[name] < sums.bytes else "too long"
                    raise CheckpointError(f"{name} is {word}: {sizes[name]} of {sums.bytes} bytes")
        self._seen[run] = known
        return known

    def _part(self, run: str, name: str, expected: Sum) -> Part:
        try:
            data = self._files.read(f"{run}/{name}")
        except FileNotFoundError:
            raise CheckpointError(f"{name} is missing") from None
        if len(data) != expected.bytes:
            raise CheckpointError(f"{name} is not what was written: {len(data)} bytes instead of {expected.bytes}")
        if zlib.crc32(data) != expected.crc32:
            raise CheckpointError(f"the checksum of {name} differs: {zlib.crc32(data):08x}, not {expected.crc32:08x}")
        return manifest.parse_part(data)

    def _marked(self, run: str) -> bool:
        """Whether it was completed, or, in a store, its marker was broken off, which is the same as none."""
        try:
            data = self._files.read(f"{run}/{MARKER_FILE}")
        except FileNotFoundError:
            return False
        return not (self._files.remote and texts.broken_off(data))

    def _numbers(self) -> list[int]:
        found = (cut_number(entry.name) for entry in self._files.entries(self._folder) if entry.folder)
        return [number for number in found if number is not None]

    # --- writing -----------------------------------------------------------------------------------------------------

    def since(self, base: str) -> int | None:
        """The cut to go on from, writing only what has changed since it, when ``base`` is the newest complete one of
        this history; None when everything is to be written: one that has come since was not there at that mark, and
        cannot tell what has changed since."""
        number = cut_number(base.rpartition("/")[2])
        if number not in self._written or 2 * self._changed_bytes > self._whole_bytes:
            return None
        try:
            chain = self.chain(base)
        except (CheckpointError, OSError):
            return None
        return chain[0].marker.cut if len(chain) <= CHAIN else None

    def write(
        self, cut: int, history: int, owned: NDArray[np.uint8], taken: Iterable[Taken], *, since: int | None = None
    ) -> str:
        """Write this pserver's part. Returns what to tell about it.

        ``owned``: not 0 for the buckets that it owned at the mark. ``taken``: the shards, by rising number. ``since``:
        what ``since`` gave, and what the rows were taken by. Raises ``CheckpointError``.
        """
        began_s = self._now_s()
        base = "" if since is None else self.run(since)
        buckets = manifest.ranges(map(int, np.flatnonzero(owned)))
        part = Part(self.server, cut, history, buckets, (), base, {}, {})
        try:
            writer = PartWriter(
                self._files,
                self.run(cut),
                part,
                job=self._job,
                tag=self._tag,
                pace=self._pace,
                file_bytes=self._file_bytes,
            )
            for one in taken:
                writer.add(one)
            self.flush_evicted()
            part = writer.finish()
            name, data = manifest.part_name(self.server, self._tag), manifest.part_text(part)
            self._files.write(f"{self.run(cut)}/{name}", [data])
        except OSError as error:
            raise cannot_write(self._files, error, 1) from error
        if base:
            self._changed_bytes += part.bytes
        else:
            self._whole_bytes, self._changed_bytes = part.bytes, 0
        self._written.add(cut)
        rows = sum(part.rows.values())
        took_s = self._now_s() - began_s
        sum_ = Sum(len(data), zlib.crc32(data))
        return Told(self.server, name, sum_, buckets, base, part.bytes, rows, round(took_s, 3)).encode()

    def complete(self, cut: Cut, orders: Orders) -> str:
        """Write the marker, when all have told of their parts; then remove what is not to be kept. Returns, as JSON,
        ``run``, ``bytes`` and ``rows``. Raises ``CheckpointError``."""
        run = self.run(cut.number)
        told = [Told.decode(text) for text in cut.parts]
        base = next((one.base for one in told if one.base), "")
        marker = manifest.make_marker(
            self._job,
            told,
            cut=cut.number,
            history=orders.chart.history,
            chain=len(self.chain(base)) if base else 0,
            tables=orders.tables,
            training=orders.training,
            extra=cut.extra,
            wall_s=self._wall_s(),
        )
        try:
            if self._files.stamp(f"{run}/{MARKER_FILE}"):
                raise CheckpointError(
                    f"{self._files.path(run)} is complete already: another run of the job writes here"
                )
            self._check_parts(run, marker, told)
            self._files.write(f"{run}/{MARKER_FILE}", [manifest.marker_text(marker)])
        except OSError as error:
            raise cannot_write(self._files, error, 1) from error
        self._completed += 1
        try:
            self._prune()
        except OSError as error:  # the checkpoint is safe; room is a matter of another day
            self._say(f"cannot delete old checkpoints in {self._files.path(self._folder)}: {why(error)}")
        return json.dumps({"run": run, "bytes": marker.bytes, "rows": marker.rows})

    def _check_parts(self, run: str, marker: Marker, told: list[Told]) -> None:
        """They lie there as they should: the last look before the cut counts."""
        sizes = {entry.name: entry.size for entry in self._files.entries(run)}
        for one in told:
            part = self._part(run, one.part, one.sum)
            if (part.server, part.cut, part.history) != (one.server, marker.cut, marker.history):
                raise CheckpointError(f"{one.part} says server {part.server}, cut {part.cut}, history {part.history}")
            for name, sums in part.files.items():
                if sizes.get(name) != sums.bytes:
                    raise CheckpointError(f"{name} has {sizes.get(name, 'no')} bytes instead of {sums.bytes}")

    # --- reading -----------------------------------------------------------------------------------------------------

    def read(self, run: str, mine: NDArray[Any], tables: Collection[str] = ()) -> Iterator[Loaded]:
        """The rows of some buckets, shard by shard; every block read is checked. ``tables``: only these. Raises
        ``CheckpointError``: whatever came before it must be dropped."""
        try:
            yield from Reader(self._files, self.chain(run), mine, tables).pieces()
        except OSError as error:
            raise CheckpointError(f"{self._files.path(run)}: unreadable: {why(error)}") from error
        except CheckpointError as error:
            self._bad[run] = str(error)
            raise CheckpointError(f"{self._files.path(run)}: {error}") from error

    def restore(self, run: str, mine: NDArray[Any], put: Callable[[Loaded], object], *, threads: int = THREADS) -> str:
        """Hand the rows of some buckets to ``put``, which is called on several threads, once a shard. Returns, as
        JSON, ``run``, ``rows``, ``bytes`` and ``seconds``."""
        began_s = self._now_s()
        rows = size = 0
        with ThreadPoolExecutor(threads, "edl-ps-restore") as pool:
            under_way: set[Future[object]] = set()
            for piece in self.read(run, mine):
                under_way.add(pool.submit(put, piece))
                rows += sum(len(some.keys) for some in piece.rows.values())
                size += sum(some.weights.nbytes + some.state.nbytes for some in piece.rows.values())
                if len(under_way) > threads:
                    done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                    for one in done:
                        one.result()
            for one in under_way:
                one.result()
        self._restored, self._completed = run, 0
        self._written.clear()
        self._whole_bytes = self._changed_bytes = 0
        return json.dumps({"run": run, "rows": rows, "bytes": size, "seconds": round(self._now_s() - began_s, 3)})

    # --- evicted rows ------------------------------------------------------------------------------------------------

    def evicted(self, table: str, rows: Rows) -> None:
        """Rows that were evicted from a table that exports them. They are written when there are many, and at a cut.
        Raises ``CheckpointError``; they stay, to be written with the next ones."""
        if not len(rows.keys):
            return
        self._evicted.setdefault(table, []).append(rows)
        self._evicted_bytes += rows.weights.nbytes + rows.state.nbytes + rows.keys.nbytes
        if self._evicted_bytes >= EVICTED_BYTES:
            try:
                self.flush_evicted()
            except OSError as error:
                raise cannot_write(self._files, error, self._evicted_bytes) from error

    def flush_evicted(self) -> None:
        """Write the evicted rows that are collected. Raises ``OSError``."""
        for table in list(self._evicted):
            file = RowsFile()
            for rows in self._evicted[table]:
                file.add(Taken(0, {table: rows}), np.ones(BUCKETS, np.uint8))
            name = manifest.file_name(self.server, self._tag, self._evicted_files)
            meta = Meta(self._job, 0, 0, 0, 0, 1, FORMAT_NAME)
            path = f"{self._folder}/{manifest.EVICTED}/{table}/{name}"
            file.write(self._files, path, meta, {"evicted": file.rows}, Throttle(self._pace))
            self._evicted_files += 1
            del self._evicted[table]
        self._evicted_bytes = 0

    # --- deleting ----------------------------------------------------------------------------------------------------

    def _prune(self) -> None:
        numbers = sorted(self._numbers(), reverse=True)
        whole: list[list[Complete]] = []
        broken: list[int] = []
        for number in numbers:
            try:
                whole.append(self.chain(self.run(number)))
            except CheckpointError:
                broken.append(number)
        kept = {one.run for chain in whole[: self._keep] for one in chain}
        if self._restored and self._completed < self._keep:
            with contextlib.suppress(CheckpointError):
                kept |= {one.run for one in self.chain(self._restored)}
        surplus = [chain[0].run for chain in whole if chain[0].run not in kept]
        if len(whole) >= self._keep:
            oldest = whole[self._keep - 1][0].marker.cut
            surplus += [self.run(number) for number in broken if number < oldest and self.run(number) not in kept]
        for run in sorted(surplus):
            self._delete(run)

    def _delete(self, run: str) -> None:
        """The marker first: what is half deleted must not look complete."""
        self._seen.pop(run, None)
        self._files.remove(f"{run}/{MARKER_FILE}")
        for entry in self._files.entries(run):
            if not entry.folder:
                self._files.remove(f"{run}/{entry.name}")
        self._files.remove(run)
