"""Limits of a memory file."""

from __future__ import annotations

import mmap
import os

import pytest

from edl import pages
from edl.checkpoint.memory import memory_files


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(MemoryError, match="the machine has"):
        memory_files.MemoryFile(1 << 60)


def test_the_checksum_follows_the_content() -> None:
    made = memory_files.MemoryFile(10_000)
    first = made.crc32(10_000)
    made.view[5] = 1
    assert made.crc32(10_000) == first
    made.renewed()
    assert made.crc32(10_000) != first
    made.close()


@pytest.mark.parametrize(("times", "populates"), [(0, True), (1_000_000_000, True), (0, False), (1_000_000_000, False)])
def test_all_pages_of_a_file_have_memory_whatever_the_kernel_and_the_machine_have(
    times: int, populates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``times``: how often its size would have to be free for it to be plenty."""
    size = 3 * memory_files.CHUNK_BYTES + 4096
    monkeypatch.setattr(memory_files, "PLENTY", times)
    if not populates:
        monkeypatch.setattr(memory_files, "populate", lambda view: False)
    made = memory_files.MemoryFile(size)
    assert os.fstat(made.descriptor).st_blocks * 512 >= size
    assert bytes(made.view) == bytes(size)
    made.close()


def test_threads_share_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SHARE_BYTES": 16384, "PIECE_BYTES": 4096}.items():
        monkeypatch.setattr(pages, name, value)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    memory = mmap.mmap(-1, 50 * 4096)
    memory[-3:] = b"end"
    if not pages.populate(memoryview(memory)):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert bytes(memory[-3:]) == b"end"
