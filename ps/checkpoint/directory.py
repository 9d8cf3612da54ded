"""The job's parameter-server checkpoints, as one pserver uses them. See ``ps.checkpoint.manifest`` for the layout.

Every pserver writes one part; one of them then writes the manifest, without which the checkpoint does not count. An
incremental checkpoint holds only what has changed since its base checkpoint, and needs the base to be read. All
functions block and are called from one thread; ``evicted.add`` from any.
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
from edl.checkpoint.directory.deletions import Deletions
from edl.checkpoint.directory.failures import cannot_read, cannot_write, why
from edl.checkpoint.directory.folders import is_link
from edl.checkpoint.directory.manifest import Sum
from edl.errors import CheckpointError
from edl.ports import Files
from ps.checkpoint import manifest as layout
from ps.checkpoint.evicted import EvictedRows
from ps.checkpoint.manifest import (
    CHAIN,
    MANIFEST_FILE,
    CheckpointManifest,
    CheckpointPart,
    PartReport,
    checkpoint_name,
    checkpoint_number,
    job_folder,
)
from ps.checkpoint.reader import CheckpointReader, Complete, Loaded
from ps.checkpoint.writer import FILE_BYTES, PartWriter, Taken, WriteRate
from ps.protocol.messages import CheckpointOrder, FoundCheckpoint, FoundCheckpoints, Orders

KEEP = 3
RESTORE_THREADS = min(4, os.cpu_count() or 1)
"""Threads that put rows into the store while further rows are being read."""
CANDIDATES = 3
KNOWN = 16
"""Most checkpoints on which this pserver can base an incremental one. All but the newest ones were abandoned."""
_CLOCK = SystemClock()


class CheckpointDirectory:
    """One job's parameter-server checkpoints in a checkpoint directory."""

    def __init__(
        self,
        files: Files,
        job: str,
        server: int = 0,
        *,
        keep: int = KEEP,
        pace: WriteRate | None = None,
        file_bytes: int = FILE_BYTES,
        wall_s: Callable[[], float] = wall_clock_s,
        now_s: Callable[[], float] = _CLOCK.now_s,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``server``: the number of this pserver; 0 for one that only reads. ``say`` receives warnings."""
        self._files = files
        self._job = job
        self._folder = job_folder(job)
        self.server = server
        self._keep = max(2, keep)
        self._pace = pace or WriteRate(now_s=now_s)
        self._file_bytes = file_bytes
        self._wall_s, self._now_s, self._say = wall_s, now_s, say
        self._tag = secrets.token_hex(4)
        self._deletions = Deletions(files, self._delete, say)
        self._seen: dict[str, Complete] = {}
        """Complete checkpoints that have been validated."""
        self._bad: dict[str, str] = {}
        """Checkpoints whose rows turned out to be damaged, with the reason."""
        self._restored = ""
        self._completed = 0
        self._written: dict[int, NDArray[np.uint8]] = {}
        """The newest checkpoints that this pserver has written a part of since it restored, with the buckets in it."""
        self._whole_bytes = self._changed_bytes = 0
        """Bytes of the last part that was written in full, and of the incremental parts after it."""
        self.evicted = EvictedRows(files, job, self._tag, self._pace, say)
        """Evicted rows, which are written with ``write_evicted`` and at each checkpoint."""

    def run(self, checkpoint: int) -> str:
        """Path of a checkpoint's folder, relative to the checkpoint directory."""
        return f"{self._folder}/{checkpoint_name(checkpoint)}"

    # --- finding -----------------------------------------------------------------------------------------------------

    def find(self) -> FoundCheckpoints:
        """List the usable checkpoints, without reading their rows. Raises ``CheckpointError`` if the directory is
        unreadable."""
        try:
            runs = self._runs()
        except OSError as error:
            raise cannot_read(self._files, error) from error
        checkpoints: list[FoundCheckpoint] = []
        refused: list[str] = []
        for number, run in runs:
            try:
                chain = self.chain(run) if self._has_manifest(run) else []
            except (CheckpointError, OSError) as error:
                reason = f"unreadable: {why(error)}" if isinstance(error, OSError) else str(error)
                refused.append(f"{self._files.path(run)}: {reason}")
                self._say(f"checkpoint {self._files.path(run)} is ignored: {reason}")
                continue
            if chain:
                manifest = chain[0].manifest
                checkpoints.append(
                    FoundCheckpoint(run, number, manifest.step, manifest.tables, json.dumps(manifest.extra))
                )
            if len(checkpoints) == CANDIDATES:
                break
        return FoundCheckpoints(runs[0][0] if runs else 0, tuple(checkpoints), tuple(refused))

    def chain(self, run: str) -> list[Complete]:
        """A checkpoint and the base checkpoints that it needs, newest first. Raises ``CheckpointError`` if any is
        unusable."""
        found: list[Complete] = []
        while run:
            if any(one.run == run for one in found) or len(found) > CHAIN + 1:
                raise CheckpointError(f"its chain of base checkpoints is a loop or too long: {len(found)} so far")
            try:
                found.append(self._look(run))
            except (CheckpointError, OSError) as error:
                if not found:
                    raise
                reason = f"unreadable: {why(error)}" if isinstance(error, OSError) else str(error)
                raise CheckpointError(f"its base {run} is unusable: {reason}") from None
            run = found[-1].manifest.base
        return found

    def _look(self, run: str) -> Complete:
        if run in self._bad:
            raise CheckpointError(self._bad[run])
        sizes = {entry.name: entry.size for entry in self._files.entries(run) if not entry.folder}
        known = self._seen.get(run)
        if known is None:
            file = layout.manifest_file(run)
            if file not in sizes:
                raise CheckpointError(f"{file} is missing: the checkpoint was never completed")
            manifest = layout.parse_manifest(self._files.read(f"{run}/{file}"))
            if manifest.checkpoint != checkpoint_number(run.rpartition("/")[2]):
                raise CheckpointError(f"its manifest names another checkpoint, {checkpoint_name(manifest.checkpoint)}")
            if manifest.job != run.split("/")[-2]:
                raise CheckpointError(f"written by job {manifest.job}, not by {run.split('/')[-2]}")
            known = Complete(run, manifest, {name: self._part(run, name, one) for name, one in manifest.parts.items()})
        for part in known.parts.values():
            for name, sums in part.files.items():
                if name not in sizes:
                    raise CheckpointError(f"{name} is missing")
                if sizes[name] != sums.bytes:
                    message = "truncated" if sizes[name] < sums.bytes else "too long"
                    raise CheckpointError(f"{name} is {message}: {sizes[name]} of {sums.bytes} bytes")
        self._seen[run] = known
        return known

    def _part(self, run: str, name: str, expected: Sum) -> CheckpointPart:
        try:
            data = self._files.read(f"{run}/{name}")
        except FileNotFoundError:
            raise CheckpointError(f"{name} is missing") from None
        if len(data) != expected.bytes:
            raise CheckpointError(
                f"{name} differs from what was written: {len(data)} bytes instead of {expected.bytes}"
            )
        if zlib.crc32(data) != expected.crc32:
            raise CheckpointError(f"the checksum of {name} differs: {zlib.crc32(data):08x}, not {expected.crc32:08x}")
        return layout.parse_part(data)

    def _has_manifest(self, run: str) -> bool:
        """True if a manifest is present. A truncated manifest in an object store counts as absent."""
        try:
            data = self._files.read(f"{run}/{layout.manifest_file(run)}")
        except FileNotFoundError:
            return False
        return not (self._files.remote and texts.is_truncated(data))

    def _runs(self) -> list[tuple[int, str]]:
        """Number and folder of every checkpoint, complete or not, newest first."""
        folders = [entry.name for entry in self._files.entries(self._folder) if entry.folder]
        numbers = ((checkpoint_number(name), f"{self._folder}/{name}") for name in folders)
        return sorted(((number, run) for number, run in numbers if number is not None), reverse=True)

    # --- writing -----------------------------------------------------------------------------------------------------

    def since(self, base: str) -> int | None:
        """The number of the checkpoint that the next one may be an increment of; None if everything must be written.

        ``base`` must be the newest complete checkpoint of this history and one that this pserver wrote a part of. After
        any other, changes since ``base`` are not known here.
        """
        number = checkpoint_number(base.rpartition("/")[2])
        if number not in self._written or 2 * self._changed_bytes > self._whole_bytes:
            return None
        try:
            chain = self.chain(base)
            there = {run for _, run in self._runs()}
        except (CheckpointError, OSError):
            return None
        self._seen = {run: one for run, one in self._seen.items() if run in there}  # another pserver has deleted some
        return chain[0].manifest.checkpoint if len(chain) <= CHAIN else None

    def taken_over(self, since: int, owned: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Mask of those ``owned`` buckets that are not in this pserver's part of the checkpoint ``since``, a return
        value of ``since``. Their owner was another one, which may have taken its mark a little earlier: what changed in
        between is in no part, and does not count as a change here. So they must be written in full."""
        return np.asarray((owned != 0) & (self._written[since] == 0))

    def write(
        self,
        checkpoint: int,
        history: int,
        owned: NDArray[np.uint8],
        taken: Iterable[Taken],
        *,
        since: int | None = None,
    ) -> str:
        """Write this pserver's part; return the encoded report about it for the Master.

        ``owned``: nonzero for the buckets that this pserver owned when the checkpoint was marked. ``taken``: the
        shards, in ascending order. ``since``: the return value of ``since``; ``taken`` must have been captured with the
        same value. Raises ``CheckpointError``.
        """
        began_s = self._now_s()
        base = "" if since is None else self.run(since)
        buckets = layout.ranges(map(int, np.flatnonzero(owned)))
        part = CheckpointPart(self.server, checkpoint, history, buckets, (), base, {}, {})
        try:
            writer = PartWriter(
                self._files,
                self.run(checkpoint),
                part,
                job=self._job,
                tag=self._tag,
                pace=self._pace,
                file_bytes=self._file_bytes,
            )
            for one in taken:
                writer.add(one)
            self.write_evicted()
            part = writer.finish()
            name, data = layout.part_name(self.server, self._tag), layout.part_text(part)
            self._files.write(f"{self.run(checkpoint)}/{name}", [data])
        except OSError as error:
            raise cannot_write(self._files, error, 1) from error
        if base:
            self._changed_bytes += part.bytes
        else:
            self._whole_bytes, self._changed_bytes = part.bytes, 0
        self._written[checkpoint] = owned
        while len(self._written) > KNOWN:
            del self._written[min(self._written)]
        rows = sum(part.rows.values())
        took_s = self._now_s() - began_s
        sum_ = Sum(len(data), zlib.crc32(data))
        return PartReport(self.server, name, sum_, buckets, base, part.bytes, rows, round(took_s, 3)).encode()

    def complete(self, checkpoint: CheckpointOrder, orders: Orders) -> str:
        """Write the manifest once all pservers have reported their parts; then delete old checkpoints.

        Returns JSON with ``run``, ``bytes`` and ``rows``. Raises ``CheckpointError``.
        """
        run = self.run(checkpoint.number)
        reports = [PartReport.decode(text) for text in checkpoint.parts]
        base = next((one.base for one in reports if one.base), "")
        manifest = layout.make_manifest(
            self._job,
            reports,
            checkpoint=checkpoint.number,
            history=orders.placement.history,
            chain=len(self.chain(base)) if base else 0,
            tables=orders.tables,
            training=orders.training,
            extra=checkpoint.extra,
            wall_s=self._wall_s(),
        )
        try:
            if self._files.stamp(f"{run}/{MANIFEST_FILE}"):
                raise CheckpointError(
                    f"{self._files.path(run)} is already complete: another run of this job writes to the same directory"
                )
            self._check_parts(run, manifest, reports)
            self._files.write(f"{run}/{MANIFEST_FILE}", [layout.manifest_text(manifest)])
        except OSError as error:
            raise cannot_write(self._files, error, 1) from error
        self._completed += 1
        try:
            self._prune()
        except OSError as error:  # the checkpoint is safe; old ones can be deleted next time
            self._say(f"cannot delete old checkpoints in {self._files.path(self._folder)}: {why(error)}")
        return json.dumps({"run": run, "bytes": manifest.bytes, "rows": manifest.rows})

    def _check_parts(self, run: str, manifest: CheckpointManifest, reports: list[PartReport]) -> None:
        """Check all parts once more before the manifest makes the checkpoint valid."""
        sizes = {entry.name: entry.size for entry in self._files.entries(run)}
        for one in reports:
            part = self._part(run, one.part, one.sum)
            if (part.server, part.checkpoint, part.history) != (one.server, manifest.checkpoint, manifest.history):
                raise CheckpointError(
                    f"{one.part} is of server {part.server}, checkpoint {part.checkpoint}, history {part.history}"
                )
            for name, sums in part.files.items():
                if sizes.get(name) != sums.bytes:
                    raise CheckpointError(f"{name} has {sizes.get(name, 'no')} bytes instead of {sums.bytes}")

    # --- reading -----------------------------------------------------------------------------------------------------

    def read(self, run: str, mine: NDArray[Any], tables: Collection[str] = ()) -> Iterator[Loaded]:
        """Read the rows of the requested buckets, shard by shard, verifying every block.

        ``mine``: nonzero for the requested buckets. ``tables``: only these; empty means all. Raises
        ``CheckpointError``; rows that were yielded before the error must then be discarded.
        """
        try:
            yield from CheckpointReader(self._files, self.chain(run), mine, tables).pieces()
        except OSError as error:
            raise CheckpointError(f"{self._files.path(run)}: unreadable: {why(error)}") from error
        except CheckpointError as error:
            self._bad[run] = str(error)
            raise CheckpointError(f"{self._files.path(run)}: {error}") from error

    def restore(
        self, run: str, mine: NDArray[Any], put: Callable[[Loaded], object], *, threads: int = RESTORE_THREADS
    ) -> str:
        """Read the rows of the requested buckets and pass them to ``put``, once per shard, from several threads
        (0: from the calling one).

        Returns JSON with ``run``, ``rows``, ``bytes`` and ``seconds``. Raises ``CheckpointError``.
        """
        began_s = self._now_s()
        rows = size = 0

        def counted() -> Iterator[Loaded]:
            nonlocal rows, size
            for piece in self.read(run, mine):
                rows += sum(len(some.keys) for some in piece.rows.values())
                size += sum(some.weights.nbytes + some.state.nbytes for some in piece.rows.values())
                yield piece

        if threads:
            _in_parallel(counted(), put, threads)
        else:
            for piece in counted():
                put(piece)
        self._restored, self._completed = run, 0
        self._written.clear()
        self._whole_bytes = self._changed_bytes = 0
        return json.dumps({"run": run, "rows": rows, "bytes": size, "seconds": round(self._now_s() - began_s, 3)})

    # --- evicted rows ------------------------------------------------------------------------------------------------

    def write_evicted(self) -> None:
        """Write the evicted rows that are buffered. Raises ``OSError``."""
        self.evicted.write(self.server)

    # --- deleting ----------------------------------------------------------------------------------------------------

    def _prune(self) -> None:
        whole: list[list[Complete]] = []
        broken: list[tuple[int, str]] = []
        for number, run in self._runs():
            try:
                whole.append(self.chain(run))
            except CheckpointError:
                broken.append((number, run))
        kept = {one.run for chain in whole[: self._keep] for one in chain}
        if self._restored and self._completed < self._keep:
            with contextlib.suppress(CheckpointError):
                kept |= {one.run for one in self.chain(self._restored)}
        surplus = [chain[0].run for chain in whole if chain[0].run not in kept]
        if len(whole) >= self._keep:
            oldest = whole[self._keep - 1][0].manifest.checkpoint
            surplus += [run for number, run in broken if number < oldest and run not in kept]
        self._deletions.delete(sorted(surplus))

    def _delete(self, run: str) -> None:
        """Delete the manifest first, so that a half-deleted checkpoint does not look complete. If it is a link, delete
        only the link, not what it leads to."""
        self._seen.pop(run, None)
        if is_link(self._files, run):
            self._files.remove(run)
            return
        self._files.remove(f"{run}/{layout.manifest_file(run)}")
        for entry in self._files.entries(run):
            if entry.link or not entry.folder:
                self._files.remove(f"{run}/{entry.name}")
        self._files.remove(run)


def _in_parallel(pieces: Iterable[Loaded], put: Callable[[Loaded], object], threads: int) -> None:
    """Pass all pieces to ``put``, holding no more of them than there are threads."""
    with ThreadPoolExecutor(threads, "edl-ps-restore") as pool:
        under_way: set[Future[object]] = set()
        for piece in pieces:
            under_way.add(pool.submit(put, piece))
            if len(under_way) > threads:
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for one in done:
                    one.result()
        for one in under_way:
            one.result()
