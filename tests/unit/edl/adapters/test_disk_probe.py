"""Looks at a file system, in a thread."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from edl.adapters.disk_probe import DiskProbe
from edl.adapters.system_threads import SYSTEM_THREADS

SOON_S = 30.0


def test_a_checkpoint_that_is_deleted_while_it_is_measured_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "state").write_bytes(bytes(1000))
    (tmp_path / "gone").mkdir()
    real = os.scandir

    def scandir(path: Any = ".") -> Any:
        if str(path).endswith("gone"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    answered = threading.Event()
    probe = DiskProbe(str(tmp_path), ".probe", SYSTEM_THREADS)
    probe.begin(answered.set, write=True, measure=str(tmp_path))
    assert answered.wait(SOON_S)
    found = probe.result()
    assert (found.error, found.write_error, found.size_bytes) == ("", "", 1000)
