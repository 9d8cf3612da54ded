"""The synchronised directories of a node whose system has no thread left."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from edl.adapters.clock import SystemClock
from edl.sync_dir.service import DirectorySync, PeerAddress
from edl.types import NodeId


def test_a_node_that_could_not_be_followed_is_followed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    refusals = [RuntimeError("can't start new thread")]

    def start(thread: threading.Thread) -> None:
        if refusals:
            raise refusals.pop()
        started.append(thread.name)

    monkeypatch.setattr(threading.Thread, "start", start)
    anything = cast(Any, None)
    sync = DirectorySync(NodeId("a"), "life", anything, anything, SystemClock(), print)
    others = [PeerAddress(NodeId("b"), "b", 1)]
    with pytest.raises(RuntimeError):
        sync.meet(others)
    sync.meet(others)
    assert started == ["edl-sync-b"]
