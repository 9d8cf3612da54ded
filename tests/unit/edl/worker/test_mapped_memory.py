"""Memory files that a worker maps, and page-locks for its accelerator."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edl.wire import local
from edl.wire.local import STATE
from edl.worker.boundary import RoundOver
from edl.worker.mapped_memory import MappedMemory
from edl.worker.prefault import LEAST_BYTES
from tests.support.fake_agent import TIMEOUT_S, FakeGroup, Worker, a_seat

SIZE = LEAST_BYTES


class Locks:
    """``Accelerator``, which notes what is locked, and finds mappings that went without being unlocked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.refuses = False
        self.may_lock = threading.Event()
        self.may_lock.set()
        self.locking = threading.Event()
        self.may_unlock = threading.Event()
        self.may_unlock.set()
        self.unlocking = threading.Event()
        self._unlocked = threading.Condition()

    def lock(self, memory: memoryview) -> Callable[[], None] | None:
        self.locking.set()
        assert self.may_lock.wait(TIMEOUT_S)
        if self.refuses:
            return None
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert address not in self.locked, "a mapping at this address went without being unlocked"
        self.locked[address] = memory.nbytes

        def unlock() -> None:
            self.unlocking.set()
            self.may_unlock.wait()
            assert mapped(address), "unmapped before it was unlocked"
            with self._unlocked:
                del self.locked[address]
                self._unlocked.notify_all()

        return unlock

    def wait_until_at_most(self, size: int) -> None:
        """Buffers are unlocked on threads of their own."""
        with self._unlocked:
            assert self._unlocked.wait_for(lambda: sum(list(self.locked.values())) <= size, TIMEOUT_S)

    @contextlib.contextmanager
    def alias(self, view: memoryview, locked: memoryview) -> Iterator[None]:
        yield


def mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.memfd_create("fake")
    os.ftruncate(made, SIZE)
    yield made
    os.close(made)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    made.agent.place(a_seat())
    made.link.wait_for_place()
    yield made
    made.close()


def test_pages_are_locked_beside_training_and_unlocked_before_they_go(descriptor: int) -> None:
    locks = Locks()
    memory = MappedMemory(descriptor, SIZE, private=False)
    memory.prepare(locks)
    memory.wait()
    assert memory.locked and list(locks.locked.values()) == [SIZE]
    assert memory.close() and not locks.locked
    assert memory.close(), "once more"


def test_refused_or_too_small_to_be_worth_it(descriptor: int) -> None:
    locks = Locks()
    locks.refuses = True
    for size in (SIZE, 4096):
        memory = MappedMemory(descriptor, size, private=False)
        memory.prepare(locks)
        memory.wait()
        assert not memory.locked
        with memory.used() as view:
            assert view is None
        assert memory.close()


def test_closing_waits_for_the_lock_that_is_under_way(descriptor: int) -> None:
    locks = Locks()
    locks.may_lock.clear()
    memory = MappedMemory(descriptor, SIZE, private=False)
    memory.prepare(locks)
    assert locks.locking.wait(TIMEOUT_S)
    closing = threading.Thread(target=memory.close)
    closing.start()
    locks.may_lock.set()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive() and not locks.locked


def test_closed_before_it_is_locked_it_stays_unlocked(descriptor: int) -> None:
    locks = Locks()
    memory = MappedMemory(descriptor, SIZE, private=False)
    assert memory.close()
    memory._page_lock(locks)  # the last that its thread does
    assert not locks.locked


def test_what_is_in_use_is_closed_by_its_last_user(descriptor: int) -> None:
    locks = Locks()
    memory = MappedMemory(descriptor, SIZE, private=False)
    memory.prepare(locks)
    memory.wait()
    with memory.used() as view, memory.used():
        assert view is not None
        assert not memory.close() and locks.locked
        with memory.used() as late:
            assert late is None
        assert bytes(view[:1]) == b"\0"
    assert not locks.locked


