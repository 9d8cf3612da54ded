"""Checkpoints to write and read in tests, and disks and stores that fail at a chosen operation."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from edl.checkpoint.directory.manifest import Retention
from edl.checkpoint.directory.writer import FileCheckpointStorage, WriterIdentity
from edl.ports import FileEntry, Files
from edl.wire import snapshot
from edl.wire.records import Version

JOB = "job"


def state(
    commit: int, era: int = 1, *, size: int = 1000, job: str = JOB, round_: int = 1, part: int = 0, of: int = 1
) -> bytes:
    """A snapshot whose every byte of data tells its commit."""
    meta = snapshot.Meta(job, era, commit, round_, part, of, "none")
    plan = snapshot.plan([("x", "U8", (size,), size)], meta, {"x": 0})
    buffer = bytearray(plan.size)
    plan.write_header(memoryview(buffer))
    ((_, offset, _),) = plan.leaves
    buffer[offset:] = bytes([commit % 251]) * size
    return bytes(buffer)


def save(checkpoint_storage: FileCheckpointStorage, commit: int, era: int = 1, **options: Any) -> str:
    """Write a state made by ``state``."""
    return checkpoint_storage.write(Version(era, commit), memoryview(state(commit, era, **options)))


class Memory:
    """A target that ``read`` restores a state into."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.asked: list[int] = []

    def __call__(self, size: int) -> memoryview:
        self.asked.append(size)
        self.data = bytearray(size)
        return memoryview(self.data)


def load(
    checkpoint_storage: FileCheckpointStorage, version: Version | None = None, shard: int = 0
) -> tuple[Version, bytes]:
    """Read a state and make sure that all of it is of one commit."""
    memory = Memory()
    found = checkpoint_storage.read(version, memory, shard)
    parsed = snapshot.parse(memory.data)
    (entry,) = parsed.entries.values()
    assert (parsed.meta.era, parsed.meta.commit) == (found.era, found.commit)
    assert set(memory.data[entry.offset :]) == {found.commit % 251}
    return found, bytes(memory.data)


def open_checkpoint_storage(
    files: Files,
    run: str = "run",
    *,
    job: str = JOB,
    keep: int = 3,
    every: int = 0,
    adopt: bool = False,
    said: list[str] | None = None,
) -> FileCheckpointStorage:
    """A checkpoint storage whose warnings are kept in ``said``."""
    notes = [] if said is None else said
    retention = Retention(keep, every)
    return FileCheckpointStorage(
        files, WriterIdentity(job, run), retention, wall_clock_s=lambda: 0.0, say=notes.append, adopt=adopt
    )


class Crash(BaseException):
    """The process ends here; nothing after it happens."""


class Fault:
    """Counts operations that change something, and makes one of them fail."""

    def __init__(self, at: int = -1, error: OSError | None = None, *, halfway: bool = False) -> None:
        """``error``: that one operation raises it, and things go on. Without one the process dies there."""
        self.at = at
        self.error = error
        self.halfway = halfway
        self.count = 0
        self.log: list[str] = []
        self.dead = False

    def here(self, what: str) -> bool:
        """True if this operation is the one that must fail."""
        if self.dead:
            raise Crash
        self.count += 1
        self.log.append(what)
        return self.count - 1 == self.at

    def strike(self) -> None:
        if self.error is not None:
            raise self.error
        self.dead = True
        raise Crash

    def step(self, what: str) -> None:
        if self.here(what):
            self.strike()


