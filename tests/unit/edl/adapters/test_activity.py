"""What workers use, as far as this process can see it."""

from __future__ import annotations

import errno
import os
from typing import NoReturn

import psutil
import pytest

from edl.adapters.activity import activity


def lacking(*_: object) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_own_session_is_seen() -> None:
    session = os.getsid(0)
    found = activity([session])
    assert found[session].cpu_s > 0


@pytest.mark.parametrize(("owner", "name"), [(psutil, "pids"), (psutil, "Process"), (psutil.Process, "io_counters")])
def test_without_a_descriptor_nothing_is_known(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """It is no reason to end the launcher, and a worker that is not seen is not idle."""
    monkeypatch.setattr(owner, name, lacking)
    assert activity([os.getsid(0)]) == {}


def test_a_worker_that_is_gone_is_left_out() -> None:
    assert activity([2**22 + 1]) == {}
