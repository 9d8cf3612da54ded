"""Available memory, and limits of a memory file."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from edl import pages
from edl.checkpoint.memory import memory_files


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_every_cgroup_above_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "self": "0::/pod/main\n",
            "pod/memory.max": "1000\n",
            "pod/memory.current": "900\n",
            "pod/memory.stat": "anon 5\ninactive_file 300\n",
            "pod/main/memory.max": "max\n",
            "pod/main/memory.current": "800\n",
        },
    )
    assert memory_files._left_in_cgroups(tmp_path, memory_files._cgroup_paths(tmp_path / "self")) == [400]


def test_cgroups_of_version_1(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "self": "5:cpu,cpuacct:/x\n4:memory:/pod\n",
            "memory/pod/memory.limit_in_bytes": "1000\n",
            "memory/pod/memory.usage_in_bytes": "1200\n",
            "memory/pod/memory.stat": "total_inactive_file 50\n",
        },
    )
    assert memory_files._left_in_cgroups(tmp_path, memory_files._cgroup_paths(tmp_path / "self")) == [0]


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert memory_files._left_in_cgroups(tmp_path, memory_files._cgroup_paths(tmp_path / "self")) == []
    assert memory_files.available_bytes() > 0


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
