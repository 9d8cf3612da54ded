"""A file system that is easily filled."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str, *, lazy: bool = False) -> Iterator[Path]:
    """Mount one of this size, such as ``1m``, on a new folder; skip the test where that is not allowed. ``lazy``:
    processes may still have files open there at the end."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"may not mount a small file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", *(["--lazy"] if lazy else []), str(folder)], check=True)
