"""The checkpoint directory: written so that a crash at any instruction leaves a complete checkpoint or none.

    edl.json                                    who owns the directory (``marker.Owner``)
    commit-0000000123.era-0000000004/
        state.safetensors                       the state; or, of a sharded one, what the workers' framework wrote
        DONE                                    written last: job, version, size and checksum of each file

Without ``DONE`` a folder counts for nothing. It is the first to go when a checkpoint is deleted or written again.
Everything here blocks; the keeper calls it from threads.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edl.agent import marker as text
from edl.agent.marker import MARKER_FILE, OWNER_FILE, Marker, Owner, Retention, Sum, folder_name, folder_version
from edl.agent.trouble import cannot_read, cannot_write, why
from edl.errors import CheckpointError, JobConflict
from edl.ports import Files
from edl.wire.messages import Version
from edl.wire.snapshot import parse

CHUNK_BYTES = 8 << 20
"""Much larger, and the checksum reads from memory what the processor's cache would still have had."""
PROBE = ".probe-"
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Writer:
    """In whose name a vault writes."""

    job: str
    run: str
    """The same for all launchers of one run of the job, and another one for each run."""


@dataclass(frozen=True, slots=True)
class _Content:
    """What lies in a checkpoint's folder, temporary files left out of ``sizes``."""

    sizes: dict[str, int]
    everything: tuple[str, ...]
    """In an order in which it can be removed."""


