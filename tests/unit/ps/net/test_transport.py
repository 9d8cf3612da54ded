"""Callers and endpoints of parameter servers, over real loopback sockets."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import socket
import threading

import numpy as np
import pytest

from edl.errors import ProtocolError, PsError
from ps.errors import DamagedFrame, HungUp, TimedOut, Unreachable
from ps.net.buffers import CAN_LEND, LENT_BYTES, Borrowed, LentBuffer
from ps.net.caller import EndpointLimits
from ps.net.connection import now_s
from ps.protocol.frames import UNASKED, Frame, FrameOp, pack
from ps.protocol.handshake import SERVER, TRAINER, CallerHello
from ps.protocol.messages import PserverAddress
from tests.support.ps_echo import (
    HOST,
    LONG_S,
    Echo,
    call,
    echo,
    impostor,
    introduced,
    messages,
    place,
)


@pytest.fixture(params=["tcp", "unix"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- requests --------------------------------------------------------------------------------------------------------


def test_bodies_of_all_sizes_come_back(kind: str) -> None:
    rng = np.random.default_rng(0)
    with echo() as made, contextlib.closing(call(place(made, kind))) as caller:
        assert ("unix" in caller.where) == (kind == "unix")
        for size in (0, 1, 4000, 4096, 5000, 100_000, 3_000_001, 9_000_000, 10):
            content = rng.integers(0, 256, size, np.uint8)
            head, parts = b"x" * (size // 1000), [content[: size // 3], content[size // 3 :]]
            answer = caller.request(FrameOp.PUSH, head, parts, deadline_s=LONG_S)
            assert (answer.op, answer.head) == (FrameOp.OK, head)
            assert bytes(answer.body) == content.tobytes()


def test_a_body_is_received_where_the_caller_wants_it(kind: str) -> None:
    with echo() as made, contextlib.closing(call(place(made, kind))) as caller:
        out = np.zeros((1000, 50), np.float32)
        asked: list[tuple[int, bytes]] = []

        def into(size: int, head: bytes) -> memoryview:
            asked.append((size, head))
            return out.data.cast("B")

        sent = np.arange(50_000, dtype=np.float32).reshape(1000, 50)
        caller.request(FrameOp.PULL, b"", [sent], deadline_s=LONG_S, into=into)
        assert np.array_equal(out, sent)
        moved = caller.request(FrameOp.PULL, b"moved", deadline_s=LONG_S, into=into)
        assert (moved.op, moved.json()) == (FrameOp.MOVED, {"placement_version": 9})
        assert asked == [(200_000, b"")]
        with pytest.raises(DamagedFrame, match="a body of 7 bytes where 200000 were expected"):
            caller.request(FrameOp.PULL, b"", [b"another"], deadline_s=LONG_S, into=into)


def test_an_answer_may_lie_in_memory_that_is_used_again() -> None:
    with echo() as made, contextlib.closing(call(made.tcp)) as caller:
        for body in (b"abc", b"x" * 500_000 + b"y", b"12"):
            assert bytes(caller.request(FrameOp.PULL, b"room", [body], deadline_s=LONG_S).body) == body[::-1]


# --- memory that is lent ---------------------------------------------------------------------------------------------

lending = pytest.mark.skipif(not CAN_LEND, reason="no memory can be lent here")


@lending
def test_large_answers_of_a_server_on_the_same_machine_are_seen_where_they_lie() -> None:
    rng = np.random.default_rng(0)
    with echo() as made, contextlib.closing(call(made.local)) as caller:
        content = np.zeros(0, np.uint8)
        for size in (LENT_BYTES, 10, 5_000_000, 300_000):
            content = rng.integers(0, 256, size, np.uint8)
            answer = caller.request(FrameOp.PULL, b"room", [content], deadline_s=LONG_S)
            assert bytes(answer.body) == content.tobytes()[::-1]
            assert answer.body.readonly == (size >= LENT_BYTES)
        out = np.zeros(300_000, np.uint8)
        caller.request(FrameOp.PULL, b"room", [content], deadline_s=LONG_S, into=lambda size, head: out.data)
        assert out.tobytes() == content.tobytes()[::-1]
        assert not caller.request(FrameOp.PULL, b"", [content], deadline_s=LONG_S).body.readonly  # it lies elsewhere


@lending
def test_answers_that_are_under_way_together_are_not_lent() -> None:
    """The second would be written over the first."""
    with echo() as made, contextlib.closing(call(made.local)) as caller:
        bodies = [bytes([number]) * LENT_BYTES for number in range(1, 4)]
        caller.request(FrameOp.PULL, b"room", [bodies[0]], deadline_s=LONG_S)
        for body in bodies:
            caller.send(FrameOp.PULL, b"room", [body], deadline_s=LONG_S)
        assert [bytes(caller.receive(deadline_s=LONG_S).body) for _ in bodies] == bodies


@lending
def test_nothing_stays_open(kind: str) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with echo() as made:
        for number in range(3):
            caller = call(place(made, kind), CallerHello(TRAINER, number))
            for size in (200_000, 2_000_000):
                caller.request(FrameOp.PULL, b"room", [bytes(size)], deadline_s=LONG_S)
            (caller.abort if number else caller.close)()
        made.until(lambda: len(made.left) == 3)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_body_that_nobody_has_lent_is_refused() -> None:
    lent = pack(FrameOp.OK, 2, b"", [memoryview(bytes(100))], check=True, lent=True)
    with impostor(lent) as server, pytest.raises(DamagedFrame, match="was not requested"):
        call(server).request(FrameOp.PULL, b"", deadline_s=LONG_S)


@lending
@lending
def test_without_descriptors_for_lent_memory_answers_are_sent_through_the_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    content = os.urandom(2 * LENT_BYTES)
    with echo() as made, contextlib.closing(call(place(made, "unix"))) as caller:
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", full)
            assert bytes(caller.request(FrameOp.PULL, b"room", [content], deadline_s=LONG_S).body) == content[::-1]
        larger = os.urandom(4 * LENT_BYTES)
        assert bytes(caller.request(FrameOp.PULL, b"room", [larger], deadline_s=LONG_S).body) == larger[::-1]


def test_only_memory_that_stays_is_borrowed() -> None:
    borrowed = Borrowed()
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 1000)
    with pytest.raises(ProtocolError, match="not sealed against shrinking"):
        borrowed.take(file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    with pytest.raises(ProtocolError, match="10 bytes in 0 bytes"):
        borrowed.body(10)
    lent = LentBuffer()
    lent.room(LENT_BYTES)[:5] = b"hello"
    borrowed.take(os.dup(lent.file_to_send()))
    assert bytes(borrowed.body(5)) == b"hello"
    assert lent.file_to_send() == -1
    with pytest.raises(ProtocolError, match="bytes of lent memory"):
        borrowed.body(2 * LENT_BYTES)
    lent.close()
    assert bytes(borrowed.body(5)) == b"hello"


def test_shared_memory_is_referenced_by_its_position() -> None:
    lent = LentBuffer()
    assert not lent.holds([memoryview(b"abc")])
    room = lent.room(1000)
    assert lent.holds([room]) and lent.holds([room[:300], room[300:500]])
    assert not lent.holds([]) and not lent.holds([room[1:]]) and not lent.holds([room[:300], room[301:]])
    assert not lent.holds([room[:10], memoryview(b"abc")])
    lent.close()


# --- words and connections -------------------------------------------------------------------------------------------


def test_the_server_knows_how_long_a_caller_waits() -> None:
    with echo() as made, contextlib.closing(call(made.tcp)) as caller:
        assert caller.request(FrameOp.PULL, b"how long", deadline_s=17.5).json() == {"wait_s": 17.5}


def test_errors_of_a_handler_are_answers(caplog: pytest.LogCaptureFixture) -> None:
    with echo() as made, contextlib.closing(call(made.tcp)) as caller:
        answer = caller.request(FrameOp.PULL, b"ps error", deadline_s=LONG_S)
        assert (answer.op, answer.json()) == (
            FrameOp.REFUSED,
            {"kind": "error", "text": "table user: row 5 is too large"},
        )
        assert caplog.records == []
        answer = caller.request(FrameOp.PULL, b"defect", deadline_s=LONG_S)
        assert answer.json() == {"kind": "internal", "text": "ValueError: a defect"}
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        assert caller.request(FrameOp.PULL, b"on", deadline_s=LONG_S).head == b"on"


def test_messages_arrive_unasked() -> None:
    with echo() as made, contextlib.closing(call(made.tcp)) as caller:
        heard: list[tuple[FrameOp, int, bytes, bytes]] = []
        caller.heard = lambda frame: heard.append((frame.op, frame.request, frame.head, bytes(frame.body)))
        assert caller.request(FrameOp.PULL, b"push", deadline_s=LONG_S).head == b"push"
        assert heard == [(FrameOp.CONTROL, UNASKED, b"unasked", b"word")]
        assert caller.request(FrameOp.PING, deadline_s=LONG_S).op is FrameOp.OK
        assert [op for _, op, _ in made.seen] == [FrameOp.PULL]


def test_many_threads_share_a_caller(kind: str) -> None:
    with echo() as made, contextlib.closing(call(place(made, kind))) as caller:
        wrong: list[bytes] = []

        def ask(number: int) -> None:
            for turn in range(30):
                head = f"{number}-{turn}".encode()
                if caller.request(FrameOp.PULL, head, [head * 100], deadline_s=LONG_S).head != head:
                    wrong.append(head)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == [] and len(made.seen) == 240


def test_a_hundred_connections() -> None:
    with echo() as made:
        callers = [call(made.local if number % 2 else made.tcp, CallerHello(TRAINER, number)) for number in range(100)]
        for number, caller in enumerate(callers):
            assert caller.request(FrameOp.PULL, str(number).encode(), deadline_s=LONG_S).head == str(number).encode()
        assert sorted(peer.number for peer in made.endpoint.peers) == list(range(100))
        for caller in callers:
            caller.close()
        made.until(lambda: len(made.left) == 100)
        assert made.lost == [] and made.endpoint.peers == ()


# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_is_answered_together_and_in_order(kind: str) -> None:
    with echo(limits=EndpointLimits(unanswered=8)) as made, contextlib.closing(call(place(made, kind))) as line:
        heads = [b"wait", *(str(number).encode() for number in range(300))]
        sent = [line.send(FrameOp.STREAM, head, [head * 10], deadline_s=LONG_S) for head in heads]
        made.go_on.set()  # all lie there by now
        answered = [0]
        while answered[-1] < sent[-1]:
            answer = line.receive(deadline_s=LONG_S)
            assert answer.op is FrameOp.OK
            answered.append(answer.request)
        assert [head for _, _, head in made.seen] == heads
        assert [after - before for before, after in itertools.pairwise(answered)] == [9] * 33 + [4]


def test_a_stream_tells_what_failed() -> None:
    with echo() as made, contextlib.closing(call(made.tcp, CallerHello(SERVER, 2))) as line:
        good = [line.send(FrameOp.STREAM, b"good", deadline_s=LONG_S) for _ in range(5)]
        bad = line.send(FrameOp.STREAM, b"moved", deadline_s=LONG_S)
        answers: list[Frame] = []
        while not answers or answers[-1].request < bad:
            answers.append(line.receive(deadline_s=LONG_S))
        assert (answers[-1].op, answers[-1].request) == (FrameOp.MOVED, bad)
        assert answers[-2].request == good[-1]


def test_waiting_for_acknowledgements_in_vain_breaks_nothing() -> None:
    with echo() as made, contextlib.closing(call(made.tcp, CallerHello(SERVER, 2))) as line:
        with pytest.raises(TimedOut):
            line.receive(deadline_s=0.01)
        assert not line.broken
        number = line.send(FrameOp.STREAM, b"", deadline_s=LONG_S)
        assert line.receive(deadline_s=LONG_S).request == number


def test_waiting_callers_are_woken_when_the_connection_is_aborted() -> None:
    with echo() as made:
        line = call(made.tcp, CallerHello(SERVER, 2))
        failed: list[Exception] = []

        def wait() -> None:
            try:
                line.receive(deadline_s=LONG_S)
            except PsError as error:
                failed.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        line.abort()
        thread.join(LONG_S)
        assert isinstance(failed[0], Unreachable) and "aborted" in str(failed[0])
        made.until(lambda: len(made.lost) == 1)


# --- deadlines, deaths -----------------------------------------------------------------------------------------------


def test_a_server_that_does_not_answer_fails_at_the_deadline(kind: str) -> None:
    with echo() as made:
        caller = call(place(made, kind))
        begun_s = now_s()
        with pytest.raises(TimedOut, match=r"n1-1 \(.*no answer in time"):
            caller.request(FrameOp.PULL, b"wait", deadline_s=0.05)
        assert now_s() - begun_s >= 0.05
        assert caller.broken
        with pytest.raises(Unreachable, match="the connection is closed"):
            caller.request(FrameOp.PULL, b"", deadline_s=LONG_S)
        peer = made.seen[0][0]
        made.until(lambda: peer.gone)  # seen by who works for it still
        made.go_on.set()
        made.until(lambda: made.lost == [peer] and made.left == [peer])


def test_a_server_that_accepts_nothing_fails_at_the_deadline(kind: str) -> None:
    with echo() as made:
        caller = call(place(made, kind))
        number = caller.send(FrameOp.PULL, b"wait", deadline_s=LONG_S)
        assert number and made.waiting.wait(LONG_S)
        with pytest.raises(TimedOut):
            caller.send(FrameOp.PUSH, b"", [bytes(64 << 20)], deadline_s=0.05)
        assert caller.broken


def test_nobody_there() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TimedOut, match=rf"pserver-5 \({HOST}:{port}\): no answer in time"):
            call(PserverAddress(5, "pserver-5", HOST, port), deadline_s=0.05)
    with pytest.raises(Unreachable, match=rf"pserver-5 \({HOST}:{port}\): Connection refused"):
        call(PserverAddress(5, "pserver-5", HOST, port))


def test_a_unix_socket_that_is_gone_is_no_obstacle() -> None:
    with echo() as made:
        there = PserverAddress(1, "n1-1", HOST, made.endpoint.port, "edl-ps-nobody", made.endpoint.machine)
        elsewhere = PserverAddress(1, "n1-1", HOST, made.endpoint.port, made.endpoint.path, "another-machine")
        for server in (there, elsewhere):
            with contextlib.closing(call(server)) as caller:
                assert "unix" not in caller.where


def test_a_server_that_dies_is_seen_at_once(kind: str) -> None:
    made = Echo()
    caller = call(place(made, kind))
    failed: list[Exception] = []

    def ask() -> None:
        try:
            caller.request(FrameOp.PULL, b"wait", deadline_s=LONG_S)
        except PsError as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert made.waiting.wait(LONG_S)
    made.endpoint.stop(wait_s=0)
    thread.join(LONG_S)
    assert isinstance(failed[0], HungUp) and not failed[0].definite
    made.go_on.set()
    made.endpoint.stop(wait_s=LONG_S)
    assert made.lost == []  # it knows that it went itself


def test_a_peer_that_says_farewell_is_not_lost() -> None:
    with echo() as made:
        call(made.tcp).close()
        made.until(lambda: len(made.left) == 1)
        call(made.tcp, CallerHello(TRAINER, 4)).abort()
        made.until(lambda: len(made.lost) == 1)
        assert [peer.number for peer in made.left] == [3, 4]
        assert made.lost[0].number == 4
        assert made.left[0].push(FrameOp.CONTROL) is False


def test_a_peer_that_dies_in_the_middle_of_a_frame_is_lost() -> None:
    with echo() as made:
        raw, _ = introduced(made.tcp)
        data = pack(FrameOp.PUSH, 5, b"head", [memoryview(bytes(1000))], check=True)
        raw.sendall(data + bytes(500))
        raw.close()
        made.until(lambda: len(made.lost) == 1)
        assert made.seen == []


def test_a_peer_that_creeps_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    with echo(limits=EndpointLimits(frame_s=0.02)) as made, introduced(made.tcp)[0] as raw:
        raw.sendall(pack(FrameOp.PUSH, 5, b"head", [memoryview(bytes(1000))], check=True)[:20])
        made.until(lambda: len(made.lost) == 1)
        assert raw.recv(10) == b""
        late = "no answer in time: nothing was received, 36 bytes missing"
        assert messages(caplog) == [f"closing the connection of trainer 3 (n1/0): {late}"]


def test_a_peer_that_takes_no_answer_is_closed() -> None:
    """Others are served meanwhile. The limit leaves time for the request, which is large as well."""
    with echo(limits=EndpointLimits(frame_s=3.0, slowest_bytes_per_s=1e12)) as made, introduced(made.tcp)[0] as raw:
        body = bytes(32 << 20)
        raw.sendall(pack(FrameOp.PULL, 5, b"", [memoryview(body)], check=True) + body)
        with contextlib.closing(call(made.tcp, CallerHello(TRAINER, 4))) as other:
            assert other.request(FrameOp.PULL, b"", deadline_s=LONG_S).op is FrameOp.OK
            made.until(lambda: [peer.number for peer in made.lost] == [3])