class Disk:
    """Stands in for the module ``os`` in ``edl.adapters.files``: fails on demand, and knows what a power cut loses.

    Data are safe once their file is synced, names once their folder is.
    """

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._paths: dict[int, str] = {}
        self._unsynced_data: set[str] = set()
        self._unsynced_names: list[tuple[str, Callable[[], None]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            self.fault.step(f"create {path}")
            self._note(path, lambda: _gone(path))
            self._unsynced_data.add(path)
        descriptor = os.open(path, flags, mode)
        self._paths[descriptor] = path
        return descriptor

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def write(self, descriptor: int, data: memoryview) -> int:
        self._unsynced_data.add(self._paths[descriptor])
        if self.fault.here(f"write {self._paths[descriptor]}"):
            if self.fault.halfway:
                os.write(descriptor, data[: len(data) // 2])
            self.fault.strike()
        return os.write(descriptor, data[: max(1, len(data) * 2 // 3)])  # a short write, as a full pipe would do

    def fsync(self, descriptor: int) -> None:
        path = self._paths[descriptor]
        self.fault.step(f"sync {path}")
        if os.path.isdir(path):
            self._unsynced_names = [entry for entry in self._unsynced_names if entry[0] != path]
        self._unsynced_data.discard(path)

    def replace(self, source: str, target: str) -> None:
        self.fault.step(f"rename to {target}")
        before = Path(target).read_bytes() if os.path.exists(target) else None
        safe = source not in self._unsynced_data
        os.replace(source, target)
        if not safe:
            self._unsynced_data.add(target)

        def undo() -> None:
            os.replace(target, source)
            if before is not None:
                Path(target).write_bytes(before)

        self._note(target, undo)

    def link(self, source: str, target: str) -> None:
        self.fault.step(f"link {target}")
        os.link(source, target)
        if source in self._unsynced_data:
            self._unsynced_data.add(target)
        self._note(target, lambda: _gone(target))

    def unlink(self, path: str) -> None:
        self.fault.step(f"unlink {path}")
        content = Path(path).read_bytes()
        os.unlink(path)
        self._note(path, lambda: _write_back(path, content))

    def mkdir(self, path: str) -> None:
        self.fault.step(f"mkdir {path}")
        os.mkdir(path)
        self._note(path, lambda: shutil.rmtree(path, ignore_errors=True))

    def rmdir(self, path: str) -> None:
        self.fault.step(f"rmdir {path}")
        os.rmdir(path)
        self._note(path, lambda: os.makedirs(path, exist_ok=True))

    def unsynced_folders(self) -> list[str]:
        return sorted({folder for folder, _ in self._unsynced_names})

    def cut_power(self, lost_folders: Sequence[str]) -> None:
        """Lose all data not synced, and the names not synced of these folders."""
        for path in self._unsynced_data:
            with contextlib.suppress(FileNotFoundError):
                os.truncate(path, 0)
        for folder, undo in reversed(self._unsynced_names):
            if folder in lost_folders:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    undo()

    def _note(self, path: str, undo: Callable[[], None]) -> None:
        self._unsynced_names.append((os.path.dirname(path), undo))


def _gone(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _write_back(path: str, content: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Path(path).write_bytes(content)


class FaultyFiles:
    """Another ``Files`` that fails at one operation; a write may stop halfway and leave a part, as object stores do."""

    def __init__(self, inner: Files, fault: Fault) -> None:
        self._inner = inner
        self._fault = fault
        self.where = inner.where
        self.remote = inner.remote

    def path(self, name: str) -> str:
        return self._inner.path(name)

    def entries(self, folder: str = "") -> Sequence[FileEntry]:
        return self._inner.entries(folder)

    def stamp(self, name: str) -> str:
        return self._inner.stamp(name)

    def read(self, name: str) -> bytes:
        return self._inner.read(name)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        return self._inner.read_into(name, offset, buffer)

    def write(self, name: str, pieces: Iterable[bytes | memoryview], *, new: bool = False) -> str:
        if self._fault.here(f"write {name}"):
            if self._fault.halfway:
                data = b"".join(pieces)
                self._inner.write(name, [data[: len(data) // 2]])
            self._fault.strike()
        return self._inner.write(name, pieces, new=new)

    def sync(self, folder: str) -> None:
        self._fault.step(f"sync {folder}")
        self._inner.sync(folder)

    def remove(self, name: str) -> None:
        self._fault.step(f"remove {name}")
        self._inner.remove(name)

    def forget(self, name: str) -> None:
        """Does nothing: no files are kept."""

    def free_bytes(self) -> int | None:
        return self._inner.free_bytes()
