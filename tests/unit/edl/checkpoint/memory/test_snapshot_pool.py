"""The pool of snapshots when two copies of one node's commits arrive at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from edl.checkpoint.memory.buffer_table import SnapshotStream
from edl.checkpoint.memory.snapshot_pool import IncomingCopy, MemorySnapshotPool
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


def test_a_copy_that_breaks_off_takes_nothing_from_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one may begin as soon as it is allowed to, in the same memory."""
    pool = MemorySnapshotPool(NodeId("b"), JOB, 1 << 24, lambda: None)
    copies: list[IncomingCopy] = []
    arrived = pool.arrived

    def begin(commit: int) -> None:
        holding = Holding(Version(1, commit))
        copy = pool.arriving(Label(NodeId("a"), holding, len(make_snapshot(holding, commit))))
        assert copy is not None
        copies.append(copy)

    def then_another(stream: SnapshotStream) -> None:
        arrived(stream)
        if len(copies) == 1:
            begin(6)

    begin(5)
    monkeypatch.setattr(pool, "arrived", then_another)
    copies[0].discard()
    copies[1].view[:] = make_snapshot(Holding(Version(1, 6)), 6)
    copies[1].accept()
    newest = pool.newest()
    assert newest is not None and newest.version.commit == 6
    pool.close()


def test_what_is_lent_stays_whole_although_the_pool_is_closed() -> None:
    """A thread may be about to write it when the launcher ends: an empty state would look complete."""
    pool = MemorySnapshotPool(NodeId("b"), JOB, 1 << 24, lambda: None)
    holding = Holding(Version(1, 5))
    snapshot = make_snapshot(holding, 5)
    copy = pool.arriving(Label(NodeId("a"), holding, len(snapshot)))
    assert copy is not None
    copy.view[:] = snapshot
    copy.accept()
    loan = pool.borrow(holding.version, 0)
    assert loan is not None
    pool.close()
    assert bytes(loan.view) == snapshot
