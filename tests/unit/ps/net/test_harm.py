"""Damaged frames, garbage, and peers that are slow, silent or impersonated."""

from __future__ import annotations

import contextlib
import mmap

import pytest

from edl.errors import ProtocolError
from ps.errors import DamagedFrame, Denied, HungUp
from ps.net.buffers import BodyBuffer
from ps.net.caller import EndpointLimits, EndpointPeer, machine_id
from ps.net.connection import FrameConnection, PlainSocket, now_s
from ps.protocol.frames import HEADER_BYTES, FrameOp, pack
from ps.protocol.handshake import MASTER, OPENING_BYTES, TRAINER, CallerHello, Calling
from tests.support.ps_echo import (
    HELLO,
    LONG_S,
    SECRET,
    call,
    dial,
    echo,
    impostor,
    introduced,
    messages,
)

GOOD = pack(FrameOp.PUSH, 5, b"head", [memoryview(b"body" * 10)], check=True) + b"body" * 10
DAMAGE = {
    "magic": (0, "it begins with"),
    "op": (4, "the header of a frame was damaged"),
    "length of the head": (8, "the header of a frame was damaged"),
    "length of the body": (25, "the header of a frame was damaged"),
    "checksum of the body": (41, "the header of a frame was damaged"),
    "checksum of the header": (HEADER_BYTES - 1, "the header of a frame was damaged"),
    "head": (HEADER_BYTES, "the head of a frame (PUSH, 4 bytes) was damaged"),
    "body": (HEADER_BYTES + 4 + 39, "the body of a frame (PUSH, 40 bytes) was damaged"),
}


@pytest.mark.parametrize("where", DAMAGE)
def test_damage_closes_that_connection_only_with_one_line(where: str, caplog: pytest.LogCaptureFixture) -> None:
    offset, expected = DAMAGE[where]
    with (
        echo() as made,
        contextlib.closing(call(made.tcp, CallerHello(TRAINER, 4))) as other,
        introduced(made.tcp)[0] as raw,
    ):
        data = bytearray(GOOD)
        data[offset] ^= 0x10
        raw.sendall(data)
        made.until(lambda: [peer.number for peer in made.lost] == [3])
        assert raw.recv(10) == b""
        (message,) = messages(caplog)
        assert message.startswith("closing the connection of trainer 3 (n1/0)") and expected in message
        assert made.seen == []
        assert other.request(FrameOp.PULL, b"fine", deadline_s=LONG_S).head == b"fine"


@pytest.mark.parametrize("where", DAMAGE)
def test_a_damaged_answer_is_refused(where: str) -> None:
    offset, expected = DAMAGE[where]
    data = bytearray(pack(FrameOp.OK, 2, b"head", [memoryview(b"body" * 10)], check=True) + b"body" * 10)
    data[offset] ^= 0x10
    with impostor(bytes(data)) as server:
        caller = call(server)
        with pytest.raises(DamagedFrame, match=r"parameter server n1-1 \(") as raised:
            caller.request(FrameOp.PULL, b"", deadline_s=LONG_S)
        assert expected.replace("PUSH", "OK") in str(raised.value)
        assert caller.broken


def test_an_answer_to_another_question_is_refused() -> None:
    with impostor(pack(FrameOp.OK, 99, check=True)) as server, pytest.raises(DamagedFrame, match="was never sent"):
        call(server).request(FrameOp.PULL, b"", deadline_s=LONG_S)


def test_a_wrong_secret_is_refused_by_either_side(caplog: pytest.LogCaptureFixture) -> None:
    with echo() as made:
        with pytest.raises(Denied, match="does not know the secret") as raised:
            call(made.local, secret="another")
        assert raised.value.kind == "token"
        with dial(made) as raw:
            connection = FrameConnection(PlainSocket(raw), check=True)
            connection.write_bytes(Calling("another").opening + bytes(32), now_s() + LONG_S)
            connection.read(64, now_s() + LONG_S)
            refusal = connection.read_frame(now_s() + LONG_S)
            assert (refusal.op, refusal.json()["kind"]) == (FrameOp.REFUSED, "token")
            with pytest.raises(HungUp):
                connection.idle(now_s() + LONG_S)
        assert "closing the connection of an unauthenticated peer: refused (token): wrong secret" in messages(caplog)
        assert made.endpoint.peers == () and made.left == []


