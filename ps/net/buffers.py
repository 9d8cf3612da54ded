"""Reusable memory for frame bodies: page faults cost more than the copy.

A pserver can lend such memory to a trainer on the same machine, so that pulled rows need not go through a socket. There
is one arena for each connection, read-only for the trainer, and only answers are written to it. It is an anonymous file
(memfd) whose descriptor is passed with a frame; it is freed when both processes have closed it, however they end. It is
sealed against shrinking, so a reader never accesses unmapped memory. Requests are not passed this way: a trainer could
change them while they are processed.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Sequence

import numpy as np

from edl.errors import ProtocolError

FIRST_BYTES = 4096
KEPT_BYTES = 256 << 20
"""A larger body gets memory of its own, which is not reused and not lent."""
LENT_BYTES = 128 << 10
"""Smaller bodies are sent with their frame: one more copy, but fewer system calls."""
_HUGE_BYTES = 2 << 20
_SEAL: int = getattr(fcntl, "F_SEAL_SHRINK", 0)
CAN_LEND = hasattr(os, "memfd_create") and bool(_SEAL)


class BodyBuffer:
    """Reusable, growing memory for one body at a time. ``room`` invalidates the body before."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(FIRST_BYTES))

    def room(self, size: int) -> memoryview:
        """Memory of this size with undefined content."""
        if size > len(self._memory):
            if size > KEPT_BYTES:
                return self._make(size)[:size]
            self._memory = self._make(size + size // 4)
        return self._memory[:size]

    def _make(self, size: int) -> memoryview:
        """Pages are allocated on first write, so announcing a large body costs no memory."""
        memory = mmap.mmap(-1, -(-size // _HUGE_BYTES) * _HUGE_BYTES if size > _HUGE_BYTES else size)
        if size >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(memory)


class LentBuffer(BodyBuffer):
    """Memory lent to the peer, so that bodies need not be sent."""

    def __init__(self) -> None:
        super().__init__()
        self._memory = self._memory[:0]
        self._file = -1
        self._sent = False

    def holds(self, body: Sequence[memoryview]) -> bool:
        """True if the parts are consecutive from the start of this memory."""
        at = _address(self._memory) if len(self._memory) else 0
        end = at + len(self._memory)
        for part in body:
            if not at or _address(part) != at:
                return False
            at += len(part)
        return bool(body) and at <= end

    def file_to_send(self) -> int:
        """The file descriptor if the peer has yet to receive it, else -1."""
        sent, self._sent = self._sent, True
        return -1 if sent else self._file

    def close(self) -> None:
        """Release the memory; a peer that has mapped it keeps it."""
        file, self._file = self._file, -1
        if file >= 0:
            self._memory = memoryview(b"")  # the mapping holds the file open as well
            os.close(file)

    def _make(self, size: int) -> memoryview:
        self.close()
        file = os.memfd_create("edl-ps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEAL)
            memory = memoryview(mmap.mmap(file, size))
        except OSError:
            os.close(file)
            raise
        self._file, self._sent = file, False
        return memory


class Borrowed:
    """Memory that the peer has lent."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def take(self, file: int) -> None:
        """Map this file from now on; the descriptor is closed. Raises ``ProtocolError``."""
        try:
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEAL:
                raise ProtocolError("lent memory is not sealed against shrinking")
            size = os.fstat(file).st_size
            if not 0 < size <= 2 * KEPT_BYTES:
                raise ProtocolError(f"lent memory has an invalid size: {size} bytes")
            self._memory = memoryview(mmap.mmap(file, size, mmap.MAP_SHARED, mmap.PROT_READ))
        except OSError as error:
            raise ProtocolError(f"cannot use lent memory: {error}") from None
        finally:
            os.close(file)

    def body(self, size: int) -> memoryview:
        """The first ``size`` bytes of the lent memory. Raises ``ProtocolError``."""
        if size > len(self._memory):
            raise ProtocolError(f"a body of {size} bytes in {len(self._memory)} bytes of lent memory")
        return self._memory[:size]


def copy(source: memoryview, target: memoryview) -> None:
    """Copy without holding the GIL."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
