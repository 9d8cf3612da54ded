"""Memory files, which pass data too large for a datagram to another process on the host."""

from __future__ import annotations

import os

LARGEST_BYTES = 64 * 1024
"""Most bytes of a datagram on a local socket: long texts are truncated, and unlimited data travels in a memory file."""


def write_memory(name: str, data: bytes) -> int:
    """Write data to a new memory file; return its descriptor, which the caller closes."""
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