def test_peers_can_be_refused_by_what_they_say() -> None:
    def met(peer: EndpointPeer) -> tuple[str, str] | None:
        return ("fenced", "another Master rules") if peer.role == MASTER and peer.hello.token < 8 else None

    with echo(met=met, greeting={"history": 3}) as made:
        with pytest.raises(Denied, match="another Master rules") as raised:
            call(made.tcp, CallerHello(MASTER, token=7))
        assert raised.value.kind == "fenced"
        with contextlib.closing(call(made.tcp, CallerHello(MASTER, token=8))) as caller:
            assert caller.greeting == {"history": 3}
        made.until(lambda: len(made.left) == 1)


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(200), bytes(OPENING_BYTES), b"\x16\x03\x01" + bytes(300)],
    ids=["HTTP", "zeros", "TLS"],
)
def test_garbage_is_hung_up_on(garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with echo() as made, dial(made) as raw:
        raw.sendall(garbage)
        with contextlib.suppress(ConnectionResetError):
            assert raw.recv(10) == b""
        made.endpoint.stop(wait_s=LONG_S)
        (message,) = messages(caplog)
        assert "another protocol" in message


def test_nothing_large_is_taken_from_strangers() -> None:
    with echo() as made, dial(made) as raw:
        connection = FrameConnection(PlainSocket(raw), check=True)
        calling = Calling(SECRET)
        connection.write_bytes(calling.opening, now_s() + LONG_S)
        connection.write_bytes(calling.answer(connection.read(64, now_s() + LONG_S)), now_s() + LONG_S)
        connection.write_bytes(
            pack(FrameOp.HELLO, 1, HELLO.pack(), [memoryview(bytes(100))], check=False), now_s() + LONG_S
        )
        with pytest.raises(HungUp):
            connection.idle(now_s() + LONG_S)


def test_a_request_that_is_none_closes_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    with echo(limits=EndpointLimits(body_bytes=1000)) as made:
        for data, why in (
            (pack(FrameOp.OK, 5, check=True), "OK is not a request"),
            (pack(FrameOp.HELLO, 5, check=True), "HELLO is not a request"),
            (pack(FrameOp.PUSH, 5, b"", [memoryview(bytes(1001))], check=True), "a body of 1001 bytes"),
        ):
            with introduced(made.tcp)[0] as raw:
                raw.sendall(data)
                assert raw.recv(10) == b""
            assert why in messages(caplog)[-1]


def test_silent_strangers_are_hung_up_on_after_a_while() -> None:
    with (
        echo(limits=EndpointLimits(greeting_s=0.02)) as made,
        dial(made) as raw,
    ):
        assert raw.recv(10) == b""


def test_too_many_strangers_do_not_keep_friends_out() -> None:
    with echo(limits=EndpointLimits(strangers=3, greeting_s=1000 * LONG_S)) as made, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(dial(made)) for _ in range(6)]
        with contextlib.closing(call(made.tcp)) as caller:
            assert caller.request(FrameOp.PULL, b"in", deadline_s=LONG_S).head == b"in"
        for oldest in strangers[:3]:
            assert oldest.recv(10) == b""


def test_a_frame_that_is_too_large_breaks_nothing() -> None:
    with echo() as made, contextlib.closing(call(made.tcp)) as caller:
        untouched = mmap.mmap(-1, 1 << 30)
        with pytest.raises(ProtocolError, match="Ask for less at a time"):
            caller.request(FrameOp.PUSH, b"", [untouched, b"x"], deadline_s=LONG_S)
        assert caller.request(FrameOp.PULL, b"on", deadline_s=LONG_S).head == b"on"


def test_an_arena_grows_and_stays() -> None:
    arena = BodyBuffer()
    small = arena.room(10)
    small[:] = b"0123456789"
    large = arena.room(5_000_000)
    large[-1] = 7
    assert bytes(small) == b"0123456789"  # whoever still looks at it sees no change
    assert arena.room(5_000_000)[-1] == 7
    assert len(arena.room(0)) == 0


def test_machine_id_is_that_of_this_network_namespace() -> None:
    assert machine_id() == machine_id() and machine_id()
