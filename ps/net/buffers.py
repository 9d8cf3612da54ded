"""Memory for bodies, used again and again: page faults cost more than the copy.

A pserver can lend such memory to a trainer on the same machine, which then looks into it: the rows of a pull need not
go through a socket. Lent for reading only, one arena for each connection, and nothing but answers is ever written to
it. It is a file without a name (memfd), handed over with the frame as an open descriptor; it goes when both processes
have let go of it, however they end. It is sealed against shrinking, so whoever looks into it never looks into nothing.
What trainers send is not taken that way: it could change while it is worked with.
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
"""A larger arena is made for one body only, and is not lent."""
LENT_BYTES = 128 << 10
"""Smaller bodies go with their frame: one copy more, and no more calls."""
_HUGE_BYTES = 2 << 20
_SEAL: int = getattr(fcntl, "F_SEAL_SHRINK", 0)
CAN_LEND = hasattr(os, "memfd_create") and bool(_SEAL)


class Arena:
    """Memory for one body at a time, that grows and stays. What was given before is void with the next ``room``."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(FIRST_BYTES))

    def room(self, size: int) -> memoryview:
        """So many bytes, of unknown content."""
        if size > len(self._memory):
            if size > KEPT_BYTES:
                return self._make(size)[:size]
            self._memory = self._make(size + size // 4)
        return self._memory[:size]

    def _make(self, size: int) -> memoryview:
        """Pages come only when they are written, so one who announces much and sends little takes nothing."""
        memory = mmap.mmap(-1, -(-size // _HUGE_BYTES) * _HUGE_BYTES if size > _HUGE_BYTES else size)
        if size >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(memory)


class Lent(Arena):
    """An arena that is lent to the other side."""

    def __init__(self) -> None:
        super().__init__()
        self._memory = self._memory[:0]
        self._file = -1
        self._told = False

    def holds(self, body: Sequence[memoryview]) -> bool:
        """Whether the parts are what lies at the beginning of this memory, in order."""
        at = _address(self._memory) if len(self._memory) else 0
        end = at + len(self._memory)
        for part in body:
            if not at or _address(part) != at:
                return False
            at += len(part)
        return bool(body) and at <= end

    def news(self) -> int:
        """The file, if the other side has not been told of it; else -1."""
        told, self._told = self._told, True
        return -1 if told else self._file

    def close(self) -> None:
        """Let go of the memory; those who look at it keep it."""
        file, self._file = self._file, -1
        if file >= 0:
            self._memory = memoryview(b"")  # the mapping has the file open as well
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
        self._file, self._told = file, False
        return memory


class Borrowed:
    """What the other side has lent."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def take(self, file: int) -> None:
        """Look into this file from now on; it is closed here. Raises ``ProtocolError``."""
        try:
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEAL:
                raise ProtocolError("memory that could be taken away was lent")
            size = os.fstat(file).st_size
            if not 0 < size <= 2 * KEPT_BYTES:
                raise ProtocolError(f"{size} bytes of memory were lent")
            self._memory = memoryview(mmap.mmap(file, size, mmap.MAP_SHARED, mmap.PROT_READ))
        except OSError as error:
            raise ProtocolError(f"memory that was lent cannot be used: {error}") from None
        finally:
            os.close(file)

    def body(self, size: int) -> memoryview:
        """What has been written there. Raises ``ProtocolError``."""
        if size > len(self._memory):
            raise ProtocolError(f"a body of {size} bytes in {len(self._memory)} bytes of lent memory")
        return self._memory[:size]


def copy(source: memoryview, target: memoryview) -> None:
    """Without holding other threads up."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
