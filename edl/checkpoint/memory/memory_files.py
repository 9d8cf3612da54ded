"""Memory files: created by the agent, written by a worker or from the network, and still there when the writer is
gone."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import zlib
from pathlib import Path

import psutil

from edl.pages import populate

SPARE_BYTES = 64 * 1024 * 1024
"""Memory left free for the rest of the machine when a file is allocated."""
CHUNK_BYTES = 4 * 1024 * 1024
PLENTY = 4
"""With this many times the memory that a file needs its pages are requested by several threads at once. With less they
are reserved first, which one thread does, and which fails where the other would have a process killed."""
_ZEROS = bytes(CHUNK_BYTES)
_CGROUPS = Path("/sys/fs/cgroup")


class MemoryFile:
    """One mapped memory file. All its pages are reserved, so writing cannot fail later.

    Its size is sealed, so a faulty process cannot take pages away from another.
    """

    def __init__(self, size: int, *, touch: bool = True) -> None:
        """``touch``: fill all pages now, so that the first writer need not wait for them.

        Raises ``MemoryError`` or ``OSError`` when there is not enough memory.
        """
        free = available_bytes()
        if size + SPARE_BYTES > free:
            raise MemoryError(f"{size:,} bytes requested, but the machine has only {free:,} available")
        self.size = size
        self.descriptor = os.memfd_create("edl-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.view = memoryview(mmap.mmap(self.descriptor, size))
            if size * PLENTY > free or not populate(self.view):
                os.posix_fallocate(self.descriptor, 0, size)
                if touch and not populate(self.view):
                    _fill(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._crc: int | None = None
        self._lock = threading.Lock()

    def renewed(self, crc32: int | None = None) -> None:
        """Note new content, with its checksum if known."""
        self._crc = crc32

    def crc32(self, size: int) -> int:
        """CRC-32 of the first ``size`` bytes, computed once."""
        with self._lock:
            if self._crc is None:
                self._crc = checksum(self.view[:size])
            return self._crc

    def read_only(self) -> int:
        """A new descriptor, for the caller to close, that can be neither written nor mapped for writing."""
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def duplicate(self) -> int:
        """A new descriptor, for the caller to close."""
        return fcntl.fcntl(self.descriptor, fcntl.F_DUPFD_CLOEXEC, 0)

    def close(self) -> None:
        """Close the file. Its pages are freed when the last process unmaps them."""
        os.close(self.descriptor)
        self.descriptor = -1
        self.view = memoryview(b"")  # the mapping ends with its last view


def _fill(descriptor: int, size: int) -> None:
    """Make the kernel clear all pages now."""
    for offset in range(0, size, CHUNK_BYTES):
        os.pwrite(descriptor, _ZEROS[: size - offset], offset)


def checksum(data: memoryview) -> int:
    """CRC-32, computed in pieces so that other threads can run in between."""
    crc = 0
    for offset in range(0, len(data), CHUNK_BYTES):
        crc = zlib.crc32(data[offset : offset + CHUNK_BYTES], crc)
    return crc


def available_bytes() -> int:
    """Bytes that this process can allocate without swapping, limited by the machine and by its cgroups."""
    free = int(psutil.virtual_memory().available)
    return min([free, *_left_in_cgroups(_CGROUPS, _cgroup_paths(Path("/proc/self/cgroup")))])


def _cgroup_paths(table: Path) -> dict[str, str]:
    """The process's cgroup path for each controller; version 2 has the empty name."""
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return {}
    fields = [line.split(":", 2) for line in lines]
    return {name: path for _, names, path in (one for one in fields if len(one) == 3) for name in names.split(",")}


def _left_in_cgroups(root: Path, paths: dict[str, str]) -> list[int]:
    """Bytes left in each cgroup from the process's own up to the root."""
    kinds = [("", root, "memory.max", "memory.current", "inactive_file")]
    kinds += [("memory", root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")]
    left = []
    for controller, top, most, used, reclaimable in kinds:
        if controller not in paths:
            continue
        folder = top / paths[controller].lstrip("/")
        while True:
            limit, now = _number(folder / most), _number(folder / used)
            if limit is not None and now is not None:
                left.append(max(0, limit - now + _field(folder / "memory.stat", reclaimable)))
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent
    return left


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # missing, or "max"
        return None


def _field(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
