"""The pool of snapshots when two copies of one node's commits arrive at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from edl.checkpoint.memory.snapshot_pool import MemorySnapshotPool
from edl.errors import CheckpointError
from edl.ports import Label
from edl.testing.snapshots import JOB, make_snapshot
from edl.types import NodeId
from edl.wire.records import Holding, Version


class InterruptedLock:
    """A lock whose first release is followed at once by what another thread does."""

    def __init__(self, other: Callable[[], None]) -> None:
        self._lock, self._other = threading.Lock(), other
        self._first = True

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        first, self._first = self._first, False
        if first:
            self._other()


def test_an_older_copy_does_not_replace_a_newer_one_that_arrives_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = MemorySnapshotPool(NodeId("b"), JOB, 1 << 24, lambda: None)
    refused: list[str] = []

    def receive(commit: int) -> None:
        holding = Holding(Version(1, commit))
        snapshot = make_snapshot(holding, commit)
        try:
            copy = pool.arriving(Label(NodeId("a"), holding, len(snapshot)))
        except CheckpointError as error:
            refused.append(str(error))
            return
        assert copy is not None
        copy.view[:] = snapshot
        copy.accept()

    monkeypatch.setattr(pool, "_lock", InterruptedLock(lambda: receive(6)))
    receive(5)
    assert len(refused) == 1, "the sender of the refused one tries again"
    receive(6)
    newest = pool.newest()
    assert newest is not None and newest.version.commit == 6
    pool.close()
