"""Memory files, by which what is too large for a datagram goes to another process of this host."""

from __future__ import annotations

import os

LARGEST_BYTES = 64 * 1024
"""Of a datagram on a local socket: long texts are cut, and what has no limit travels in a memory file."""


def write_memory(name: str, data: bytes) -> int:
    """A memory file that holds the data, for what has no limit; returns its descriptor, which the caller closes."""
    descriptor = os.memfd_create(name)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_memory(descriptor: int) -> bytes:
    """The inverse of ``write_memory``; leaves the descriptor open."""
    size, data = os.fstat(descriptor).st_size, b""
    while len(data) < size and (part := os.pread(descriptor, size - len(data), len(data))):
        data += part
    return data
