"""A fetch in ranges: every byte comes once its checksum is right, whatever becomes of the helping connections."""

from __future__ import annotations

import contextlib
import random
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from edl.adapters import range_fetch
from edl.adapters.copy_connection import CopyConnection, CopyLimits
from edl.adapters.range_fetch import RangeFetch
from edl.errors import CheckpointError

DATA = random.Random(5).randbytes(1000)
LIMITS = CopyLimits(silence_s=0.3)
WAIT_S = 30.0


class Line(CopyConnection):
    """A connection to a node that has ``DATA``; its fault happens with the range of this number."""

    def __init__(self, fault_at: int = 1 << 30, fault: str = "") -> None:
        self.limits = LIMITS
        self.served: list[int] = []
        self.others: list[dict[str, Any]] = []
        self.hung_up = threading.Event()
        self._fault_at, self._fault = fault_at, fault
        self._asked = (0, 0)

    def within(self, seconds: float) -> None:
        pass

    def send_frame(self, frame: dict[str, Any]) -> None:
        if "start" in frame:
            self._asked = frame["start"], frame["size"]
        else:
            self.others.append(frame)

    def read_into(self, view: memoryview, crc: int = 0) -> int:
        fault = self._fault if len(self.served) >= self._fault_at else ""
        start, size = self._asked
        view[:] = DATA[start : start + size]
        if fault == "damage":
            view[3] ^= 1
        elif fault == "end":
            raise ConnectionResetError("the peer has died")
        elif fault == "hang":
            assert self.hung_up.wait(WAIT_S)
            raise ConnectionResetError("hung up")
        self.served.append(start)
        return zlib.crc32(view)

    def receive_answer(self) -> dict[str, Any]:
        start, size = self._asked
        return {"crc32": zlib.crc32(DATA[start : start + size])}

    def hang_up(self) -> None:
        self.hung_up.set()


class Helpers:
    """Gives helping connections, one after the other; the first one waits for all to be there."""

    def __init__(self, *lines: Line | Exception) -> None:
        self._lines = list(lines)
        self._lock = threading.Lock()
        self.closed = 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[CopyConnection]:
        with self._lock:
            line = self._lines.pop()
        try:
            if isinstance(line, Exception):
                raise line
            yield line
        finally:
            self.closed += 1


class Patient(Line):
    """Serves its second range only when others have ended, so that helpers get something to do."""

    def __init__(self, helpers: Helpers, count: int, **fault: Any) -> None:
        super().__init__(**fault)
        self._helpers, self._count = helpers, count

    def read_into(self, view: memoryview, crc: int = 0) -> int:
        if len(self.served) == 1:
            limit = threading.Event()
            while self._helpers.closed < self._count:
                assert not limit.wait(0.001)
        return super().read_into(view, crc)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_fetch, "RANGE_BYTES", 64)
    monkeypatch.setattr(range_fetch, "connections_for", lambda size: 4)


def fetched(line: Line, helpers: Helpers, *others: Line | Exception) -> bytearray:
    """``others``: connections in place of the first, the last one first."""
    memory = bytearray(len(DATA))
    RangeFetch(memoryview(memory), "shard 0").run(line, helpers, Helpers(*others))
    return memory


def test_all_share_the_ranges_and_each_is_fetched_once() -> None:
    others = [Line() for _ in range(3)]
    helpers = Helpers(*others)
    line = Patient(helpers, 3)
    assert fetched(line, helpers) == DATA
    assert sorted(start for one in (line, *others) for start in one.served) == list(range(0, len(DATA), 64))
    assert all(one.others[-1] == {"done": True} for one in (line, *others) if one.served)


@pytest.mark.parametrize("fault", ["end", "damage"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_a_helper_does_not_finish_is_fetched_by_another(fault: str, at: int) -> None:
    helpers = Helpers(Line(at, fault), CheckpointError("no place left"), Line(at, fault))
    assert fetched(Patient(helpers, 3), helpers) == DATA


def test_a_range_that_a_helper_gives_back_at_the_end_is_fetched_by_the_first() -> None:
    """The first has nothing to do by then, and tells its node that it is still there."""
    slow = Line(0, "hang")
    line = Line()
    ended = threading.Timer(2 * LIMITS.silence_s, slow.hang_up)
    ended.start()
    assert fetched(line, Helpers(slow, slow, slow)) == DATA
    ended.join()


def test_the_first_ones_failure_ends_all_and_nothing_is_written_any_more() -> None:
    writing, left = threading.Event(), threading.Event()

    class Slow(Line):
        """Ends some time after it was hung up on."""

        def read_into(self, view: memoryview, crc: int = 0) -> int:
            writing.set()
            try:
                return super().read_into(view, crc)
            finally:
                threading.Event().wait(0.05)
                left.set()

    class Damaged(Line):
        def read_into(self, view: memoryview, crc: int = 0) -> int:
            assert writing.wait(WAIT_S)
            return super().read_into(view, crc)

    line, nobody = Damaged(0, "damage"), CheckpointError("no place left")
    with pytest.raises(CheckpointError, match=r"shard 0 was damaged in transit: checksum \w+ instead of \w+ from byte"):
        fetched(line, Helpers(Slow(0, "hang"), nobody, nobody))
    assert left.is_set()
    assert {"done": True} not in line.others


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_connection_that_breaks_is_replaced_and_only_what_is_missing_is_fetched(at: int) -> None:
    nobody = CheckpointError("no place left")
    first, second, third = Line(at, "end"), Line(3, "end"), Line()
    assert fetched(first, Helpers(nobody, nobody, nobody), third, second) == DATA
    ranges = [start for one in (first, second, third) for start in one.served]
    assert sorted(ranges) == list(range(0, len(DATA), 64)) and len(second.served) == 3
    assert third.others == [{"done": True}] and {"done": True} not in first.others + second.others


def test_a_node_whose_connections_break_at_once_is_given_up() -> None:
    nobody = CheckpointError("no place left")
    with pytest.raises(ConnectionResetError, match="the peer has died"):
        fetched(Line(4, "end"), Helpers(nobody, nobody, nobody), Line(), Line(0, "end"), Line(0, "end"))
    with pytest.raises(CheckpointError, match="refused"):
        fetched(Line(4, "end"), Helpers(nobody, nobody, nobody), CheckpointError("refused"))


def test_without_threads_for_all_helpers_the_others_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter((True, False))
    start = threading.Thread.start

    def started(self: threading.Thread) -> None:
        if not next(left):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", started)
    helpers = Helpers(Line())
    assert fetched(Patient(helpers, 1), helpers) == DATA


def test_small_snapshots_and_small_machines_have_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for cores, size, count in (
        (64, 1000, 1),
        (64, 1 << 40, 8),
        (2, 1 << 40, 1),
        (None, 1 << 40, 1),
        (16, 200 << 20, 4),
    ):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert range_fetch.connections_for(size) == count
