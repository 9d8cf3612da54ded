from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.errors import CheckpointError, StateError
from edl.wire import local
from edl.wire.local import OWN, STATE
from edl.worker import interruption, stream_buffers
from edl.worker.boundary import BoundaryAction, RoundOver
from edl.worker.interruption import GRACE_S
from edl.worker.link import Link
from edl.worker.mapped_memory import MappedMemory
from edl.worker.prefault import LEAST_BYTES
from tests.support.fake_agent import TIMEOUT_S, Barriers, FakeGroup, Worker, a_seat, connected


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def seated(worker: Worker, number: int = 1, **changes: int) -> None:
    worker.agent.place(a_seat(number, **changes))
    worker.link.wait_for_place()


def heard(worker: Worker) -> None:
    """Everything sent so far has been read: the answer to this comes after it."""
    worker.agent.send(local.HoldAtBoundary(worker.link._round, 99))
    worker.agent.expect(local.Here)
    worker.agent.send(local.Release(99))


def group(number: int = 1) -> FakeGroup:
    seat = a_seat(number)
    return FakeGroup(seat, *Barriers().of(seat))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:fake")


# --- places and breaks -----------------------------------------------------------------------------------------------


def test_connects_to_an_abstract_address() -> None:
    address, listener = connected()
    gone = threading.Event()
    link = Link.connect(address, gone.set)
    channel, _ = listener.accept()
    link.send(local.Parked(3))
    assert local.decode_to_agent(channel.recv(1000)) == local.Parked(3)
    channel.close()
    assert gone.wait(TIMEOUT_S)
    link.close()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        Link.connect(address)


def test_a_place_arrives_whole(worker: Worker) -> None:
    seat = a_seat(4, endpoints=tuple(f"host-{index}:1234" for index in range(20_000)))
    worker.agent.place(seat)
    assert worker.link.wait_for_place() == seat


def test_stop_instead_of_a_place(worker: Worker) -> None:
    worker.agent.send(local.Stop("the job is over"))
    with pytest.raises(SystemExit) as caught:
        worker.link.wait_for_place()
    assert caught.value.code == 0


