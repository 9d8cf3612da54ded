"""A simulated shared checkpoint directory. It can be slow, full, frozen or corrupt, and loses unsynced data in a crash.

A file becomes visible to other hosts once its content is written. Only once its folder is synced as well does it
survive a crash of the host that wrote it; ``write`` returns after that.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from edl.ports import FileEntry
from edl.testing.sim.timeline import Timeline


@dataclass(slots=True)
class _File:
    data: bytes
    stamp: int
    unsafe: str = ""
    """The host whose crash loses this content; empty once it is durable."""
    before: _File | None = None
    """The content after such a crash."""


class SimDisk:
    """The storage behind every host's ``SimFiles``, with its faults."""

    def __init__(self, timeline: Timeline, random: Callable[[], float]) -> None:
        self.full = False
        self.slowness = 1.0
        """Factor on the time of each access."""
        self.frozen_until_s = 0.0
        self.files: dict[str, _File] = {}
        self.lost = 0
        """Number of files that crashes have removed or reverted."""
        self._timeline, self._random = timeline, random
        self._stamps = 0

    def wait_s(self) -> float:
        """Duration of one access now, in seconds."""
        frozen_s = max(0.0, self.frozen_until_s - self._timeline.now_s)
        return frozen_s + self.slowness * (0.0002 + 0.004 * self._random() ** 3)

    def put(self, name: str, data: bytes, host: str) -> None:
        """Store a file that is not durable yet. Raises ``OSError`` if the disk is full."""
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device", name)
        self._stamps += 1
        self.files[name] = _File(data, self._stamps, host, self.files.get(name))

    def sync(self, name: str) -> None:
        """Make the file's current content durable."""
        file = self.files.get(name)
        if file is not None:
            file.unsafe, file.before = "", None

    def crash(self, host: str) -> None:
        """Discard the content that this host has not synced."""
        for name, file in list(self.files.items()):
            if file.unsafe == host:
                self.lost += 1
                if file.before is None:
                    del self.files[name]
                else:
                    self.files[name] = file.before

    def spoil(self, folder: str) -> None:
        """Flip one bit in the largest file of a folder."""
        names = [name for name in self.files if name.startswith(f"{folder}/")]
        name = max(names, key=lambda one: len(self.files[one].data))
        data = bytearray(self.files[name].data)
        data[-1] ^= 1
        self.files[name].data = bytes(data)


class SimFiles:
    """``edl.ports.Files`` of one host. ``sleep`` pauses the calling thread."""

    where = "disk"
    remote = False

    def __init__(self, disk: SimDisk, host: str, sleep: Callable[[float], object]) -> None:
        self._disk, self._host, self._sleep = disk, host, sleep

    def _wait(self) -> None:
        self._sleep(self._disk.wait_s())

    def path(self, name: str) -> str:
        """The file's path for messages."""
        return f"{self.where}/{name}"

    def entries(self, folder: str = "") -> Sequence[FileEntry]:
        """A folder's files and folders, sorted by name."""
        self._wait()
        prefix, found = f"{folder}/" if folder else "", dict[str, FileEntry]()
        for name, file in self._disk.files.items():
            if name.startswith(prefix):
                first, _, rest = name[len(prefix) :].partition("/")
                found[first] = FileEntry(first, 0, True) if rest else FileEntry(first, len(file.data))
        return sorted(found.values(), key=lambda one: one.name)

    def stamp(self, name: str) -> str:
        """A string that changes with each write of the file; empty if there is none."""
        self._wait()
        file = self._disk.files.get(name)
        return str(file.stamp) if file is not None else ""

    def read(self, name: str) -> bytes:
        """The file's content. Raises ``FileNotFoundError``."""
        self._wait()
        return self._file(name).data

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset``; returns the number of bytes read. Raises ``FileNotFoundError``."""
        self._wait()
        data = self._file(name).data[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def _file(self, name: str) -> _File:
        file = self._disk.files.get(name)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        return file

    def write(self, name: str, pieces: Iterable[bytes | memoryview], *, new: bool = False) -> str:
        """Write a file and make it durable; returns its stamp. Raises ``OSError`` if the disk is full."""
        data = b"".join(pieces)
        self._wait()
        if new and name in self._disk.files:
            raise FileExistsError(errno.EEXIST, "File exists", name)
        self._disk.put(name, data, self._host)
        stamp = str(self._disk.files[name].stamp)
        self._wait()
        self._disk.sync(name)
        return stamp

    def forget(self, name: str) -> None:
        """Does nothing: there is no page cache."""

    def sync(self, folder: str) -> None:
        """Takes time only: ``write`` has synced the folder."""
        self._wait()

    def remove(self, name: str) -> None:
        """Remove a file if there is one."""
        self._wait()
        self._disk.files.pop(name, None)

    def free_bytes(self) -> int | None:
        """0 if the disk is full, else unknown."""
        return 0 if self._disk.full else None
