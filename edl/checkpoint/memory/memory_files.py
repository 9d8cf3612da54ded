"""Memory files: created by the agent, written by a worker or from the network, and still there when the writer is
gone."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import zlib

from edl.free_memory import available_bytes
from edl.pages import populate

SPARE_BYTES = 64 * 1024 * 1024
"""Memory left free for the rest of the machine when a file is allocated."""
CHUNK_BYTES = 4 * 1024 * 1024
PLENTY = 4
"""With this many times the memory that a file needs its pages are requested by several threads at once. With less they
are reserved first, which one thread does, and which fails where the other would have a process killed."""
_ZEROS = bytes(CHUNK_BYTES)


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