class Vault:
    """One checkpoint directory, as one launcher uses it."""

    def __init__(
        self,
        files: Files,
        writer: Writer,
        retention: Retention,
        *,
        wall_clock_s: Callable[[], float],
        say: Callable[[str], None],
        adopt: bool = False,
    ) -> None:
        """``adopt``: another job's directory and checkpoints are welcome. ``say`` takes warnings, from any thread."""
        self._files = files
        self._writer = writer
        self._retention = retention
        self._wall_clock_s = wall_clock_s
        self._say = say
        self._adopt = adopt
        self._lock = threading.Lock()
        self._probes = f"{PROBE}{writer.run}-"
        self._claimed = False
        self._lost = ""
        self._bad: dict[Version, str] = {}
        """Checkpoints whose bytes were found to be wrong: seen only when all of them are read."""
        self._said: set[tuple[Version, str]] = set()
        self._ours: dict[Version, bool] = {}
        """Complete checkpoints seen so far, and whether this job wrote them; spares reading their markers again."""
        self._written: list[Version] = []

    # --- before anything else ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Once at the start: the directory can be made and written, and is this job's run's from now on.

        Raises ``CheckpointError`` when nothing can be written there, ``JobConflict`` when it is somebody else's.
        """
        with self._lock:
            try:
                self._claim(probe=True)
            except OSError as error:
                raise cannot_write(self._files, error, 1) from error

    def folder(self, version: Version) -> str:
        """Path or URL of a checkpoint's folder: where the workers write theirs, for ``finish``."""
        return self._files.path(folder_name(version))

    # --- writing -----------------------------------------------------------------------------------------------------

    def write(self, version: Version, snapshot: memoryview, shard: int = 0, shards: int = 1) -> str:
        """Write a state, or one part of it, and then delete what is not to be kept. Returns where it lies.

        Of several parts the one that comes last completes the checkpoint; they may be written by several nodes. Writing
        what is there already does nothing. Raises ``CheckpointError``: this one could not be written, the next may; but
        none will after another run has taken over the directory.
        """
        folder = folder_name(version)
        data = snapshot.cast("B")
        with self._lock:
            with self._explained(len(data)):
                self._claim()
                if shards == 1:
                    self._write_whole(folder, version, data)
                else:
                    self._write_part(folder, version, data, shard, shards)
            self._wrote(version)
        return self._files.path(folder)

    def finish(self, folder: str, version: Version) -> str:
        """Complete a checkpoint whose files the workers have written themselves. Returns where it lies.

        ``folder``: as ``folder(version)`` says it, or only its last part.
        """
        name = folder.rstrip("/").rpartition("/")[2]
        if name != folder_name(version):
            raise CheckpointError(f"{folder} is not the folder of this commit, which is {self.folder(version)}")
        with self._lock:
            with self._explained(0):
                self._claim()
                self._files.sync(name)
                sizes = self._content(name).sizes
                sums = {file: self._sum(f"{name}/{file}", sizes[file]) for file in sizes if file != MARKER_FILE}
                if not sums:
                    raise CheckpointError(f"no files to complete in {self.folder(version)}")
                if not self._says(version, sums):
                    self._mark(name, self._marker(version, 0, sums))
            self._wrote(version)
        return self._files.path(name)

    @contextlib.contextmanager
    def _explained(self, needed: int) -> Iterator[None]:
        """What goes wrong while training runs is one kind of error: it costs a checkpoint, never the job."""
        try:
            yield
        except OSError as error:
            raise cannot_write(self._files, error, needed) from error
        except JobConflict as error:
            raise CheckpointError(str(error)) from error

    def _says(self, version: Version, sums: dict[str, Sum]) -> bool:
        """Whether the marker is there already and names just these files."""
        with contextlib.suppress(CheckpointError):
            found = self._inspect(version)
            return found is not None and (found.job, found.files) == (self._writer.job, sums)
        return False

    def _write_whole(self, folder: str, version: Version, snapshot: memoryview) -> None:
        name = text.state_file(0, 1)
        if self._stays(folder, version, name, snapshot):
            return
        self._files.remove(f"{folder}/{MARKER_FILE}")
        try:
            written = self._put(f"{folder}/{name}", snapshot)
            self._mark(folder, self._marker(version, 1, {name: written}))
        except (OSError, JobConflict):
            with contextlib.suppress(OSError):  # it takes up room, and nobody will finish it
                self._delete(folder)
            raise

    def _write_part(self, folder: str, version: Version, snapshot: memoryview, shard: int, shards: int) -> None:
        name, record = text.state_file(shard, shards), text.part_file(shard, shards)
        if self._stays(folder, version, name, snapshot):
            return
        for stale in (MARKER_FILE, record):
            self._files.remove(f"{folder}/{stale}")
        part = self._marker(version, shards, {name: self._put(f"{folder}/{name}", snapshot)})
        self._files.write(f"{folder}/{record}", [text.marker_text(part)])
        parts = self._parts(folder, version, shards)
        if len(parts) == shards:
            self._mark(folder, self._marker(version, shards, parts))

    def _parts(self, folder: str, version: Version, shards: int) -> dict[str, Sum]:
        """The parts that are there and were written by this run."""
        found: dict[str, Sum] = {}
        sizes = self._content(folder).sizes
        for shard in range(shards):
            name = text.part_file(shard, shards)
            if name not in sizes:
                break
            with contextlib.suppress(CheckpointError):
                part = text.parse_marker(self._files.read(f"{folder}/{name}"))
                fits = (part.run, part.version, part.shards) == (self._writer.run, version, shards)
                if fits and not text.why_sizes_differ(part, sizes):
                    found.update(part.files)
        return found

    def _stays(self, folder: str, version: Version, name: str, snapshot: memoryview) -> bool:
        """Whether this commit is there already, whole. Raises when what is there is another job's.

        With other bytes too: a version names one state, and to replace it would mean to be without it for a while.
        """
        content = self._content(folder)
        if MARKER_FILE not in content.sizes:
            return False
        try:
            old = text.parse_marker(self._files.read(f"{folder}/{MARKER_FILE}"))
        except CheckpointError:
            return False
        if old.job != self._writer.job:
            raise CheckpointError(
                f"{self._files.path(folder)} was written by job {old.job} and is not replaced: "
                "choose another --checkpoint-dir"
            )
        if old.version != version or text.why_sizes_differ(old, content.sizes):
            return False
        if version not in self._bad and old.files.get(name) == Sum(len(snapshot), zlib.crc32(snapshot)):
            return True
        if any(self._sum(f"{folder}/{file}", entry.bytes) != entry for file, entry in old.files.items()):
            return False
        self._say(f"{self._files.path(folder)} is there already with other content, and stays")
        return True

    def _put(self, name: str, snapshot: memoryview) -> Sum:
        crc = 0

        def pieces() -> Iterator[memoryview]:
            nonlocal crc
            for start in range(0, len(snapshot), CHUNK_BYTES):
                piece = snapshot[start : start + CHUNK_BYTES]
                crc = zlib.crc32(piece, crc)
                yield piece

        self._files.write(name, pieces())
        return Sum(len(snapshot), crc)

    def _mark(self, folder: str, new: Marker) -> None:
        """Last step of every checkpoint. The owner is looked up again: the one before may have been long ago."""
        self._claim()
        self._files.write(f"{folder}/{MARKER_FILE}", [text.marker_text(new)])

    def _marker(self, version: Version, shards: int, sums: dict[str, Sum]) -> Marker:
        now = datetime.datetime.fromtimestamp(self._wall_clock_s(), datetime.timezone.utc)
        return Marker(self._writer.job, self._writer.run, version, shards, sums, now.isoformat(timespec="seconds"))

    def _wrote(self, version: Version) -> None:
        self._bad.pop(version, None)
        self._ours.pop(version, None)
        self._written = [*(old for old in self._written if old != version), version][-2:]
        try:
            self._prune()
        except OSError as error:  # the checkpoint is safe; room is a matter of another day
            self._say(f"cannot delete old checkpoints in {self._files.where}: {why(error)}")

    # --- whose it is -------------------------------------------------------------------------------------------------

    def _claim(self, *, probe: bool = False) -> None:
        """Make sure that the directory is this run's. Raises ``JobConflict`` for ever after it has been lost."""
        if self._lost:
            raise JobConflict(self._lost)
        for attempt in range(ATTEMPTS):
            try:
                if probe:
                    self._probe()
                self._take()
            except FileNotFoundError:  # another launcher tidied up and took a half-written file for an old one
                if attempt == ATTEMPTS - 1:
                    raise
            else:
                self._claimed = True
                return

    def _take(self) -> None:
        owner = self._owner()
        job, run = self._writer.job, self._writer.run
        if owner is None:
            self._refuse_foreign()
            self._files.write(OWNER_FILE, [text.owner_text(Owner(job, run))])
        elif (owner.job, owner.run) != (job, run):
            if self._claimed or run in owner.before:
                another = f"another run of job {job}" if owner.job == job else f"job {owner.job}"
                self._lost = (
                    f"{another} has taken over the checkpoint directory {self._files.where}: this run writes no more "
                    "checkpoints. End one of the two, or give each its own --checkpoint-dir"
                )
                raise JobConflict(self._lost)
            if owner.job != job and not self._adopt:
                raise JobConflict(
                    f"the checkpoint directory {self._files.where} belongs to job {owner.job}, this is job {job}: "
                    "choose another --checkpoint-dir, or continue that job's state with --adopt-checkpoint"
                )
            self._files.write(OWNER_FILE, [text.owner_text(owner.succeeded_by(job, run))])
            if owner.job == job:
                self._tidy()

    def _owner(self) -> Owner | None:
        """None when nobody owns the directory, or the write of that file was broken off, as it can be in a store."""
        try:
            return text.parse_owner(self._files.read(OWNER_FILE))
        except FileNotFoundError:
            return None
        except CheckpointError as error:
            raise CheckpointError(
                f"cannot tell who owns the checkpoint directory {self._files.where}: {error}"
            ) from None

    def _refuse_foreign(self) -> None:
        """Without an owner's file the checkpoints tell whose directory it is."""
        for version in self._versions() if not self._adopt else ():
            job = self._job_of(version)
            if job not in ("", self._writer.job):
                raise JobConflict(
                    f"the checkpoint directory {self._files.where} holds checkpoints of job {job}, this is job "
                    f"{self._writer.job}: choose another --checkpoint-dir, or continue that job's state with "
                    "--adopt-checkpoint"
                )

    def _probe(self) -> None:
        name, data = f"{self._probes}{secrets.token_hex(4)}", b"edl looks whether it can write here\n"
        try:
            self._files.write(name, [data])
            if self._files.read(name) != data:
                raise CheckpointError(f"{self._files.where} does not return what was written there")
        finally:
            self._files.remove(name)

    def _tidy(self) -> None:
        """Remove what earlier runs left half-done. Only the first launcher of a run does it, before it writes."""
        try:
            for version in self._versions():
                with contextlib.suppress(CheckpointError):
                    if self._inspect(version) is None:
                        self._delete(folder_name(version))
            for entry in self._files.entries():
                if entry.name.startswith(PROBE) and not entry.name.startswith(self._probes):
                    self._files.remove(entry.name)
        except OSError as error:
            self._say(f"cannot remove what an earlier run left in {self._files.where}: {why(error)}")

    # --- reading -----------------------------------------------------------------------------------------------------

    def newest(self) -> tuple[Version, bool] | None:
        """The newest checkpoint that looks usable (its bytes have not been read), and whether the workers have to read
        it themselves. None when there is none at all; ``CheckpointError`` when there are some and all are refused."""
        refused: list[tuple[str, str]] = []
        for version in self._listed():
            found = self._usable(version, refused)
            if found is not None:
                return version, found.shards != 1
        self._give_up(refused)
        return None

    def read(self, version: Version | None, allocate: Callable[[int], memoryview], shard: int = 0) -> Version:
        """Read a checkpoint's state, or one part of it, and check every byte. Returns which one it was.

        Without a version the newest usable one. ``allocate`` makes room for so many bytes; it is called again, and the
        room before is of no use, when what was read is refused and an older one is tried.
        """
        refused: list[tuple[str, str]] = []
        for candidate in self._listed() if version is None else [version]:
            found = self._usable(candidate, refused)
            if found is None:
                continue
            try:
                self._load(found, allocate, shard)
            except CheckpointError as error:
                self._refuse(candidate, str(error), refused)
            else:
                return candidate
        self._give_up(refused)
        missing = self.folder(version) if version else f"in {self._files.where}"
        raise CheckpointError(f"there is no complete checkpoint {missing}")

    def verify(self, version: Version) -> None:
        """Read all files of a checkpoint and compare their checksums: for those that the workers read themselves.

        Raises ``CheckpointError``.
        """
        refused: list[tuple[str, str]] = []
        found = self._usable(version, refused)
        if found is None and not refused:
            raise CheckpointError(f"there is no complete checkpoint {self.folder(version)}")
        for name, expected in found.files.items() if found else ():
            try:
                self._compare(name, self._sum(f"{folder_name(version)}/{name}", expected.bytes), expected)
            except (OSError, CheckpointError) as error:
                reason = f"unreadable: {why(error)}" if isinstance(error, OSError) else str(error)
                self._refuse(version, reason, refused)
                break
        self._give_up(refused)

    def _listed(self) -> list[Version]:
        try:
            return sorted(self._versions(), reverse=True)
        except OSError as error:
            raise cannot_read(self._files, error) from error

    def _versions(self) -> list[Version]:
        found = (folder_version(entry.name) for entry in self._files.entries() if entry.folder)
        return [version for version in found if version is not None]

    def _usable(self, version: Version, refused: list[tuple[str, str]]) -> Marker | None:
        """The marker of a checkpoint with nothing wrong so far; None when it is refused, or was never completed."""
        try:
            found = self._inspect(version)
            if found is not None:
                if found.job != self._writer.job and not self._adopt:
                    raise CheckpointError(text.why_other_job(found.job, self._writer.job))
                if version in self._bad:
                    raise CheckpointError(self._bad[version])
        except CheckpointError as error:
            self._refuse(version, str(error), refused)
            return None
        return found

    def _inspect(self, version: Version) -> Marker | None:
        """The marker, or None without one. Raises ``CheckpointError`` when it does not fit what lies beside it."""
        folder = folder_name(version)
        try:
            sizes = self._content(folder).sizes
            if MARKER_FILE not in sizes:
                return None
            data = self._files.read(f"{folder}/{MARKER_FILE}")
        except OSError as error:
            raise CheckpointError(f"unreadable: {why(error)}") from error
        if self._files.remote and text.broken_off(data):  # where files appear at once it is damage
            return None
        found = text.parse_marker(data)
        if found.version != version:
            raise CheckpointError(f"its marker says {folder_name(found.version)}")
        if found.job != self._writer.job and not self._adopt:
            return found  # that is reason enough
        problem = text.why_sizes_differ(found, sizes)
        if problem:
            raise CheckpointError(problem)
        return found

    def _load(self, found: Marker, allocate: Callable[[int], memoryview], shard: int) -> None:
        if found.shards == 0:
            raise CheckpointError("sharded by the workers' framework: only they can read it")
        name = text.state_file(shard, found.shards)
        if name not in found.files:
            raise CheckpointError(f"it has no {name}")
        expected = found.files[name]
        buffer = allocate(expected.bytes).cast("B")[: expected.bytes]
        if len(buffer) < expected.bytes:
            raise ValueError(f"asked for {expected.bytes} bytes of memory and got {len(buffer)}")
        path = f"{folder_name(found.version)}/{name}"
        try:
            actual = self._sum(path, expected.bytes, buffer)
            self._compare(name, actual, expected)
            text.check_header(parse(buffer).meta, found, shard)
        except OSError as error:
            raise CheckpointError(f"unreadable: {why(error)}") from error
        except CheckpointError as error:
            self._bad[found.version] = str(error)
            raise

    def _sum(self, path: str, size: int, into: memoryview | None = None) -> Sum:
        """Read a file, into the buffer of its size if there is one, and add it up."""
        crc = done = 0
        chunk = memoryview(bytearray(min(CHUNK_BYTES, size))) if into is None else into
        while done < size:
            start = 0 if into is None else done
            piece = chunk[start : start + min(CHUNK_BYTES, size - done)]
            count = self._files.read_into(path, done, piece)
            crc = zlib.crc32(piece[:count], crc)
            done += count
            if count < len(piece):
                break
        return Sum(done, crc)

    def _compare(self, name: str, actual: Sum, expected: Sum) -> None:
        if actual.bytes < expected.bytes:
            raise CheckpointError(f"{name} is truncated: {actual.bytes} of {expected.bytes} bytes")
        if actual.crc32 != expected.crc32:
            raise CheckpointError(
                f"the checksum of {name} differs: {actual.crc32:08x}, its marker says {expected.crc32:08x}"
            )

    def _refuse(self, version: Version, reason: str, refused: list[tuple[str, str]]) -> None:
        refused.append((folder_name(version), reason))
        if (version, reason) not in self._said:
            self._said.add((version, reason))
            self._say(f"checkpoint {self.folder(version)} is not used: {reason}")

    def _give_up(self, refused: list[tuple[str, str]]) -> None:
        if refused:
            raise CheckpointError(
                f"no checkpoint in {self._files.where} can be used:\n{text.each(refused, self._files.path)}\n"
                "Mend what is named, or move these folders away to begin without them"
            )

    # --- deleting ----------------------------------------------------------------------------------------------------

    def _prune(self) -> None:
        complete: list[Version] = []
        unfinished: list[Version] = []
        for version in self._versions():
            if version not in self._ours:
                self._sort_in(version, unfinished)
            if self._ours.get(version) and version not in self._bad:
                complete.append(version)
        unfinished += [version for version in self._bad if self._ours.get(version)]
        surplus = self._retention.surplus(complete, self._written)
        for version in [*surplus, *self._retention.overtaken(unfinished, complete)]:
            self._ours.pop(version, None)
            self._bad.pop(version, None)
            self._delete(folder_name(version))
        for entry in self._files.entries():  # not while a run begins, when many launchers may write that file
            if entry.name.startswith(f"{OWNER_FILE}.") and not entry.folder:
                self._files.remove(entry.name)

    def _sort_in(self, version: Version, unfinished: list[Version]) -> None:
        """Find out about a folder not known yet. One whose job nobody can tell is left alone, like a foreign one."""
        try:
            found = self._inspect(version)
        except CheckpointError:
            if self._job_of(version) == self._writer.job:
                unfinished.append(version)
            return
        if found is None:
            unfinished.append(version)
        else:
            self._ours[version] = found.job == self._writer.job

    def _job_of(self, version: Version) -> str:
        """Who wrote a checkpoint, by its marker; empty when that does not say."""
        with contextlib.suppress(CheckpointError, OSError):
            return text.parse_marker(self._files.read(f"{folder_name(version)}/{MARKER_FILE}")).job
        return ""

    def _delete(self, folder: str) -> None:
        """The marker first: what is half deleted must not look complete."""
        self._files.remove(f"{folder}/{MARKER_FILE}")
        for name in self._content(folder).everything:
            self._files.remove(f"{folder}/{name}")
        self._files.remove(folder)

    def _content(self, folder: str, below: str = "") -> _Content:
        sizes: dict[str, int] = {}
        everything: list[str] = []
        for entry in self._files.entries(f"{folder}/{below}".rstrip("/")):
            name = f"{below}{entry.name}"
            if entry.folder:
                inner = self._content(folder, f"{name}/")
                sizes.update(inner.sizes)
                everything += inner.everything
            elif not name.endswith(".tmp"):
                sizes[name] = entry.size
            everything.append(name)
        return _Content(sizes, tuple(everything))
