"""The synchronised directories of a node whose system has no thread left, of one whose disk takes no more, and of one
that copies while files change."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from edl.adapters.clock import SystemClock
from edl.errors import CheckpointError
from edl.sync_dir import messages, service
from edl.sync_dir.index import FileRecord, FileVersion
from edl.sync_dir.messages import PeerReport
from edl.sync_dir.service import DirectorySync, PeerAddress
from edl.sync_dir.tree import SyncedTree
from edl.testing.clock import FakeClock
from edl.types import NodeId

LIMIT_S = 60.0
MODEL = FileRecord("0/model.pt", FileVersion(2, 0, NodeId("b")), 10, 1, 0o644)


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


class AnswersTooLate:
    """Node b sets a folder aside after this node was cut off from it, and answers a question from before."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def changes(self, host: str, port: int, request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        for peer in self.asked:
            peer.gone = True
        aside = FileRecord("0/step-2/", FileVersion(2, 0, NodeId("b")), 0, 0, 0, removed=True)
        return messages.report_to(PeerReport("b's life", 1, settled=9, alike=9)), messages.records_to([aside])


def test_what_a_node_says_after_it_was_given_up_is_not_entered(tmp_path: Path) -> None:
    """Otherwise this node writes its next file into the folder as a newer one, and never sets that aside."""
    copies = AnswersTooLate()
    tree = SyncedTree([str(tmp_path)], NodeId("a"), "life", lambda: 10**18, print)
    sync = DirectorySync(NodeId("a"), "life", tree, cast(Any, copies), SystemClock(), print)
    peer = service._Peer(PeerAddress(NodeId("b"), "b", 1))
    copies.asked = [peer]
    assert sync._ask(peer) == ""
    assert sync._replica.head == 0
    peer.gone, copies.asked = False, []
    assert sync._ask(peer) == ""
    assert sync._replica.head == 1
    tree.close()


class FullQuota:
    """Node b has a file, of which a half fits on the disk here. Each attempt takes a second."""

    def __init__(self, clock: FakeClock, fits_at_last: int = 10**9) -> None:
        self._clock = clock
        self._fits_at_last = fits_at_last
        self.attempts = itertools.count(1)
        self.last = 0

    def changes(self, host: str, port: int, request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        return messages.report_to(PeerReport("b's life", 1, settled=9, alike=9)), messages.records_to([MODEL])

    def fetch(
        self, host: str, port: int, request: Mapping[str, Any], descriptor: int, arrived: Callable[[int], None]
    ) -> bool:
        self.last = next(self.attempts)
        arrived(5)
        self._clock.advance(1.0)
        if self.last < self._fits_at_last:
            raise CheckpointError("cannot write here: Disk quota exceeded")
        arrived(5)
        return True


def alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: Any, clock: FakeClock) -> Exception | None:
    """Wait for node b's files on node a, at most for 20 seconds of the clock without progress; returns the error."""
    monkeypatch.setattr(service, "PAUSE_S", 0.001)
    monkeypatch.setattr(service, "LONGEST_PAUSE_S", 0.002, raising=False)
    tree = SyncedTree([str(tmp_path)], NodeId("a"), "life", lambda: 10**18, print)
    sync = DirectorySync(NodeId("a"), "life", tree, copies, clock, print)
    errors: list[Exception] = []
    cancelled = threading.Event()

    def wait() -> None:
        try:
            sync.alike(1, [NodeId("a"), NodeId("b")], 20.0, cancelled)
        except CheckpointError as error:
            errors.append(error)

    sync.open()
    sync.meet([PeerAddress(NodeId("b"), "b", 1)])
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(LIMIT_S)
    ended = not waiting.is_alive()
    cancelled.set()
    sync.close()
    assert ended, f"it still waits: {vars(copies)}"
    return errors[0] if errors else None


def test_a_file_that_never_fits_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotas are not seen before. The same bytes again and again are no progress."""
    clock = FakeClock()
    error = alike(tmp_path, monkeypatch, FullQuota(clock), clock)
    assert "nothing has moved for 20 s" in str(error) and "Disk quota exceeded" in str(error)


def test_a_file_that_fits_at_last_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    assert alike(tmp_path, monkeypatch, FullQuota(clock, fits_at_last=5), clock) is None


class BusyLog:
    """Node b has a model and a log, which is written anew while the model is copied."""

    ENOUGH = 5
    """Copies of the model after which the log stays as it is."""

    def __init__(self) -> None:
        self.writes = 1
        self.models = 0

    @property
    def log(self) -> FileRecord:
        return FileRecord("0/log.csv", FileVersion(2 + self.writes, 0, NodeId("b")), 1, self.writes, 0o644)

    def changes(self, host: str, port: int, request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        report = PeerReport("b's life", 1 + self.writes, settled=9, alike=9)
        return messages.report_to(report), messages.records_to([MODEL, self.log])

    def fetch(
        self, host: str, port: int, request: Mapping[str, Any], descriptor: int, arrived: Callable[[int], None]
    ) -> bool:
        record = messages.record_from(request)
        if record == MODEL:
            self.models += 1
            self.writes += self.models < self.ENOUGH
        elif record != self.log:
            return False
        os.write(descriptor, b"." * record.size)
        arrived(record.size)
        return True


def test_a_file_that_has_arrived_is_not_fetched_again_when_another_one_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a checkpoint that takes longer than the pauses between two lines of a log would never arrive."""
    copies = BusyLog()
    assert alike(tmp_path, monkeypatch, copies, FakeClock()) is None
    assert (copies.models, copies.writes) == (1, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.csv", "model.pt"]