def test_a_break_disconnects_at_once_and_aborts_later(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer's asynchronous collective ends with garbage when this one is aborted: the peer must know by then."""
    waiting, graces = threading.Event(), []

    class Later(threading.Timer):
        def run(self) -> None:
            graces.append(self.interval)
            assert waiting.wait(TIMEOUT_S)
            self.function(*self.args)

    monkeypatch.setattr(threading, "Timer", Later)
    seated(worker, 2)
    mine = group(2)
    worker.link.register(2, mine)
    worker.agent.send(local.Break(1, "an outdated message"))
    heard(worker)
    assert mine.failure() == ""
    worker.agent.send(local.Break(2, "node b is gone"))
    assert mine.disconnected.wait(TIMEOUT_S)
    heard(worker)
    assert (mine.aborts, graces) == (0, [GRACE_S])
    waiting.set()
    assert mine.aborted.wait(TIMEOUT_S)
    assert worker.link.wait_until_broken(2, TIMEOUT_S)
    assert worker.link.why_over == "node b is gone"


def test_a_break_before_there_is_a_group(worker: Worker) -> None:
    worker.agent.place(a_seat(2))
    worker.agent.send(local.Break(2, "gone"))
    worker.link.wait_for_place()
    assert worker.link.wait_until_broken(2, TIMEOUT_S)
    mine = group(2)
    worker.link.register(2, mine)
    assert mine.disconnected.is_set()
    assert mine.aborted.wait(TIMEOUT_S)


def test_waiting_for_a_break_has_an_end(worker: Worker) -> None:
    seated(worker)
    assert not worker.link.wait_until_broken(1, 0.01)


def test_a_failing_abort_does_not_deafen(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    class Bad(FakeGroup):
        def disconnect(self) -> None:
            raise RuntimeError("no way")

    seated(worker)
    worker.link.register(1, Bad(a_seat(), threading.Barrier(1)))
    worker.agent.send(local.Break(1, "gone"))
    seated(worker, 2)
    assert "no way" in capfd.readouterr().err


def test_a_group_is_aborted_though_there_can_be_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", refuse)
    monkeypatch.setattr(interruption, "GRACE_S", 0)
    mine = group()
    interruption.interrupt(mine)
    assert mine.aborts == 1


def test_nonsense_is_reported_and_passed_over(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    worker.agent.channel.send(b'["Nothing", {}]')
    worker.agent.send(local.Buffer(STATE + "?", 4, 3000))
    seated(worker, 2)
    assert capfd.readouterr().err.count("ignored an invalid message") == 2
    assert not worker.misplaced.is_set()


def test_a_place_that_cannot_be_read_is_the_end_of_the_worker(
    worker: Worker, capfd: pytest.CaptureFixture[str]
) -> None:
    seated(worker)
    worker.agent.send(local.Place(2))  # without its memory file, as in a process that has no descriptor left
    assert worker.misplaced.wait(TIMEOUT_S)
    assert "too few descriptors" in capfd.readouterr().err


def test_the_end_of_the_agent_is_the_end_of_the_worker(worker: Worker) -> None:
    worker.agent.channel.shutdown(socket.SHUT_RDWR)
    assert worker.gone.wait(TIMEOUT_S)


# --- boundaries ------------------------------------------------------------------------------------------------------


def test_holds_between_two_boundaries(worker: Worker) -> None:
    seated(worker, 1, restore_commit=10)
    assert worker.link.arrive(11) is BoundaryAction.PASS
    worker.agent.send(local.HoldAtBoundary(1, 5))
    assert worker.agent.expect(local.Here) == local.Here(5, 11)
    worker.start(lambda: [worker.link.arrive(12), worker.link.arrive(13)])
    worker.agent.send(local.Target(5, 13, "switch", "node b joins"))
    assert worker.join() == [BoundaryAction.PASS, BoundaryAction.SWITCH]
    assert worker.link.leaving == "node b joins"
    assert worker.link.left


def test_released(worker: Worker) -> None:
    seated(worker)
    worker.agent.send(local.HoldAtBoundary(1, 5))
    worker.agent.expect(local.Here)
    worker.start(lambda: worker.link.arrive(1))
    worker.agent.send(local.Release(5))
    assert worker.join() is BoundaryAction.PASS


def test_a_break_ends_the_waiting(worker: Worker) -> None:
    seated(worker)
    worker.agent.send(local.HoldAtBoundary(1, 5))
    worker.agent.expect(local.Here)
    worker.start(lambda: worker.link.arrive(1))
    worker.agent.send(local.Break(1, "gone"))
    with pytest.raises(RoundOver, match="gone"):
        worker.join()


def test_a_hold_of_another_round_gets_no_answer(worker: Worker) -> None:
    seated(worker, 2)
    worker.agent.send(local.HoldAtBoundary(1, 5))
    worker.agent.send(local.HoldAtBoundary(2, 6))
    assert worker.agent.expect(local.Here).hold == 6


def test_a_place_said_twice_changes_nothing(worker: Worker) -> None:
    seated(worker)
    worker.link.arrive(1)
    worker.agent.place(a_seat())
    heard(worker)
    assert worker.link.arrive(2) is BoundaryAction.PASS


# --- state -----------------------------------------------------------------------------------------------------------


def commit(worker: Worker, number: int, size: int, stream: str = STATE) -> int:
    """Returns the number of the buffer used."""
    buffer, view = worker.link.buffer(stream, size)
    view[:4] = number.to_bytes(4, "little")
    worker.link.announce(1, [local.Committed(stream, buffer, size, 1, number, 0, 1, False)])
    return buffer


def test_snapshots_alternate_between_buffers(worker: Worker) -> None:
    seated(worker)
    for stream, expected in ((STATE, {1, 2}), (OWN, {3, 4})):
        used = [commit(worker, number, 1000, stream) for number in range(1, 20)]
        assert set(used) == expected
        assert all(a != b for a, b in itertools.pairwise(used))
    heard(worker)
    assert worker.agent.kept[STATE, 1, 7, 0][:4] == (7).to_bytes(4, "little")


def test_only_the_last_answer_counts(worker: Worker) -> None:
    worker.agent.serving = False
    seated(worker)
    worker.start(lambda: [commit(worker, 1, 1000), commit(worker, 2, 2_000_000), commit(worker, 3, 1000)])
    for kind, size in (
        ("Want", 1000),
        ("Committed", 1000),
        ("Want", 2_000_000),
        ("Committed", 2_000_000),
        ("Committed", 1000),
    ):
        message = worker.agent.heard.get(timeout=TIMEOUT_S)
        assert (type(message).__name__, message.size) == (kind, size)
        if isinstance(message, local.Committed):
            worker.agent.buffers.fill(message)
        worker.agent.offer(STATE, size)
    worker.join()


def test_growing_and_shrinking_leaks_nothing(worker: Worker) -> None:
    seated(worker)
    before = descriptors()
    for number in range(1, 600):
        commit(worker, number, 1000 + 300_000 * (number % 7))
    heard(worker)
    assert len(worker.link._streams[STATE].maps) <= 4
    assert descriptors() <= before + 8  # the fake agent's, too


def test_a_state_that_is_small_and_large_in_turns(worker: Worker) -> None:
    seated(worker)
    for number in range(1, 100):
        commit(worker, number, 1000 if number % 2 else 5_000_000)
    heard(worker)
    assert (STATE, 1, 99, 0) in worker.agent.kept


def test_memory_of_an_outgrown_state_is_given_back(worker: Worker) -> None:
    seated(worker)
    commit(worker, 1, 1000)
    for number in range(2, 6):
        commit(worker, number, 5_000_000)
    heard(worker)
    assert all(memory.size >= 5_000_000 for memory in worker.link._streams[STATE].maps.values())


def test_thousands_of_commits_leak_nothing(worker: Worker) -> None:
    seated(worker)
    commit(worker, 1, 5000)
    commit(worker, 2, 5000)
    heard(worker)
    gc.collect()  # what earlier tests have left
    before = descriptors(), mappings()
    for number in range(3, 3000):
        commit(worker, number, 5000)
    heard(worker)
    assert (descriptors(), mappings()) == before


def test_no_memory(worker: Worker) -> None:
    worker.agent.refusal = "--state-memory is 1 GiB"
    seated(worker)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="--state-memory is 1 GiB"):
            worker.link.buffer(STATE, 1000)
    assert len([one for one in worker.agent.said if isinstance(one, local.Want)]) == 1
    worker.agent.refusal = ""
    seated(worker, 2)
    assert commit(worker, 1, 1000) == 1


def test_a_host_that_is_short_of_memory_for_a_moment_is_asked_again(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_buffers, "REFUSED_S", 0.2)
    worker.agent.refusal = "no memory"
    seated(worker)
    with pytest.raises(CheckpointError, match="no memory"):
        worker.link.buffer(STATE, 1000)
    worker.agent.refusal = ""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        with contextlib.suppress(CheckpointError):
            assert commit(worker, 1, 1000) == 1
            return
    raise AssertionError("never asked again")


def test_waiting_for_a_buffer_ends_with_the_round(worker: Worker) -> None:
    worker.agent.serving = False
    seated(worker)
    worker.start(lambda: worker.link.buffer(STATE, 1000))
    worker.agent.expect(local.Want)
    worker.agent.send(local.Break(1, "gone"))
    with pytest.raises(RoundOver):
        worker.join()


def test_a_buffer_that_cannot_be_mapped_is_none(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    worker.agent.serving = False
    seated(worker)
    worker.start(lambda: worker.link.buffer(STATE, 1000))
    worker.agent.expect(local.Want)
    for size in (3000, 4000, 5000, 6000, 7000):
        worker.agent.send(local.Buffer(STATE, 4, size))
    with pytest.raises(CheckpointError, match="without its descriptor"):
        worker.join()


def test_without_a_thread_for_its_pages_a_buffer_comes_all_the_same(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def started(self: threading.Thread) -> None:
        if self.name == "edl-pages":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", started)
    seated(worker)
    worker.start(lambda: worker.link.buffer(STATE, LEAST_BYTES)[1].nbytes)
    assert worker.join() >= LEAST_BYTES
    heard(worker)


def test_pages_of_new_buffers_are_prepared_when_a_restore_is_over(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[int] = []
    monkeypatch.setattr(MappedMemory, "prepare", lambda self, accelerator: prepared.append(self.size))
    seated(worker)
    with worker.link.undisturbed():
        _, view = worker.link.buffer(STATE, 1000)
        assert prepared == []
    assert prepared == [len(view)]
    worker.link.buffer(OWN, 2000)
    assert len(prepared) == 2


def test_pieces(worker: Worker) -> None:
    worker.agent.kept[STATE, 1, 5, 0] = b"five"
    seated(worker)
    worker.link.send(local.Fetch(STATE, 1, 5, 0))
    worker.link.send(local.Fetch(OWN, 1, 5, 0))
    found = worker.link.piece(STATE, bytes)
    assert isinstance(found, tuple)
    memory, content = found
    assert content == b"five"
    memory.view[:1] = b"F"  # a private copy: nobody else sees it
    memory.close()
    assert worker.link.piece(OWN, bytes) == "nobody has it"
    assert worker.agent.kept[STATE, 1, 5, 0] == b"five"


def test_a_piece_of_an_earlier_question_is_passed_over(worker: Worker) -> None:
    seated(worker)
    worker.start(lambda: worker.link.piece(STATE, lambda view: bytes(view) if bytes(view[:3]) == b"new" else None))
    worker.agent.send_memory(local.Piece(STATE, 3), b"old")
    worker.agent.send_memory(local.Piece(STATE, 3), b"new")
    memory, content = worker.join()
    memory.close()
    assert content == b"new"


def test_a_piece_whose_descriptor_the_kernel_has_dropped_is_none(worker: Worker) -> None:
    """As when this process has as many descriptors as it may have."""
    seated(worker)
    worker.start(lambda: worker.link.piece(STATE, bytes))
    worker.agent.send(local.Piece(STATE, 3))
    assert "ulimit -n" in worker.join()


def test_a_refusal_of_an_earlier_round_is_passed_over(worker: Worker) -> None:
    """As when the only node that had that round's commit is gone, and its launcher's connection takes long to fail."""
    seated(worker)
    worker.agent.send(local.Break(1, "node b is gone"))
    seated(worker, 2)
    worker.start(lambda: worker.link.piece(STATE, bytes))
    worker.agent.send(local.NoPiece(STATE, "node b: no answer in time", 1))
    heard(worker)
    worker.agent.send_memory(local.Piece(STATE, 4), b"four")
    found = worker.join()
    assert isinstance(found, tuple), found
    found[0].close()
    assert found[1] == b"four"
    worker.link.send(local.Fetch(STATE, 1, 5, 0, 2))
    assert worker.link.piece(STATE, bytes) == "nobody has it"


def test_a_piece_of_an_earlier_round_does_not_take_the_place_of_this_rounds(worker: Worker) -> None:
    """As when a long transfer ends in the next round, which begins from a commit that is in memory here."""
    seated(worker)
    worker.agent.send(local.Break(1, "node b is gone"))
    seated(worker, 2)
    worker.agent.send_memory(local.Piece(STATE, 3, 2), b"new")
    worker.agent.send_memory(local.Piece(STATE, 3, 1), b"old")
    heard(worker)
    found = worker.link.piece(STATE, bytes)
    assert isinstance(found, tuple), found
    found[0].close()
    assert found[1] == b"new"


def test_pieces_nobody_took_are_dropped_with_the_next_place(worker: Worker) -> None:
    seated(worker)
    heard(worker)
    before = descriptors()
    for _ in range(10):
        worker.agent.send_memory(local.Piece(STATE, 3), b"old")
    seated(worker, 2)
    heard(worker)
    assert worker.link._pieces == {}
    assert descriptors() == before


def test_waiting_for_a_piece_ends_with_the_round(worker: Worker) -> None:
    seated(worker)
    worker.agent.send(local.Break(1, "gone"))
    with pytest.raises(RoundOver):
        worker.link.piece(STATE, bytes)


# --- the process -----------------------------------------------------------------------------------------------------


def test_a_forked_child_lets_go(worker: Worker) -> None:
    seated(worker)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            worker.link.arrive(1)
        except StateError as error:
            closed = worker.link._channel.fileno() < 0
            os.write(writing, f"{closed} {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    assert said.startswith("True a forked process can neither commit")
    assert worker.link.arrive(1) is BoundaryAction.PASS


def test_signals_interrupt_the_waiting(worker: Worker) -> None:
    class Stopped(Exception):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGUSR1, stop)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(Stopped):
            worker.link.wait_for_place()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert threading.current_thread() is threading.main_thread()
    seated(worker)  # and nothing is left locked


def test_without_an_agent_the_process_ends() -> None:
    import subprocess

    address, listener = connected()
    program = f"from edl.worker.link import Link; Link.connect({address!r}).wait_for_place()"
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    channel, _ = listener.accept()
    channel.close()
    listener.close()
    _, complaint = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, complaint) == (1, "edl: the launcher is gone, so this worker exits\n")


def test_a_listener_that_fails_does_not_deafen(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    def heard(body: str | None) -> None:
        raise RuntimeError("no way")

    worker.link.listen("data", heard)
    worker.agent.send(local.ServiceMessage("data", "word"))
    worker.agent.send(local.Reattached(1))
    seated(worker, 2)
    assert capfd.readouterr().err.count("no way") == 2
