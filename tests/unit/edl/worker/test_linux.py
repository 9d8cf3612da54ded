"""Processes of a fork server, on kernels and in containers that offer less."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable

import pytest

from edl.worker import linux, spawn


@pytest.mark.parametrize("listed", [True, False])
def test_children_are_found_also_where_the_kernel_does_not_list_them(
    listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not listed:
        monkeypatch.setattr(linux, "_CHILDREN", "/proc/self/task/{}/no-such-file")
    with subprocess.Popen(["sleep", "60"]) as process:
        assert process.pid in linux.children()
        process.kill()
    assert process.pid not in linux.children()


@pytest.mark.parametrize(
    "start", [lambda: spawn.start(["true"], {}), lambda: linux.fork_for(os.getpid())], ids=["start", "fork_for"]
)
def test_a_refused_fork_keeps_no_descriptors(start: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", refused)
    before = linux.open_descriptors()
    with pytest.raises(OSError, match="temporarily unavailable"):
        start()
    assert linux.open_descriptors() == before
