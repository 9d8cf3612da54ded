"""Writes a commit for which there is no memory directly to the checkpoint directory, and reads it back, while training
waits.

The arrays are copied into the mapped file, so the page cache is the only memory used. The file is written under a
temporary name first; the agent reads it back, compares the checksum, and adds the manifest that makes it count. A state
of this size is restored in the same way: each worker maps the file. A file that another node has written meanwhile
stays, and is described instead: decision 0022.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from edl.wire import local
from edl.wire.snapshot import FILE_NAME, folder_name
from edl.worker.mapped_memory import MappedMemory

if TYPE_CHECKING:
    from edl.ports import Files

CHUNK_BYTES = 8 << 20
MANIFEST_FILE = "DONE"
Fill = Callable[[Callable[[int], memoryview]], int]
"""Requests memory of some size, copies a snapshot into it, and returns the size."""


def write(where: str, era: int, commit: int, fill: Fill) -> local.WroteThrough:
    """Write a snapshot to the checkpoint directory. Failures are reported in the result, since they only cost this
    checkpoint."""
    files = _files(where)
    folder = folder_name(era, commit)
    try:
        if files.stamp(f"{folder}/{MANIFEST_FILE}"):
            path = files.path(folder)
            return local.WroteThrough(era, commit, error=f"{path} is already complete and is not replaced")
        name = f"{folder}/{FILE_NAME}"
        try:
            size, crc32 = _write_remote(files, name, fill) if files.remote else _write_here(files.path(name), fill)
        except FileExistsError:
            size, crc32 = _described(files, folder)
    except OSError as error:
        why = "no space is left" if error.errno == errno.ENOSPC else error.strerror or str(error)
        return local.WroteThrough(era, commit, error=f"cannot write to the checkpoint directory {where}: {why}")
    return local.WroteThrough(era, commit, size, crc32)


def mapped(where: str, era: int, commit: int) -> MappedMemory:
    """The state file of a checkpoint, mapped privately: changes are not written back. Raises ``OSError``."""
    files = _files(where)
    name = f"{folder_name(era, commit)}/{FILE_NAME}"
    if not files.remote:
        descriptor = os.open(files.path(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return MappedMemory(descriptor, os.fstat(descriptor).st_size, private=True)
        finally:
            os.close(descriptor)
    size = _size(files, folder_name(era, commit))
    with tempfile.TemporaryFile() as copy:
        os.posix_fallocate(copy.fileno(), 0, size)
        with mmap.mmap(copy.fileno(), size) as target:
            for start in range(0, size, CHUNK_BYTES):
                with memoryview(target) as view, view[start : start + CHUNK_BYTES] as piece:
                    _read(files, name, start, piece)
        return MappedMemory(copy.fileno(), size, private=True)


def _files(where: str) -> Files:
    from edl.adapters.remote_files import open_files  # only when it is needed: a worker's start should be light

    return open_files(where)


def _write_here(target: str, fill: Fill) -> tuple[int, int]:
    from edl.adapters.files import new_file  # see `_files`

    with new_file(target) as descriptor:
        found = _filled(descriptor, fill, lambda view: None)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # so that the verification reads from the disk
        return found


def _write_remote(files: Files, name: str, fill: Fill) -> tuple[int, int]:
    """Write through a local file, because an object store accepts a stream but no mapping."""
    with tempfile.TemporaryFile() as copy:
        return _filled(copy.fileno(), fill, lambda view: files.write(name, _pieces(view), new=True))


def _described(files: Files, folder: str) -> tuple[int, int]:
    """Size and checksum of a file that another node has written, which may have died before it added the manifest."""
    size, crc32 = _size(files, folder), 0
    chunk = memoryview(bytearray(min(CHUNK_BYTES, size)))
    for start in range(0, size, CHUNK_BYTES):
        piece = chunk[: size - start]
        _read(files, f"{folder}/{FILE_NAME}", start, piece)
        crc32 = zlib.crc32(piece, crc32)
    return size, crc32


def _size(files: Files, folder: str) -> int:
    """Size of the state file of a checkpoint. Raises ``FileNotFoundError``."""
    for entry in files.entries(folder):
        if entry.name == FILE_NAME:
            return entry.size
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), files.path(f"{folder}/{FILE_NAME}"))


def _read(files: Files, name: str, start: int, piece: memoryview) -> None:
    """Fill ``piece`` from ``start`` on: what is missing must not become zeros of the state. Raises ``OSError``."""
    count = files.read_into(name, start, piece)
    if count < len(piece):
        raise OSError(errno.EIO, f"the file ends after {start + count} bytes", files.path(name))


def _filled(descriptor: int, fill: Fill, then: Callable[[memoryview], object]) -> tuple[int, int]:
    """Fill a file through its mapping; returns size and checksum. All its space is allocated first: a page without disk
    space would kill the process."""
    maps: list[mmap.mmap] = []

    def room(size: int) -> memoryview:
        os.posix_fallocate(descriptor, 0, size)
        maps.append(mmap.mmap(descriptor, size))
        return memoryview(maps[-1])

    size = fill(room)
    crc32 = 0
    with memoryview(maps[-1]) as view:
        for piece in _pieces(view):
            crc32 = zlib.crc32(piece, crc32)
        then(view)
    maps[-1].flush()
    with contextlib.suppress(BufferError):  # an array over it is freed with its last reference
        maps[-1].close()
    return size, crc32


def _pieces(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]
