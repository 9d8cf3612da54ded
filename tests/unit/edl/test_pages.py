"""Pages are mapped by several threads, or by one if there can be no more."""

from __future__ import annotations

import mmap
import threading

import pytest

from edl import pages


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_pages_are_mapped_by_as_many_threads_as_there_can_be(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([True] * threads)
    start = threading.Thread.start

    def started(self: threading.Thread) -> None:
        if not next(left, False):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", started)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    monkeypatch.setattr(pages, "SHARE_BYTES", 64 * mmap.PAGESIZE)
    memory = memoryview(mmap.mmap(-1, 1000 * mmap.PAGESIZE))
    memory[-1] = 7
    assert pages.populate(memory)
    assert memory[-1] == 7
