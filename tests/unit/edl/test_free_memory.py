"""What a process can allocate, in the machine and in its cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl import free_memory


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
    assert free_memory._left_in_cgroups(tmp_path, free_memory._cgroup_paths(tmp_path / "self")) == [400]


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
    assert free_memory._left_in_cgroups(tmp_path, free_memory._cgroup_paths(tmp_path / "self")) == [0]


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert free_memory._left_in_cgroups(tmp_path, free_memory._cgroup_paths(tmp_path / "self")) == []
    assert free_memory.available_bytes() > 0


def test_the_least_of_machine_and_cgroups_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path,
        {
            "self": "0::/pod\n",
            "meminfo": "MemTotal: 90 kB\nMemAvailable:      7 kB\n",
            "pod/memory.max": "max\n",
            "pod/memory.current": "900\n",
        },
    )
    monkeypatch.setattr(free_memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(free_memory, "_MEMBERSHIP", tmp_path / "self")
    monkeypatch.setattr(free_memory, "_MACHINE", tmp_path / "meminfo")
    assert free_memory.available_bytes() == 7 * 1024
    write(tmp_path, {"pod/memory.max": "1000\n"})
    assert free_memory.available_bytes() == 100
    write(tmp_path, {"meminfo": "MemFree: 0 kB\n", "pod/memory.max": "max\n"})
    assert free_memory.available_bytes() > 0
