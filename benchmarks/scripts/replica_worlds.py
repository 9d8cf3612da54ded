"""The worlds of scripts whose replicas have no common process group when they write their step log."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


def formed(workdir: Path, world: str) -> int:
    """The monotonic clock in nanoseconds after the first step of a world, the same for all its replicas."""
    folder = workdir / "quorums"
    folder.mkdir(exist_ok=True)
    draft = folder / f"{world}.{os.getpid()}"
    draft.write_text(str(time.monotonic_ns()))
    with contextlib.suppress(FileExistsError):
        os.link(draft, folder / world)
    draft.unlink()
    return int((folder / world).read_text())