def test_without_a_thread_the_caller_unlocks_them(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = Locks()
    memory = MappedMemory(descriptor, SIZE, private=False)
    memory.prepare(locks)
    memory.wait()

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    memory.close_in_background()
    assert not locks.locked


# --- a worker's buffers ----------------------------------------------------------------------------------------------


def commit(worker: Worker, number: int, size: int) -> int:
    """Returns the number of the buffer used."""
    buffer, view = worker.link.buffer(STATE, size)
    view[:4] = number.to_bytes(4, "little")
    worker.link.announce(1, [local.Committed(STATE, buffer, size, 1, number, 0, 1, False)])
    return buffer


def piece(worker: Worker, buffer: int, size: int) -> MappedMemory:
    """The agent shows a worker what is in a buffer."""
    readable = os.open(f"/proc/self/fd/{worker.agent.buffers.files[buffer][0]}", os.O_RDONLY)
    worker.agent.send(local.Piece(STATE, size), readable)
    os.close(readable)
    found = worker.link.piece(STATE, lambda view: True)
    assert not isinstance(found, str)
    return found[0]


def test_every_buffer_is_locked_once_and_a_commit_waits_for_it(worker: Worker) -> None:
    locks = Locks()
    worker.link.accelerator = locks
    for number in range(1, 8):
        buffer = commit(worker, number, SIZE)
        assert worker.link._streams[STATE].maps[buffer].locked
    assert len(locks.locked) == 2
    worker.settle()
    worker.link.close()
    assert not locks.locked


def test_buffers_that_no_longer_fit_are_unlocked(worker: Worker) -> None:
    locks = Locks()
    worker.link.accelerator = locks
    draw = random.Random(3)
    for number in range(1, 15):
        size = draw.choice([SIZE, 2 * SIZE, 5 * SIZE])
        commit(worker, number, size)
        worker.settle()
        locks.wait_until_at_most(4 * 6 * SIZE)
        for address in list(locks.locked):
            assert mapped(address) or address not in locks.locked  # a thread may just have unlocked and unmapped it


def test_a_break_aborts_the_group_while_pages_are_unlocked(worker: Worker) -> None:
    """Unlocking may wait for the device, and the device for the lost peer until the group is aborted."""
    locks = Locks()
    worker.link.accelerator = locks
    commit(worker, 1, SIZE)
    group = FakeGroup(a_seat(), threading.Barrier(1))
    worker.link.register(1, group)
    locks.may_unlock.clear()
    try:
        worker.start(lambda: worker.link.buffer(STATE, 5 * SIZE))
        assert locks.unlocking.wait(TIMEOUT_S)
        worker.agent.send(local.Break(1, "node b is gone"))
        assert group.aborted.wait(TIMEOUT_S)
    finally:
        locks.may_unlock.set()
    with contextlib.suppress(RoundOver):
        worker.join()
    locks.wait_until_at_most(6 * SIZE)


def test_a_worker_finds_its_own_mapping_of_the_commit_that_it_restores(worker: Worker) -> None:
    locks = Locks()
    worker.link.accelerator = locks
    first, second = commit(worker, 1, SIZE), commit(worker, 2, SIZE)
    for buffer, number in ((first, 1), (second, 2)):
        memory = piece(worker, buffer, SIZE)
        with worker.link.locked_twin(memory) as twin:
            assert twin is not None and twin[:4] == memory.view[:4] == number.to_bytes(4, "little")
        assert memory.close()


def test_there_is_no_twin_of_what_others_wrote_nor_without_a_lock(worker: Worker) -> None:
    buffer = commit(worker, 1, SIZE)
    memory = piece(worker, buffer, SIZE)
    with worker.link.locked_twin(memory) as twin:
        assert twin is None, "not locked"
    memory.close()
    worker.link.accelerator = Locks()
    commit(worker, 2, 3 * SIZE)
    worker.agent.send_memory(local.Piece(STATE, SIZE), bytes(SIZE))
    found = worker.link.piece(STATE, lambda view: 1)
    assert not isinstance(found, str)
    with worker.link.locked_twin(found[0]) as twin:
        assert twin is None, "another file"
    found[0].close()
