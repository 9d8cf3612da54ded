"""The checkpoint directory: a crash at any instruction leaves a complete checkpoint or none.

    edl.json                                    the owner of the directory (``DirectoryOwner``)
    commit-0000000123.era-0000000004/
        state.safetensors                       the state; if sharded, ``state-00000-of-00004.safetensors`` …
        DONE                                    the manifest, written last: job, version, size and checksum of each file

A folder without ``DONE`` does not count. ``DONE`` is deleted first when a checkpoint is deleted. The file of a state is
not replaced, because several nodes may write the same commit.
All calls block; ``MemoryCheckpoints`` calls from threads.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from edl.checkpoint.directory import manifest as text
from edl.checkpoint.directory.disk_space import DiskSpace
from edl.checkpoint.directory.failures import cannot_read, cannot_write, is_full, why
from edl.checkpoint.directory.folders import Folders
from edl.checkpoint.directory.manifest import (
    MANIFEST_FILE,
    OWNER_FILE,
    DirectoryOwner,
    Retention,
    StateManifest,
    Sum,
    folder_name,
)
from edl.checkpoint.directory.retention import Pruning
from edl.checkpoint.directory.shard_files import ShardFiles, shard_of
from edl.checkpoint.directory.state_file import StateFile
from edl.checkpoint.directory.summed_files import SummedFiles
from edl.errors import CheckpointError, JobConflict
from edl.ports import Files
from edl.wire.records import Version
from edl.wire.snapshot import parse

VERIFIERS = 4
"""Threads that verify a sharded checkpoint before it is used."""
PROBE = ".probe-"
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class WriterIdentity:
    """The job and run in whose name a checkpoint storage writes."""

    job: str
    run: str
    """The same for all launchers of a run; different for each run."""


class FileCheckpointStorage:
    """One checkpoint directory, as used by one launcher. All calls block."""

    def __init__(
        self,
        files: Files,
        writer: WriterIdentity,
        retention: Retention,
        *,
        wall_clock_s: Callable[[], float],
        say: Callable[[str], None],
        adopt: bool = False,
    ) -> None:
        """``adopt``: accept another job's directory and checkpoints. ``say`` takes warnings, from any thread."""
        self._files = files
        self._writer = writer
        self._wall_clock_s = wall_clock_s
        self._say = say
        self._adopt = adopt
        self._lock = threading.Lock()
        self._probes = f"{PROBE}{writer.run}-"
        self._claimed = False
        self._lost = ""
        self._bad: dict[Version, str] = {}
        """Checkpoints with corrupt files, which only reading them completely reveals."""
        self._said: set[tuple[Version, str]] = set()
        self._folders = Folders(files)
        self._room = DiskSpace(files, say)
        self._pruning = Pruning(files, self._folders, self._room, writer.job, retention, self._inspect, self._bad, say)
        self._summed = SummedFiles(files)
        self._whole = StateFile(
            files, self._summed, self._folders, self._manifest, self._write_manifest, self._bad, say
        )
        self._parts = ShardFiles(files, self._summed, self._manifest, self._folders.delete)

    # --- start of a run ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Call once at the start: create and probe the directory, and claim it for this run.

        A full disk does not keep a launcher from joining a run that is already training. Raises ``CheckpointError``
        when the directory is not writable, ``JobConflict`` when it belongs to another job.
        """
        with self._lock:
            try:
                self._claim(probe=True)
            except OSError as error:
                trouble = cannot_write(self._files, error, 1)
                if not (is_full(error) and self._is_under_way()):
                    raise trouble from error
                self._say(f"{trouble}. No checkpoints are written until then")

    def folder(self, version: Version) -> str:
        """Path or URL of a checkpoint's folder."""
        return self._files.path(folder_name(version))

    # --- writing -----------------------------------------------------------------------------------------------------

    def write(self, version: Version, snapshot: memoryview, shard: int = 0, shards: int = 1) -> str:
        """Write a state, or one part of it, then delete surplus checkpoints. Returns the folder.

        The last of several parts completes the checkpoint; the parts may be written by several nodes and threads.
        Returns "" while parts are missing. Does nothing if the commit is already there. Raises ``CheckpointError`` if
        this one could not be written; later ones may succeed, unless another run has taken over the directory.
        """
        data = snapshot.cast("B")
        if shards > 1:
            return self._write_part(version, data, shard, shards)
        with self._lock:
            with self._explained(len(data)):
                self._claim()
                drop = self._pruning.drop_surplus
                self._room.write(len(data), lambda: self._whole.write(version, data), drop)
            self._wrote(version)
        return self.folder(version)

    def accept(self, version: Version, size: int, crc32: int) -> str:
        """Verify and complete a checkpoint whose state file a worker has written itself. Returns the folder. Raises
        ``CheckpointError``."""
        folder, name, expected = folder_name(version), text.state_file(0, 1), Sum(size, crc32)
        with self._lock:
            with self._explained(size):
                self._claim()
                self._check(f"{folder}/{name}", name, expected)
                manifest = self._manifest(version, 1, {name: expected})
                # The worker may have described a file that was there already: a damaged one, or another job's.
                text.check_header(self._summed.meta(f"{folder}/{name}", size), manifest, 0)
                self._write_manifest(folder, manifest)
            self._wrote(version)
        return self.folder(version)

    def _write_part(self, version: Version, data: memoryview, shard: int, shards: int) -> str:
        """Writes without the lock: several parts of one node may be written at once."""
        with self._lock, self._explained(0):
            self._claim()
        with self._explained(len(data)):
            try:
                self._room.write(len(data), lambda: self._parts.write(version, data, shard, shards), self._free_space)
            except OSError:
                self._parts.give_up(version)
                raise
        return self.complete(version, shards) or ""

    def complete(self, version: Version, shards: int) -> str | None:
        """Complete a checkpoint if all of its parts are there. Returns the folder; "" if it was already complete, None
        while parts are missing. Raises ``CheckpointError``."""
        with self._lock:
            with self._explained(0):
                sums = self._parts.all(version, shards)
                if not sums:
                    return None if sums is None else ""
                self._write_manifest(folder_name(version), self._manifest(version, shards, sums))
            self._wrote(version)
        return self.folder(version)

    def _free_space(self) -> bool:
        with self._lock:
            return self._pruning.drop_surplus()

    @contextlib.contextmanager
    def _explained(self, needed: int) -> Iterator[None]:
        """Turn errors during training into ``CheckpointError``: they cost a checkpoint, never the job."""
        try:
            yield
        except OSError as error:
            raise cannot_write(self._files, error, needed) from error
        except JobConflict as error:
            raise CheckpointError(str(error)) from error

    def _write_manifest(self, folder: str, new: StateManifest) -> None:
        """Write the manifest, the last step of every checkpoint. The ownership is checked again, since the last check
        may be long ago."""
        self._claim()
        self._files.write(f"{folder}/{MANIFEST_FILE}", [text.manifest_text(new)])

    def _manifest(self, version: Version, shards: int, sums: dict[str, Sum]) -> StateManifest:
        now = datetime.datetime.fromtimestamp(self._wall_clock_s(), datetime.timezone.utc)
        return StateManifest(
            self._writer.job, self._writer.run, version, shards, sums, now.isoformat(timespec="seconds")
        )

    def _wrote(self, version: Version) -> None:
        self._bad.pop(version, None)
        self._pruning.wrote(version)

    # --- ownership ---------------------------------------------------------------------------------------------------

    def _claim(self, *, probe: bool = False) -> None:
        """Make sure that this run owns the directory. Once ownership is lost, always raises ``JobConflict``."""
        if self._lost:
            raise JobConflict(self._lost)
        for attempt in range(ATTEMPTS):
            try:
                if probe:
                    self._probe()
                self._take()
            except FileNotFoundError:  # another launcher's cleanup deleted a half-written file
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
            self._files.write(OWNER_FILE, [text.owner_text(DirectoryOwner(job, run))])
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

    def _is_under_way(self) -> bool:
        """Whether other launchers of this run have claimed the directory."""
        owner = self._owner()
        return owner is not None and (owner.job, owner.run) == (self._writer.job, self._writer.run)

    def _owner(self) -> DirectoryOwner | None:
        """The owner; None if there is none, or if its file is truncated, as can happen in an object store."""
        try:
            return text.parse_owner(self._files.read(OWNER_FILE))
        except FileNotFoundError:
            return None
        except CheckpointError as error:
            raise CheckpointError(
                f"cannot determine the owner of the checkpoint directory {self._files.where}: {error}"
            ) from None

    def _refuse_foreign(self) -> None:
        """Without an owner's file, the checkpoints show whose directory it is. Raises ``JobConflict``."""
        for version in self._folders.versions() if not self._adopt else ():
            job = self._folders.job_of(version)
            if job not in ("", self._writer.job):
                raise JobConflict(
                    f"the checkpoint directory {self._files.where} holds checkpoints of job {job}, this is job "
                    f"{self._writer.job}: choose another --checkpoint-dir, or continue that job's state with "
                    "--adopt-checkpoint"
                )

    def _probe(self) -> None:
        name, data = f"{self._probes}{secrets.token_hex(4)}", b"edl checks whether it can write here\n"
        try:
            self._files.write(name, [data])
            if self._files.read(name) != data:
                raise CheckpointError(f"{self._files.where} does not return what was just written to it")
        finally:
            self._files.remove(name)

    def _tidy(self) -> None:
        """Delete what earlier runs left unfinished. Only the first launcher of a run does this, before it writes."""
        left: list[Version] = []
        try:
            for version in self._folders.versions():
                with contextlib.suppress(CheckpointError):
                    if self._inspect(version) is None:
                        left.append(version)
            self._pruning.delete(left)
            for entry in self._files.entries():
                if entry.name.startswith(PROBE) and not entry.name.startswith(self._probes):
                    self._files.remove(entry.name)
        except OSError as error:
            self._say(f"cannot remove what an earlier run left in {self._files.where}: {why(error)}")

    # --- reading -----------------------------------------------------------------------------------------------------

    def newest(self) -> tuple[Version, bool] | None:
        """The newest checkpoint that looks usable (its content has not been read), and whether it is sharded, so that
        the workers read it themselves. None if there is none at all. Raises ``CheckpointError`` if there are some but
        none is usable."""
        refused: list[tuple[str, str]] = []
        for version in self._listed():
            found = self._usable(version, refused)
            if found is not None:
                return version, found.shards != 1
        self._give_up(refused)
        return None

    def read(self, version: Version | None, allocate: Callable[[int], memoryview], shard: int = 0) -> Version:
        """Read a checkpoint's state, or one part of it, and verify every byte. Returns its version.

        ``version`` None means the newest usable one. ``allocate`` returns memory for the given number of bytes; it is
        called again, and the earlier memory is discarded, when a checkpoint is refused and an older one tried.
        """
        candidates = self._listed() if version is None else [version]
        found = self._first(candidates, lambda one: self._load(one, allocate, shard))
        if found is None:
            missing = self.folder(version) if version else f"in {self._files.where}"
            raise CheckpointError(f"there is no complete checkpoint {missing}")
        return found.version

    def load(self, allocate: Callable[[int], memoryview]) -> tuple[Version, bool]:
        """Load the newest usable checkpoint and verify every byte; returns its version and whether it is sharded. All
        files of a sharded one are verified but not kept, since the workers read them; any other is read into memory as
        by ``read``."""

        def take(found: StateManifest) -> None:
            if found.shards == 1:
                self._load(found, allocate, 0)
            else:
                self._verify(found)

        found = self._first(self._listed(), take)
        if found is None:
            raise CheckpointError(f"there is no complete checkpoint in {self._files.where}")
        return found.version, found.shards > 1

    def _first(self, candidates: Iterable[Version], take: Callable[[StateManifest], None]) -> StateManifest | None:
        """The first candidate that is usable and that ``take`` accepts; None if there are no complete ones. Raises
        ``CheckpointError`` if there are some but all are refused."""
        refused: list[tuple[str, str]] = []
        for version in candidates:
            found = self._usable(version, refused)
            if found is None:
                continue
            try:
                take(found)
            except CheckpointError as error:
                self._refuse(version, str(error), refused)
            else:
                return found
        self._give_up(refused)
        return None

    def verify(self, version: Version) -> None:
        """Read all files of a checkpoint and compare their checksums. Raises ``CheckpointError``."""
        refused: list[tuple[str, str]] = []
        found = self._usable(version, refused)
        if found is None:
            raise CheckpointError(f"there is no complete checkpoint {self.folder(version)}")
        try:
            self._verify(found)
        except CheckpointError as error:
            self._refuse(version, str(error), refused)
            raise

    def _verify(self, found: StateManifest) -> None:
        def check(item: tuple[str, Sum]) -> CheckpointError | None:
            name, expected = item
            try:
                self._verify_file(found, name, expected)
            except CheckpointError as error:
                return error
            return None

        files = sorted(found.files.items())
        try:
            with ThreadPoolExecutor(VERIFIERS, "edl-verify") as pool:
                error = next(filter(None, pool.map(check, files)), None)
        except RuntimeError:  # the system allows no further thread at present
            error = next(filter(None, map(check, files)), None)
        if error is not None:
            raise error

    def _listed(self) -> list[Version]:
        try:
            return sorted(self._folders.versions(), reverse=True)
        except OSError as error:
            raise cannot_read(self._files, error) from error

    def _usable(self, version: Version, refused: list[tuple[str, str]]) -> StateManifest | None:
        """A checkpoint's manifest if nothing looks wrong; None if it is refused or incomplete."""
        try:
            found = self._inspect(version)
            if found is not None:
                if found.job != self._writer.job and not self._adopt:
                    raise CheckpointError(text.why_other_job(found.job, self._writer.job))
                if version in self._bad or text.why_old_parts(found):
                    raise CheckpointError(self._bad.get(version) or text.why_old_parts(found))
        except CheckpointError as error:
            self._refuse(version, str(error), refused)
            return None
        return found

    def _inspect(self, version: Version) -> StateManifest | None:
        """The manifest, or None without one. Raises ``CheckpointError`` when it does not match the files."""
        folder = folder_name(version)
        try:
            sizes = self._folders.content(folder).sizes
            if MANIFEST_FILE not in sizes:
                return None
            data = self._files.read(f"{folder}/{MANIFEST_FILE}")
        except OSError as error:
            raise CheckpointError(f"unreadable: {why(error)}") from error
        if self._files.remote and text.is_truncated(data):  # where files appear atomically, truncation means damage
            return None
        found = text.parse_manifest(data)
        if found.version != version:
            raise CheckpointError(f"its manifest says {folder_name(found.version)}")
        if found.job != self._writer.job and not self._adopt:
            return found  # that alone is a reason to refuse it
        problem = text.why_sizes_differ(found, sizes)
        if problem:
            raise CheckpointError(problem)
        return found

    def _load(self, found: StateManifest, allocate: Callable[[int], memoryview], shard: int) -> None:
        name = text.state_file(shard, found.shards)
        if name not in found.files:
            raise CheckpointError(f"it has no {name}")
        expected = found.files[name]
        buffer = allocate(expected.bytes).cast("B")[: expected.bytes]
        if len(buffer) < expected.bytes:
            raise ValueError(f"asked for {expected.bytes} bytes of memory and got {len(buffer)}")
        self._verify_file(found, name, expected, buffer)

    def _verify_file(self, found: StateManifest, name: str, expected: Sum, into: memoryview | None = None) -> None:
        """Read a file of a checkpoint and verify it. Raises ``CheckpointError``.

        Wrong content is remembered; a file that could not be read may be readable the next time.
        """
        path = f"{folder_name(found.version)}/{name}"
        try:
            self._check(path, name, expected, into)
            meta = self._summed.meta(path, expected.bytes) if into is None else parse(into).meta
            text.check_header(meta, found, shard_of(name, found.shards))
        except OSError as error:
            raise CheckpointError(f"{name} is unreadable: {why(error)}") from error
        except CheckpointError as error:
            self._bad[found.version] = str(error)
            raise

    def _check(self, path: str, name: str, expected: Sum, into: memoryview | None = None) -> None:
        """Verify a file, reading it a second time if the first result is wrong: the disk or the transfer may have
        failed once. Raises ``CheckpointError``, and ``OSError`` if it cannot be read."""
        try:
            if self._summed.sum(path, expected.bytes, into) == expected:
                return
        except OSError as error:
            trouble = why(error)
        else:
            trouble = "the checksum was wrong"
        self._files.forget(path)
        again = self._summed.sum(path, expected.bytes, into)
        self._compare(name, again, expected)
        self._say(f"{self._files.path(path)} was read incorrectly once ({trouble}): check the disk")

    def _compare(self, name: str, actual: Sum, expected: Sum) -> None:
        if actual.bytes < expected.bytes:
            raise CheckpointError(f"{name} is truncated: {actual.bytes} of {expected.bytes} bytes")
        if actual.crc32 != expected.crc32:
            raise CheckpointError(
                f"the checksum of {name} differs: {actual.crc32:08x}, its manifest says {expected.crc32:08x}"
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
                "Repair them, or move these folders away to start without them"
            )
